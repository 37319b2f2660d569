"""A trace of an engine in words: a row for each of the last steps, then where the time went. Pure:
from a trace to lines of ASCII."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from interlace.bench.engine_trace.figures import Copied, StepRow, Totals, rows_of, totals_of
from interlace.bench.engine_trace.shape import Window, step_trace_of, window_of
from interlace.bench.step_trace.text import chart_of
from interlace.bench.step_trace.text import lines as step_lines
from interlace.engine.engine_trace import EngineTrace, LeftOut

LAST_STEPS = 20
"""Rows, if nothing else is said."""
_HEAD = (
    " step tokens reqs      mode       ms computing  waiting       longest   pause"
    " MB loaded  GB/s hidden"
)
_LEGEND = "numbers are layers; . waits at a gate, - embed and head"


def lines(trace: EngineTrace, num_steps: int = LAST_STEPS) -> list[str]:
    """All of it, with the last `num_steps` steps as rows."""
    rows, left_out = rows_of(trace), _left_out(trace.left_out)
    if not rows:
        return [*_facts(trace), "no step was timed", *left_out]
    return [
        *(*_facts(trace), ""),
        *(_HEAD, *map(_row, rows[-num_steps:]), ""),
        *(*_totals(totals_of(trace)), *left_out, ""),
        *step_view(trace),
    ]


def _facts(trace: EngineTrace) -> Iterator[str]:
    facts = trace.facts
    machine = facts.machine or facts.device
    with_what = f"with {facts.kv_connector}" if facts.kv_connector else "without a connector"
    yield f"{facts.model}, {facts.dtype}, on {machine}, {with_what}; times of the {facts.clock}"
    finished = sum(one.finished_s is not None for one in trace.requests)
    requests = f"{_count(len(trace.requests), 'request')}, {finished:,} finished"
    yield f"{_count(len(trace.steps), 'step')}, {requests}"


def _row(row: StepRow) -> str:
    longest = "-"
    if row.longest_wait is not None:
        longest = f"{_ms(row.longest_wait.seconds)} at {row.longest_wait.layer:>2}"
    load, loaded = row.load, f"{'-':>9} {'-':>5} {'-':>6}"
    if load.num_bytes:
        loaded = f"{load.num_bytes / 1e6:9,.1f} {load.gb_per_s:5.1f} {load.hidden_share:6.0%}"
    return (
        f"{row.step_id:5} {row.num_tokens:6,} {len(row.request_ids):4,} {row.mode:>9}"
        f" {_ms(row.step_s):>8} {_ms(row.compute_s):>9} {_ms(row.wait_s):>8} {longest:>13}"
        f" {_ms(row.pause_s):>7} {loaded}"
    )


def _totals(totals: Totals) -> Iterator[str]:
    if not totals.num_steps:
        return
    whole = totals.total_s
    yield _named("all steps", f"{_ms(whole):>9} ms from the first begin to the last end")
    for name, seconds, more in (
        ("computing", totals.compute_s, ""),
        ("waiting", totals.wait_s, _gates(totals)),
        ("no step", totals.pause_s, "" if not totals.pause_s else " on the device"),
    ):
        share = seconds / whole if whole else 0.0
        yield _named(name, f"{_ms(seconds):>9} ms {share:6.1%}{more}")
        if name == "waiting" and totals.most_waited is not None:
            yield _named("", _worst(totals))
    for name, copied in (("loads", totals.load), ("saves", totals.save)):
        if copied.num_bytes:
            yield _named(name, _copied(copied))
    if totals.plan_s is not None and totals.apply_s is not None:
        plan, apply = _ms(totals.plan_s), _ms(totals.apply_s)
        text = f"{plan} ms from planned to handed over, {apply} ms to apply it (medians)"
        yield _named("event loop", f"a step takes {text}")


def _gates(totals: Totals) -> str:
    if totals.most_waited is None:
        return " at no gate"
    return f" at the gates of {_count(totals.num_waiting_layers, 'layer')}"


def _worst(totals: Totals) -> str:
    assert totals.most_waited is not None, "a layer waited"
    assert totals.longest_wait is not None
    layer, seconds = totals.most_waited
    step_id, longest = totals.longest_wait
    at = f"at layer {longest.layer} in step {step_id}"
    return f"most at layer {layer}: {_ms(seconds)} ms; longest {_ms(longest.seconds)} ms, {at}"


def _copied(copied: Copied) -> str:
    rate = (
        f"{copied.num_bytes / 1e6:,.1f} MB in {_ms(copied.busy_s)} ms, {copied.gb_per_s:.1f} GB/s"
    )
    return f"{rate}; {copied.hidden_share:.1%} of that beside computing"


def _left_out(left_out: LeftOut) -> Iterator[str]:
    counts = dataclasses.asdict(left_out)
    told = [f"{number:,} {name}" for name, number in counts.items() if number]
    if told:
        yield _named("left out", ", ".join(told))


def step_view(trace: EngineTrace, step_id: int | None = None) -> list[str]:
    """A step, or the last ones, as rows of characters; all figures of a step that loads layer by
    layer. Raises: `ConfigError` if there is no such step."""
    window = window_of(trace, step_id)
    if step_id is not None:
        found = step_trace_of(trace, window.steps[0])
        if found is not None:
            return step_lines(found)
    return [_title(window), *chart_of(window.lanes, window.end_ns), _LEGEND]


def _title(window: Window) -> str:
    ids = [step.step_id for step in window.steps]
    return f"step {ids[0]}" if len(ids) == 1 else f"steps {ids[0]} to {ids[-1]}"


def to_dict(
    trace: EngineTrace, num_steps: int = LAST_STEPS, step_id: int | None = None
) -> dict[str, object]:
    """The same figures, in seconds and bytes, for JSON; of the steps those of one alone, if it is
    named. Raises: `ConfigError` if there is no such step."""
    rows = rows_of(trace)[-num_steps:]
    if step_id is not None:
        window_of(trace, step_id)
        rows = [row for row in rows_of(trace) if row.step_id == step_id]
    return {
        "facts": dataclasses.asdict(trace.facts),
        "steps": [_row_dict(row) for row in rows],
        "totals": _totals_dict(totals_of(trace)),
        "left_out": dataclasses.asdict(trace.left_out),
    }


def _row_dict(row: StepRow) -> dict[str, object]:
    wait = row.longest_wait
    return {
        **dataclasses.asdict(row),
        "longest_wait": None if wait is None else wait._asdict(),
        "load": _copied_dict(row.load),
    }


def _totals_dict(totals: Totals) -> dict[str, object]:
    longest, most = totals.longest_wait, totals.most_waited
    return {
        **dataclasses.asdict(totals),
        "longest_wait": None
        if longest is None
        else {"step_id": longest[0], **longest[1]._asdict()},
        "most_waited": None if most is None else most._asdict(),
        "load": _copied_dict(totals.load),
        "save": _copied_dict(totals.save),
    }


def _copied_dict(copied: Copied) -> dict[str, object]:
    rates = {"gb_per_s": copied.gb_per_s, "hidden_share": copied.hidden_share}
    return {**dataclasses.asdict(copied), **rates}


def _named(name: str, text: str) -> str:
    return f"{name:12}{text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def titles(window: Window, rows: Sequence[StepRow]) -> tuple[str, str]:
    """Of a picture: (what it shows, the figures of that)."""
    shown = [row for row in rows if row.step_id in {step.step_id for step in window.steps}]
    num_tokens = sum(row.num_tokens for row in shown)
    busy_s = sum(row.load.busy_s for row in shown)
    beside_s = sum(row.load.beside_s for row in shown)
    loaded = Copied(sum(row.load.num_bytes for row in shown), busy_s, beside_s)
    what = f"{_title(window)}: {num_tokens:,} tokens computed in {window.end_ns / 1e6:.1f} ms"
    waits = f"waiting {_ms(sum(row.wait_s for row in shown))} ms"
    if not loaded.num_bytes:
        return what, waits
    load = f"{loaded.num_bytes / 1e6:,.1f} MB loaded at {loaded.gb_per_s:.1f} GB/s"
    return what, f"{load}, {loaded.hidden_share:.0%} of it beside computing; {waits}"
