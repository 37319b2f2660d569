"""Comparisons in pairs: whose turn is first, when enough pairs were run, what the cost is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.arms import Shape
from interlace.bench.paired import Comparison, Paired, compare
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.layers.checkpoint.loading import Silent


class TimedArm:
    """Takes the seconds of a script, then the last ones for ever."""

    def __init__(self, name: str, log: list[tuple[str, object]], *seconds: float) -> None:
        self.name = name
        self._log = log
        self._seconds = list(seconds)

    def forget(self) -> None:
        self._log.append((self.name, "forget"))

    async def run(self, work: Work) -> Sample:
        self._log.append((self.name, work.prompts))
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return Sample(1, work.prompt_tokens, seconds, 0.0, 0, 0)


async def run(base: TimedArm, other: TimedArm, repeats: int, bar: float = 3.0) -> Paired:
    what = Comparison("saving", lambda sample: sample.first_token_s, bar)
    source = WorkSource(vocab_size=50, seed=0)
    return await compare(what, (base, other), Shape(8, 1, repeats), source, Silent())


async def test_pairs_get_one_new_prompt_and_take_turns_first() -> None:
    log: list[tuple[str, object]] = []
    await run(TimedArm("base", log, 1.0), TimedArm("other", log, 1.02), 1)
    assert [name for name, what in log if what == "forget"] == [
        *("other", "base"),
        *("base", "other"),
        *("other", "base"),
    ]
    assert all(what == "forget" for _, what in log[::2]), "before every run"
    prompts = [what for _, what in log if what != "forget"]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3


async def test_the_first_pair_warms_up_and_a_steady_cost_needs_few_pairs() -> None:
    paired = await run(TimedArm("base", [], 9.0, 1.0), TimedArm("other", [], 1.0, 1.02), 5)
    assert len(paired.base) == len(paired.other) == 10
    assert paired.cost.median == pytest.approx(2.0)
    assert paired.noise == pytest.approx(0.0)
    cost, noise = paired.checks("saving", 3.0)
    assert (cost.name, cost.at_most, cost.met) == ("saving", 3.0, True)
    assert (noise.name, noise.at_most, noise.met) == ("noise of saving", 3.0, True)


async def test_a_noisy_cost_gets_as_many_pairs_as_are_allowed() -> None:
    other = TimedArm("other", [], *(1.0, 1.5) * 8, 1.0)
    paired = await run(TimedArm("base", [], 1.0), other, 2)
    assert len(paired.base) == 16
    assert paired.noise > 3.0
    assert not paired.checks("saving", 3.0)[1].met


async def test_it_goes_on_until_the_noise_is_small_beside_the_bar() -> None:
    noise = random.Random(0)
    seconds = [1 + noise.gauss(0, 0.02) for _ in range(50)]

    async def pairs(bar: float) -> int:
        other = TimedArm("other", [], *seconds)
        return len((await run(TimedArm("base", [], 1.0), other, 5, bar)).base)

    assert 10 < await pairs(1.5) < await pairs(1.0) <= 40


def test_the_error_of_a_median() -> None:
    assert Spread.of([5.0]).median_error == 0.0
    assert Spread.of([3.0, 1.0]).median_error == 1.0
    assert Spread.of([1.0, 2.0, 4.0]).median_error == 1.5
    steps = [float(n) for n in range(100)]
    assert Spread.of(steps).median_error == pytest.approx(5.0, abs=0.5)
    assert Spread.of([*steps, 1e9]).median_error == pytest.approx(5.0, abs=0.5)
    assert Spread.of([1.0, 2.0] * 5).median_error == 0.5, "two values that take turns"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.randoms())
def test_an_error_is_within_the_spread_in_any_order(
    samples: list[float], random: random.Random
) -> None:
    spread = Spread.of(samples)
    assert 0 <= spread.median_error <= (spread.high - spread.low) / 2
    random.shuffle(samples)
    assert Spread.of(samples).median_error == spread.median_error
