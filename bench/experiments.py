"""Decoding and prefill: which cases are run, which figures and which bars come out.

Knows arms, not engines: `bench/session.py` builds those. `bench/hits.py` has cached prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from interlace.bench import figures
from interlace.bench.apparatus import Bench, Outcome, trace_figures
from interlace.bench.arms import Case, Grid, run_in_turns
from interlace.bench.figures import Figures
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.engine.errors import InterlaceError

DECODE_BARS = {1: 1.3, 8: 4.5}
"""Batch size -> least ratio of tokens/s, all requests together, to transformers at batch 1."""
PREFILL_BAR = 1.0

Samples = list[list[Sample]]
"""For each case, its repeats."""


async def decode(bench: Bench, grid: Grid) -> Outcome:
    """Tokens per second from the first token to the last, at each size of the work.

    Raises: `InterlaceError` if a prompt was cached. Cancelling stops after the run in progress.
    """
    cases = _cases(bench, grid)
    samples = await _run(bench, cases, grid, "decode")
    context = grid.output_tokens // 2  # in the middle of the run, beside the prompt
    rows, checks = [], []
    for case, taken in zip(cases, samples, strict=True):
        parts = figures.decode_rate(taken) | figures.step(taken) | figures.first_token(taken)
        steps = Spread.of(s.median_step_s for s in taken)
        cached = case.prompt_tokens + context
        parts |= _memory_share(bench, case, cached, steps) | figures.lag(taken)
        rows.append(Row(grid.name(case), parts | await _traced(bench, case, grid)))
        bar = bench.bars.decode(case.batch_size, cached)
        checks += _bar_check(bench, case, f"decode step, ms: {grid.name(case)}", steps, bar)
    ratios = _ratios(
        bench,
        grid,
        list(zip(cases, samples, strict=True)),
        lambda sample: sample.decode_tokens_per_s,
        DECODE_BARS.get,
        "decode tokens/s",
    )
    return tuple(rows), (*ratios, *checks, figures.lag_check(samples))


async def prefill(bench: Bench, grid: Grid) -> Outcome:
    """Time to the first token of prompts never seen before, and prompt tokens per second.

    Raises: `InterlaceError` if a prompt was cached. Cancelling stops after the run in progress.
    """
    grid = dataclasses.replace(grid, output_tokens=1)
    cases = _cases(bench, grid)
    samples = await _run(bench, cases, grid, "prefill")
    rows, checks = [], []
    for case, taken in zip(cases, samples, strict=True):
        parts = figures.prefill_rate(taken) | figures.first_token(taken)
        times = Spread.of(s.first_token_s for s in taken)
        parts |= _matrix_share(bench, case, times) | figures.lag(taken)
        rows.append(Row(grid.name(case), parts | await _traced(bench, case, grid)))
        bar = bench.bars.prefill(case.batch_size, case.prompt_tokens)
        checks += _bar_check(bench, case, f"prefill, ms: {grid.name(case)}", times, bar)
    ratios = _ratios(
        bench,
        grid,
        list(zip(cases, samples, strict=True)),
        lambda sample: sample.prefill_tokens_per_s,
        lambda batch_size: PREFILL_BAR if batch_size == 1 else None,
        "prefill tokens/s",
    )
    return tuple(rows), (*ratios, *checks, figures.lag_check(samples))


def refuse_cached(samples: Iterable[Sample]) -> None:
    """Raise `InterlaceError` if a prompt that must be new was partly cached or loaded."""
    cached = sum(sample.cached_tokens + sample.loaded_tokens for sample in samples)
    if cached:
        raise InterlaceError(
            f"{cached} tokens of new prompts came from the prefix cache or a KV connector, so the "
            "figures would be too good; use an engine that has run nothing else, and longer "
            "prompts."
        )


def _cases(bench: Bench, grid: Grid) -> list[Case]:
    """For each length of prompts ours at each batch size, and theirs at batch 1 right after ours,
    or last."""
    cases = []
    for prompt_tokens in grid.prompt_tokens:
        for size in grid.batch_sizes:
            cases += [Case(arm, size, prompt_tokens) for arm in bench.ours]
            if bench.theirs is not None and size == 1:
                cases.append(Case(bench.theirs, 1, prompt_tokens))
        if bench.theirs is not None and 1 not in grid.batch_sizes:
            cases.append(Case(bench.theirs, 1, prompt_tokens))
    return cases


async def _run(bench: Bench, cases: Sequence[Case], grid: Grid, title: str) -> Samples:
    samples = await run_in_turns(cases, grid, bench.source, bench.progress, title)
    refuse_cached(sample for taken in samples for sample in taken)
    return samples


async def _traced(bench: Bench, case: Case, grid: Grid) -> Figures:
    """See `trace_figures`."""
    if bench.tracer is None or case.arm is bench.theirs:
        return {}
    work = bench.source.make(case.batch_size, case.prompt_tokens, grid.output_tokens)
    return await trace_figures(bench, case.arm, work)


def _memory_share(bench: Bench, case: Case, cached: int, steps: Spread) -> Figures:
    """The median step, and the time to read what it must read as a share of it."""
    if bench.yardstick is None:
        return {}
    least = bench.yardstick.limits.reading_s(bench.yardstick.size(case.batch_size, cached, 1))
    median = {"median step ms": Spread.of(s * 1e3 for s in steps.samples)}
    return median | figures.share("of memory limit", least, steps)


def _matrix_share(bench: Bench, case: Case, times: Spread) -> Figures:
    """The time to compute what must be computed as a share of the time to the first token."""
    if bench.yardstick is None:
        return {}
    size = bench.yardstick.size(case.batch_size, 0, case.prompt_tokens)
    return figures.share("of matrix limit", bench.yardstick.limits.computing_s(size), times)


def _bar_check(
    bench: Bench, case: Case, name: str, seconds: Spread, bar_ms: float | None
) -> list[Check]:
    """Our median against the machine's bar, if it has one."""
    if bar_ms is None or case.arm is bench.theirs:
        return []
    return [Check(name, seconds.median * 1e3, at_most=bar_ms)]


def _ratios(
    bench: Bench,
    grid: Grid,
    measured: Sequence[tuple[Case, Sequence[Sample]]],
    rate: Callable[[Sample], float],
    bar: Callable[[int], float | None],
    what: str,
) -> list[Check]:
    """Median rate of each of our cases by that of transformers at batch 1 with such prompts."""
    medians = [(case, Spread.of(rate(s) for s in taken).median) for case, taken in measured]
    theirs = {case.prompt_tokens: m for case, m in medians if case.arm is bench.theirs}
    return [
        Check(
            f"{what}: {grid.name(case)} / transformers, batch 1",
            median / theirs[case.prompt_tokens],
            at_least=None if bench.on_gpu else bar(case.batch_size),
        )
        for case, median in medians
        if theirs and case.arm is not bench.theirs
    ]
