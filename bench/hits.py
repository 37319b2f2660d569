"""Prompts that are cached, whole or but for new tokens at their end: when the first token comes.

Knows arms, not engines, as `bench/experiments.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.bench import figures
from interlace.bench.apparatus import Bench, Outcome, trace_figures
from interlace.bench.arms import Arm
from interlace.bench.figures import Figures
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.errors import InterlaceError

HIT_BAR = 1.5
"""Most decode steps until the first token of a cached prompt, on a CPU."""
HIT_OUTPUT_TOKENS = 17
MAX_UNCACHED_TOKENS = 16
"""Of a cached prompt: the last block, since its last token is computed in any case."""


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
            parts = figures.cached(taken) | figures.first_token(taken) | figures.step(taken)
            rows.append(Row(arm.name, parts | figures.lag(taken) | {"first token / step": ratio}))
            name = f"{arm.name}: first token of a cached prompt, decode steps"
            bar = None if bench.on_gpu else HIT_BAR
            checks.append(Check(name, ratio.median, at_most=bar))
            everything.append(taken)
    return tuple(rows), (*checks, figures.lag_check(everything))


async def _one_hit(arm: Arm, source: WorkSource, prompt_tokens: int) -> Sample:
    cold = source.make(1, prompt_tokens, 1)
    await arm.run(cold)
    sample = await arm.run(dataclasses.replace(cold, output_tokens=HIT_OUTPUT_TOKENS))
    _refuse_missed(sample, prompt_tokens, prompt_tokens - MAX_UNCACHED_TOKENS)
    return sample


async def hit_with_new(bench: Bench, cached: int, new: Sequence[int], repeats: int) -> Outcome:
    """First token of a prompt whose first `cached` tokens are cached, for each number of new ones.

    One prefix is computed once for each arm; whatever follows it was never seen before. Raises:
    `InterlaceError` if the prefix was not found whole, as when `cached` is no multiple of the
    block size, or the pool has no room. Cancelling stops after the run in progress.
    """
    prefixes = [_Prefix(arm, bench.source, cached) for arm in bench.ours]
    rows, checks, everything = [], [], []
    measured = await _measure(bench, prefixes, new, repeats)
    for prefix, count, taken in measured:  # traced when all is measured: see `trace_figures`
        name = f"{prefix.arm.name}, {cached} cached + {count} new"
        parts = figures.cached(taken) | _figures(bench, cached, count, taken)
        parts |= await trace_figures(bench, prefix.arm, prefix.work_behind(count))
        rows.append(Row(name, parts))
        checks += _checks(bench, cached, count, taken, name)
        everything.append(taken)
    return tuple(rows), (*checks, figures.lag_check(everything))


class _Prefix:
    """One prefix that an arm computes once, and prompts that go on behind it."""

    def __init__(self, arm: Arm, source: WorkSource, cached: int) -> None:
        self.arm = arm
        self._source = source
        self._work = source.make(1, cached, 1)

    async def compute(self) -> None:
        """Bring it into the cache."""
        await self.arm.run(self._work)

    def work_behind(self, count: int) -> Work:
        """The prefix and `count` tokens of which the first was never seen behind it."""
        return self._source.behind(self._work, count)

    async def run_behind(self, count: int) -> Sample:
        """Time such a prompt. Raises: `InterlaceError` if not all of the prefix was cached."""
        sample = await self.arm.run(self.work_behind(count))
        _refuse_missed(sample, self._work.prompt_tokens, self._work.prompt_tokens)
        return sample


async def _measure(
    bench: Bench, prefixes: Sequence[_Prefix], new: Sequence[int], repeats: int
) -> list[tuple[_Prefix, int, list[Sample]]]:
    """For each prefix and number of new tokens its samples, taken in turns."""
    measured: list[tuple[_Prefix, int, list[Sample]]] = []
    with bench.progress.task("hit", len(prefixes) * (repeats + 1) * len(new)) as advance:
        for prefix in prefixes:
            await prefix.compute()
            samples: dict[int, list[Sample]] = {count: [] for count in new}
            for round_number in range(repeats + 1):
                for count, taken in samples.items():
                    sample = await prefix.run_behind(count)
                    if round_number > 0:  # round 0 warms up
                        taken.append(sample)
                    advance(1)
            measured += [(prefix, count, taken) for count, taken in samples.items()]
    return measured


def _figures(bench: Bench, cached: int, new: int, taken: Sequence[Sample]) -> Figures:
    """With the longer of reading and computing as a share of the time to the first token."""
    found = figures.first_token(taken)
    if bench.yardstick is not None:
        least = bench.yardstick.limits.least_s(bench.yardstick.size(1, cached, new))
        found |= figures.share("of limit", least, Spread.of(s.first_token_s for s in taken))
    return found | figures.lag(taken)


def _checks(bench: Bench, cached: int, new: int, taken: Sequence[Sample], name: str) -> list[Check]:
    bar = bench.bars.hit(cached, new)
    if bar is None:
        return []
    median = Spread.of(s.first_token_s * 1e3 for s in taken).median
    return [Check(f"first token, ms: {name}", median, at_most=bar)]


def _refuse_missed(sample: Sample, asked: int, least: int) -> None:
    """Raise `InterlaceError` if fewer than `least` of `asked` tokens were cached."""
    if sample.cached_tokens < least:
        raise InterlaceError(
            f"only {sample.cached_tokens} of {asked} prompt tokens were cached the second "
            "time; turn prefix caching on and give the KV pool room for the whole prompt."
        )
