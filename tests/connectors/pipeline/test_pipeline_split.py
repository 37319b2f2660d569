"""How a prompt is split between computing and loading, and loads from the back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.connectors.pipeline.messages import Share, ShareReport
from interlace.connectors.pipeline.sched_split import (
    LONGEST_STEP_S,
    SHORTEST_STEP_S,
    PlannedStep,
    Split,
    balance,
    stop_of_step,
)
from interlace.connectors.pipeline.worker_backward import (
    MOST_SLICE_CALLS,
    BackwardTransfer,
    split_back,
)
from interlace.connectors.pipeline.worker_feeder import Feeder
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.errors import ConnectorError
from interlace.layers.page_copies import Copied, CopyWay, Run, Runs
from interlace.layers.virtual_lanes import VirtualLanes

SIZE = 16
"""Tokens of a block."""


# -------------------------------------------------------------------- the split


@given(
    st.integers(0, 20),
    st.integers(1, 60),
    st.floats(0, 5),
    st.floats(0.001, 5),
    st.floats(0.001, 5),
)
def test_balance_finds_the_best(
    first: int, count: int, step: float, token: float, load: float
) -> None:
    end = first + count

    def compute_s(block: int) -> float:
        return step + token * (block - first) if block > first else 0.0

    def load_s(block: int) -> float:
        return load * (end - block)

    def worse(block: int) -> float:
        return max(compute_s(block), load_s(block))

    found = balance(first, end, compute_s, load_s)
    assert worse(found) == min(map(worse, range(first, end + 1)))


def compute_s(first: int, end: int) -> float:
    """A millisecond a block."""
    return 0.001 * max(0, end - first) / SIZE


def load_in(seconds: float) -> Callable[[int], float]:
    return lambda num_blocks: seconds * num_blocks


def step(number: int, computed: int, planned: int | None = None) -> PlannedStep:
    """In blocks."""
    end = computed if planned is None else planned
    return PlannedStep(number, computed * SIZE, end * SIZE, max_inflight_steps=2)


def test_the_load_takes_over_at_once_if_computing_is_behind() -> None:
    split = Split(7, 80, 100, SIZE)
    split.follow(ShareReport(7, 0, 20, 18))
    share = split.adjust(step(2, 10, 20), compute_s, load_in(0.001))
    # 72 blocks are left, 10 of them by this step: 36 for each.
    assert share == Share(7, 1, 100 - 46)
    assert split.compute_end == 46 * SIZE
    assert split.adjust(step(3, 20, 30), compute_s, load_in(0.001)) is None, "as it should be"


def test_computing_takes_over_when_the_load_has_answered() -> None:
    split = Split(7, 10, 100, SIZE)
    assert split.adjust(step(1, 0, 10), compute_s, load_in(0.001)) is None
    split.follow(ShareReport(7, 0, 90, 10))
    assert split.adjust(step(2, 10), compute_s, load_in(0.001)) is None, "step 1 may go on"
    share = split.adjust(step(3, 10), compute_s, load_in(0.001))
    assert share == Share(7, 1, 50)
    assert split.compute_end == 10 * SIZE
    split.follow(ShareReport(7, 0, 90, 20))
    assert split.compute_end == 10 * SIZE, "that was said before it heard"
    assert split.adjust(step(4, 10), compute_s, load_in(0.001)) is None
    split.follow(ShareReport(7, 1, 55, 30))
    assert split.compute_end == 45 * SIZE, "some more was under way"


def test_what_an_ended_load_said_last_holds() -> None:
    split = Split(7, 80, 100, SIZE)
    split.follow(ShareReport(7, 0, 20, 10))
    assert split.adjust(step(2, 0, 8), compute_s, load_in(0.001)) is not None
    split.follow(ShareReport(7, 0, 20, 20, has_ended=True))
    assert split.compute_end == 80 * SIZE
    assert split.cancel() is None
    assert split.adjust(step(3, 8, 16), compute_s, load_in(0.001)) is None


def test_a_step_is_not_added_for_a_small_gain() -> None:
    split = Split(7, 10, 12, SIZE)
    split.follow(ShareReport(7, 0, 2, 0))
    assert split.adjust(step(9, 10), lambda *_: 0.002, load_in(0.001)) is None


def test_unknown_rates_move_nothing() -> None:
    split = Split(7, 10, 90, SIZE)
    assert split.adjust(step(2, 0, 5), lambda *_: None, load_in(1)) is None
    assert split.adjust(step(9, 10), compute_s, lambda _: None) is None


# -------------------------------------------------------------------- the load


NUM_LAYERS = 3


class NoteCopies:
    """Notes what is copied; blocks of `bad` fail."""

    num_layers = NUM_LAYERS
    page_bytes = 10

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.bad = bad
        self.copied: list[int] = []

    def prepare(self, runs: list[Run] | tuple[Run, ...]) -> Runs:
        if any(record < 0 for record, _, _ in runs):
            raise ConnectorError("no such record")
        return Runs(runs, sum(count for _, _, count in runs), CopyWay.STRIDED)

    def load(self, layer: int, runs: Runs) -> Copied:
        blocks = [block + i for _, block, count in runs.runs for i in range(count)]
        if self.bad.intersection(blocks):
            raise OSError("broken")
        if layer == NUM_LAYERS - 1:
            self.copied += reversed(blocks)
        return Copied(CopyWay.STRIDED, len(runs.runs), 10 * runs.num_blocks)

    save = load

    def load_layers(self, layers: range, runs: Runs) -> Iterator[Copied]:
        return (self.load(layer, runs) for layer in layers)

    save_layers = load_layers


@given(st.data())
def test_split_back(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), max_size=6))
    runs = [(100 * i, 1000 * i, count) for i, count in enumerate(counts)]
    before, back = split_back(runs, data.draw(st.integers(0, sum(counts))))

    def blocks(some: list[Run]) -> list[Run]:
        return [(r + i, b + i, 1) for r, b, n in some for i in range(n)]

    assert blocks(before) + blocks(back) == blocks(runs)


@given(st.integers(0, 2**32), st.sampled_from(["seed", "eager", "lazy"]))
def test_a_share_may_change_at_any_time(seed: int, policy: str) -> None:
    """What it loads comes from the back, without a gap, and never less than was under way."""
    draw = random.Random(seed)
    num_blocks = draw.randrange(1, 40)
    bad = frozenset(draw.sample(range(num_blocks), 1)) if draw.random() < 0.3 else frozenset()
    copies = NoteCopies(bad)
    watch = ClockStopwatch(lambda: 0.0)
    feeder = Feeder(
        VirtualLanes(seed, policy).lane("bulk"),
        copies,
        copies.load_layers,
        window_bytes=100,
        watch=watch,
    )
    cut = draw.randrange(num_blocks + 1)
    runs = ((0, 0, cut), (cut, cut, num_blocks - cut))
    load = BackwardTransfer(
        copies,
        tuple(run for run in runs if run[2]),
        draw.randrange(num_blocks + 1),
        after=None,
        window_bytes=draw.choice([1, 100, 10_000]),
        watch=watch,
    )
    feeder.append(load)
    for _ in range(draw.randrange(12)):
        feeder.poll(may_feed=True)
        if draw.random() < 0.3:
            asked = draw.randrange(num_blocks + 1)
            under_way = load.share
            load.set_share(asked)
            assert asked <= load.share <= max(asked, under_way)
            feeder.append(load)
    for _ in range(10_000):
        if load.is_done:
            break
        feeder.poll(may_feed=True)
    assert load.is_done
    from_the_back = list(range(num_blocks))[::-1]
    assert copies.copied == from_the_back[: len(copies.copied)]
    missing = {block + i for _, block, count in load.missing() for i in range(count)}
    if load.error is None:
        assert not missing
        assert len(copies.copied) == load.share == load.num_loaded
    else:
        assert bad <= missing
        assert missing | set(from_the_back[: load.num_loaded]) == set(from_the_back[: load.share])
        assert load.num_loaded <= len(copies.copied)


def test_runs_that_do_not_fit_are_refused_as_a_whole() -> None:
    copies = NoteCopies()
    watch = ClockStopwatch(lambda: 0.0)
    with pytest.raises(ConnectorError):
        BackwardTransfer(
            copies, ((0, 0, 4), (-1, 4, 1)), 2, after=None, window_bytes=1, watch=watch
        )


@pytest.mark.parametrize("run_blocks", [1, 7, 400])
def test_no_slice_keeps_the_host_for_long(run_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs there are; what is in few runs is not cut for that."""
    monkeypatch.setattr(NoteCopies, "num_layers", 32)
    runs = tuple((2 * i, 2 * i, run_blocks) for i in range(0, 400, run_blocks))
    load = BackwardTransfer(
        NoteCopies(), runs, 400, after=None, window_bytes=1 << 20, watch=ClockStopwatch(lambda: 0.0)
    )
    lane, taken = VirtualLanes(0).lane("bulk"), 0
    while (one := load.next_slice) is not None:
        assert one.num_calls <= MOST_SLICE_CALLS
        taken += one.runs.num_blocks
        load.take(lane.record())
    assert taken == 400
    assert load.num_fed <= {1: 150, 7: 25, 400: 1}[run_blocks]


# -------------------------------------------------------------------- steps of a front


def steps_of(end: int, token_s: float, pair_s: float = 0.0) -> list[int]:
    """Tokens of the steps that compute [0, end), each as far as it should go."""

    def compute_s(first: int, stop: int) -> float:
        return token_s * (stop - first) + pair_s * (stop**2 - first**2) / 2

    stops = [0]
    while stops[-1] < end:
        stops.append(stop_of_step(stops[-1], end, 16, compute_s))
        assert stops[-1] % 16 == 0
        assert stops[-1] > stops[-2]
    return [b - a for a, b in itertools.pairwise(stops)]


def test_a_front_that_takes_long_is_computed_in_steps_that_take_about_equally_long() -> None:
    assert steps_of(1600, LONGEST_STEP_S / 500) == [512, 512, 576]
    assert steps_of(1600, LONGEST_STEP_S / 1600) == [1600]
    assert steps_of(2304, LONGEST_STEP_S / 1600) == [2304], "not half as long again"
    assert steps_of(2400, LONGEST_STEP_S / 1600) == [1280, 1120]
    rising = steps_of(4096, 1e-5, 6e-8)
    assert rising[:-1] == sorted(rising[:-1], reverse=True), "later tokens take longer"
    assert len(rising) > 1
    assert not any(tokens % 256 for tokens in rising[:-1])


def test_steps_are_as_short_as_others_want_to_wait_but_never_very_short() -> None:
    """Of 256 tokens, 31 ms, at least. Others need steps anyway, so what they cost counts for
    nothing, but for the wait."""
    compute_s = lambda first, stop: 0.005 + 0.0001 * (stop - first)  # noqa: E731
    stops = [
        stop_of_step(0, 1024, 16, compute_s, others_wait_s=wait_s)
        for wait_s in (0.2, 0.108, 0.107, 0.06, 0.03, 0.02, SHORTEST_STEP_S, 0.0)
    ]
    assert stops == [1024, 1024, 512, 512, 256, 256, 256, 256]
    assert stop_of_step(0, 1024, 16, compute_s) == 1024
    assert stop_of_step(0, 128, 16, compute_s, others_wait_s=0.02) == 128
    assert stop_of_step(0, 1024, 16, lambda first, stop: 0.0, others_wait_s=0.02) == 1024


@given(least_s=st.floats(0, 0.03), token_s=st.floats(1e-5, 1e-4), wait_s=st.floats(0.02, 0.1))
def test_no_step_makes_others_wait_much_longer_than_they_want_to(
    least_s: float, token_s: float, wait_s: float
) -> None:
    """Longer by what rounding to 256 tokens adds, and where a step alone takes half of that."""

    def compute_s(first: int, stop: int) -> float:
        return least_s + token_s * (stop - first)

    stop = stop_of_step(0, 8192, 16, compute_s, others_wait_s=wait_s)
    longest_s = max(wait_s, least_s + wait_s / 2)
    assert compute_s(0, stop) <= longest_s + token_s * 256


def test_one_step_if_times_are_not_known_or_blocks_take_longer() -> None:
    assert stop_of_step(0, 1600, 16, lambda first, end: None) == 1600
    assert steps_of(992, 1.0) == [256] * 3 + [224]
    assert steps_of(20_000 // 16 * 16, 1e-3) == [256] * 78 + [32]


@pytest.mark.parametrize("fixed_s", [0.004, 0.012, 0.025, 0.035, 0.045])
@pytest.mark.parametrize("token_s", [1e-5, 6e-5])
def test_cutting_a_front_costs_little_however_much_a_step_costs(
    fixed_s: float, token_s: float
) -> None:
    def compute_s(first: int, end: int) -> float:
        return fixed_s + token_s * (end - first)

    first = taken_s = 0.0
    while first < 8192:
        stop = stop_of_step(int(first), 8192, 16, compute_s)
        taken_s += compute_s(int(first), stop)
        first = stop
    assert taken_s <= 1.15 * compute_s(0, 8192)


@given(
    first=st.integers(0, 2000),
    blocks=st.integers(0, 200),
    token_s=st.floats(1e-7, 1e-2),
)
def test_a_step_ends_at_a_block_within_the_front(first: int, blocks: int, token_s: float) -> None:
    end = (-(-first // 16) + blocks) * 16
    stop = stop_of_step(first, end, 16, lambda a, b: token_s * (b - a))
    assert stop % 16 == 0
    assert stop <= end
    assert stop > first or stop == end
