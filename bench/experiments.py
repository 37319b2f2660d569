"""The benchmarks themselves: which cases are run, which figures and which bars come out.

Knows arms, not engines: `bench/session.py` builds those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from interlace.bench.arms import Arm, Case, Shape, run_in_turns
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import WorkSource
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Progress

DECODE_BARS = {1: 1.3, 8: 4.5}
"""Batch size -> least ratio of tokens/s, all requests together, to transformers at batch 1."""
PREFILL_BAR = 1.0
HIT_BAR = 1.5
"""Most decode steps until the first token of a cached prompt."""
LAG_BAR_MS = 20.0
HIT_OUTPUT_TOKENS = 17
MAX_UNCACHED_TOKENS = 16
"""Of a cached prompt: the last block, since its last token is computed in any case."""

Figures = dict[str, Spread]
Outcome = tuple[tuple[Row, ...], tuple[Check, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """The arms of one benchmark, and what feeds and shows them."""

    ours: Sequence[Arm]
    theirs: Arm | None
    source: WorkSource
    progress: Progress


async def decode(bench: Bench, batch_sizes: Sequence[int], shape: Shape) -> Outcome:
    """Tokens per second from the first token to the last, at each batch size.

    Raises: `InterlaceError` if a prompt was cached. Cancelling stops after the run in progress.
    """
    cases = _cases(bench, batch_sizes)
    samples = await run_in_turns(cases, shape, bench.source, bench.progress, "decode")
    refuse_cached(sample for taken in samples for sample in taken)
    rows = tuple(Row(c.name, _decode_figures(s)) for c, s in zip(cases, samples, strict=True))
    checks = _ratios(
        bench,
        cases,
        samples,
        lambda sample: sample.decode_tokens_per_s,
        DECODE_BARS.get,
        "decode tokens/s",
    )
    return rows, (*checks, _lag_check(samples))


async def prefill(bench: Bench, batch_sizes: Sequence[int], shape: Shape) -> Outcome:
    """Time to the first token of prompts never seen before, and prompt tokens per second.

    Raises: `InterlaceError` if a prompt was cached. Cancelling stops after the run in progress.
    """
    cases = _cases(bench, batch_sizes)
    shape = dataclasses.replace(shape, output_tokens=1)
    samples = await run_in_turns(cases, shape, bench.source, bench.progress, "prefill")
    refuse_cached(sample for taken in samples for sample in taken)
    rows = tuple(Row(c.name, _prefill_figures(s)) for c, s in zip(cases, samples, strict=True))
    checks = _ratios(
        bench,
        cases,
        samples,
        lambda sample: sample.prefill_tokens_per_s,
        lambda batch_size: PREFILL_BAR if batch_size == 1 else None,
        "prefill tokens/s",
    )
    return rows, (*checks, _lag_check(samples))


async def hit(bench: Bench, prompt_tokens: int, repeats: int) -> Outcome:
    """First token of a prompt that was sent before, in units of one decode step.

    Each repeat sends a new prompt once to fill the cache and once to time it. Raises:
    `InterlaceError` if the second one missed. Cancelling stops after the run in progress.
    """
    rows, checks, everything = [], [], []
    with bench.progress.task("hit", len(bench.ours) * (repeats + 1)) as advance:
        for arm in bench.ours:
            taken = []
            for _ in range(repeats + 1):
                taken.append(await _one_hit(arm, bench.source, prompt_tokens))
                advance(1)
            taken = taken[1:]  # the first one warms up
            ratio = Spread.of(s.first_token_s / s.step_s for s in taken)
            rows.append(Row(arm.name, _hit_figures(taken) | {"first token / step": ratio}))
            name = f"{arm.name}: first token of a cached prompt, decode steps"
            checks.append(Check(name, ratio.median, at_most=HIT_BAR))
            everything.append(taken)
    return tuple(rows), (*checks, _lag_check(everything))


async def _one_hit(arm: Arm, source: WorkSource, prompt_tokens: int) -> Sample:
    cold = source.make(1, prompt_tokens, 1)
    await arm.run(cold)
    sample = await arm.run(dataclasses.replace(cold, output_tokens=HIT_OUTPUT_TOKENS))
    if sample.cached_tokens < prompt_tokens - MAX_UNCACHED_TOKENS:
        raise InterlaceError(
            f"only {sample.cached_tokens} of {prompt_tokens} prompt tokens were cached the second "
            "time; turn prefix caching on and give the KV pool room for the whole prompt."
        )
    return sample


def refuse_cached(samples: Iterable[Sample]) -> None:
    """Raise `InterlaceError` if a prompt that must be new was partly cached or loaded."""
    cached = sum(sample.cached_tokens + sample.loaded_tokens for sample in samples)
    if cached:
        raise InterlaceError(
            f"{cached} tokens of new prompts came from the prefix cache or a KV connector, so the "
            "figures would be too good; use an engine that has run nothing else, and longer "
            "prompts."
        )


def _cases(bench: Bench, batch_sizes: Sequence[int]) -> list[Case]:
    """Ours at each batch size, theirs at batch 1 right after ours."""
    cases = []
    for size in batch_sizes:
        cases += [Case(arm, size) for arm in bench.ours]
        if bench.theirs is not None and size == 1:
            cases.append(Case(bench.theirs, 1))
    if bench.theirs is not None and 1 not in batch_sizes:
        cases.append(Case(bench.theirs, 1))
    return cases


def _ratios(
    bench: Bench,
    cases: Sequence[Case],
    samples: Sequence[Sequence[Sample]],
    rate: Callable[[Sample], float],
    bar: Callable[[int], float | None],
    what: str,
) -> list[Check]:
    """Median rate of each of our cases by the median rate of transformers at batch 1."""
    if bench.theirs is None:
        return []
    medians = [Spread.of(rate(s) for s in taken).median for taken in samples]
    theirs = next(m for c, m in zip(cases, medians, strict=True) if c.arm is bench.theirs)
    return [
        Check(
            f"{what}: {case.name} / {bench.theirs.name}, batch 1",
            median / theirs,
            at_least=bar(case.batch_size),
        )
        for case, median in zip(cases, medians, strict=True)
        if case.arm is not bench.theirs
    ]


def _lag_check(samples: Sequence[Sequence[Sample]]) -> Check:
    lags = [s.worst_lag_s for taken in samples for s in taken if s.worst_lag_s is not None]
    return Check("worst event-loop lag, ms", max(lags, default=0.0) * 1e3, at_most=LAG_BAR_MS)


def _first_token(samples: Sequence[Sample]) -> Figures:
    return {"first token ms": Spread.of(s.first_token_s * 1e3 for s in samples)}


def _lag(samples: Sequence[Sample]) -> Figures:
    lags = [s.worst_lag_s * 1e3 for s in samples if s.worst_lag_s is not None]
    return {"worst lag ms": Spread.of(lags)} if lags else {}


def _step(samples: Sequence[Sample]) -> Figures:
    return {"ms/step": Spread.of(s.step_s * 1e3 for s in samples)}


def _decode_figures(samples: Sequence[Sample]) -> Figures:
    rate = {"tokens/s": Spread.of(s.decode_tokens_per_s for s in samples)}
    return rate | _step(samples) | _first_token(samples) | _lag(samples)


def _prefill_figures(samples: Sequence[Sample]) -> Figures:
    rate = {"prompt tokens/s": Spread.of(s.prefill_tokens_per_s for s in samples)}
    return rate | _first_token(samples) | _lag(samples)


def _hit_figures(samples: Sequence[Sample]) -> Figures:
    cached = {"cached tokens": Spread.of(s.cached_tokens for s in samples)}
    return cached | _first_token(samples) | _step(samples) | _lag(samples)
