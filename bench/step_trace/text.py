"""A timeline in words and in two rows of characters. Pure: from a trace to lines of ASCII."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from interlace.bench.step_trace.facts import HybridFacts, TraceFacts
from interlace.bench.step_trace.figures import StepFigures, figures_of
from interlace.bench.step_trace.trace import AnyTrace, HybridTrace, Span

WIDTH = 80
_NAME_WIDTH = 8
_COLUMNS = WIDTH - _NAME_WIDTH
_WAIT, _IDLE = ".", " "
_FILLS = "=#"
"""Of even and odd layers, or slices, so that neighbours can be told apart."""
_MOST_STEPS = 8
"""That are named one by one."""
_STEP_LEGEND = f"numbers are layers; {_WAIT} waits at a gate, - embed and head"
_HYBRID_LEGEND = "numbers are blocks of the prompt above, layers below; - embed and head"


def summary(trace: AnyTrace) -> list[str]:
    """What was run, and its figures."""
    figures = figures_of(trace)
    if isinstance(trace, HybridTrace):
        head = _hybrid_head(trace.facts)
        named = [*_figures(figures, "the shorter of the two"), *_meeting(trace.facts)]
    else:
        head = _step_head(trace.facts)
        named = [*_figures(figures, "the load"), *_waits(figures)]
    return [*head, *(f"{name:18}{text}" for name, text in named)]


def _step_head(facts: TraceFacts) -> list[str]:
    tokens = f"{facts.loaded_tokens:,} tokens loaded, {facts.new_tokens:,} computed"
    step = f"step {facts.step_id}, request {facts.request_id}; times of the {facts.clock}"
    return [
        f"{facts.model}, {facts.dtype}, on {facts.machine}: {tokens}",
        f"{step}; {_layers(facts.group_size)} to a gate",
    ]


def _hybrid_head(facts: HybridFacts) -> list[str]:
    stored = facts.front_tokens + facts.loaded_tokens
    tokens = f"{stored:,} tokens from both ends, {facts.new_tokens:,} behind them"
    steps = ", ".join(f"{step.num_tokens:,}" for step in facts.steps[:_MOST_STEPS])
    if len(facts.steps) > _MOST_STEPS:
        steps += ", ..."
    return [
        f"{facts.model}, {facts.dtype}, on {facts.machine}: {tokens}",
        f"request {facts.request_id}; times of the {facts.clock}; tokens of each step: {steps}",
    ]


def _figures(figures: StepFigures, hideable: str) -> Iterator[tuple[str, str]]:
    yield "total", f"{_ms(figures.total_s)} ms"
    load = f"{figures.load_bytes / 1e6:,.1f} MB, {figures.load_gb_per_s:.1f} GB/s"
    yield "load", f"{_ms(figures.load_s)} ms for {load}"
    yield "compute", f"{_ms(figures.compute_s)} ms of work"
    yield "both lanes busy", f"{_ms(figures.both_s)} ms, {figures.hidden_share:.1%} of {hideable}"


def _meeting(facts: HybridFacts) -> Iterator[tuple[str, str]]:
    sides = f"{facts.front_tokens:,} tokens before it computed, {facts.loaded_tokens:,} loaded"
    yield "met", f"at block {facts.meeting_block:,} of {facts.num_blocks:,}: {sides}"
    count = len(facts.steps)
    yield "steps", f"{count:,}, the last one with {facts.steps[-1].num_tokens:,} tokens"


def _waits(figures: StepFigures) -> Iterator[tuple[str, str]]:
    waits = "       0 ms"
    if figures.longest_wait is not None:
        layer, seconds = figures.longest_wait
        waits = (
            f"{_ms(figures.wait_s)} ms at the gates of {_layers(figures.num_waits)},"
            f" longest {seconds * 1e3:.3f} ms before layer {layer}"
        )
    yield "waits", waits


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.3f}"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def chart(trace: AnyTrace) -> list[str]:
    """Both lanes as rows of blocks, with a scale below them; no line is wider than `WIDTH`."""
    return chart_of({"load": trace.load, "compute": trace.compute}, trace.end_ns)


def chart_of(lanes: Mapping[str, Sequence[Span]], end_ns: int) -> list[str]:
    """Likewise, of any lanes."""
    rows = [f"{name:{_NAME_WIDTH}}{_row(spans, end_ns)}".rstrip() for name, spans in lanes.items()]
    last = f"{end_ns / 1e6:.3f} ms"
    return [*rows, f"{'':{_NAME_WIDTH}}0{last:>{_COLUMNS - 1}}"]


def legend(trace: AnyTrace) -> str:
    """What the characters of `chart` mean."""
    return _HYBRID_LEGEND if isinstance(trace, HybridTrace) else _STEP_LEGEND


def _row(spans: Sequence[Span], end_ns: int) -> str:
    cells = [_IDLE] * _COLUMNS
    for number, span in enumerate(spans):
        begin, end = _column(span.begin_ns, end_ns), _column(span.end_ns, end_ns)
        if span.wait is not None:
            waited = _column(span.wait.end_ns, end_ns)
            cells[begin:waited] = _WAIT * (waited - begin)
            begin = waited
        cells[begin:end] = _block(span, number, end - begin)
    return "".join(cells)


def _column(time_ns: int, end_ns: int) -> int:
    """The nearest bound between characters. Only integers, so that it is the same anywhere."""
    return (2 * time_ns * _COLUMNS + end_ns) // (2 * end_ns) if end_ns else 0


def _block(span: Span, number: int, width: int) -> str:
    """The label, if a character is left to tell its end, and a fill. `number`: on its lane."""
    fill = "-"
    if span.part in ("layer", "slice"):
        fill = _FILLS[(number if span.layer is None else span.layer) % len(_FILLS)]
    label = "" if span.part == "slice" and span.blocks is None else span.label
    label = label if len(label) < width else ""
    return label + fill * (width - len(label))


def lines(trace: AnyTrace) -> list[str]:
    """All of it."""
    return [*summary(trace), "", *chart(trace), legend(trace)]
