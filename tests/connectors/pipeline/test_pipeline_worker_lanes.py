"""LayerPipeline over virtual lanes and threads: bytes, order, failures, windows, the end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes_kit import (
    NUM_BLOCKS,
    NUM_LAYERS,
    PAGE_BYTES,
    PATIENCE_S,
    LanesKit,
    block_lane,
    blocks_of,
)

from interlace.connectors.pipeline import worker_feeder
from interlace.connectors.pipeline.layer_pipeline import PipelinedLoad, Visit
from interlace.connectors.pipeline.worker_feeder import FORWARD_VISIT_S, VISIT_S
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.errors import ConfigError, ConnectorError, LaneClosedError
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import BATCHED_RUN_BLOCKS, CopyWay, Run, Runs
from interlace.layers.virtual_lanes import VirtualLanes


@st.composite
def some_parts(draw: st.DrawFn) -> list[list[Run]]:
    """Parts whose blocks, and records, are all different."""
    blocks = draw(st.permutations(range(1, NUM_BLOCKS)))
    parts: list[list[Run]] = []
    record = 0
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 8))
        parts.append([(record + i, blocks[record + i], 1) for i in range(count)])
        record += count
    if draw(st.booleans()):
        parts.append([(0, 1, 1)][: max(0, 1 - record)])
    return parts


policies = st.sampled_from(["seed", "eager", "lazy"])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=policies,
    parts=some_parts(),
    group_size=st.integers(1, 6),
    num_polls=st.integers(0, 3),
)
def test_each_layer_is_there_when_its_wait_returns(
    seed: int, policy: str, parts: list[list[Run]], group_size: int, num_polls: int
) -> None:
    kit = LanesKit(VirtualLanes(seed, policy), group_size=group_size)
    load = kit.pipeline.submit_load(parts, 1)
    for layer in range(NUM_LAYERS):
        for _ in range(num_polls):
            kit.pipeline.poll()
        kit.pipeline.wait(layer)
        kit.pipeline.wait(layer)
        assert all(kit.is_loaded(layer, part) for part in parts)
    kit.pipeline.finish_step()
    assert load.is_done
    assert load.errors == [None] * len(parts)
    touched = {block for part in parts for block in blocks_of(part)}
    assert kit.is_untouched([i for i in range(NUM_BLOCKS) if i not in touched])
    num_bytes = len(touched) * NUM_LAYERS * PAGE_BYTES
    assert load.stats.num_bytes == num_bytes
    assert torch.equal(kit.records, kit.was_records)


def test_threads_do_the_same() -> None:
    kit = LanesKit(ThreadLanes())
    parts = [[(0, 5, 3), (7, 20, 2)], [(3, 9, 4)]]
    load = kit.pipeline.submit_load(parts, 1)
    bulk = kit.pipeline.submit_bulk([(10, 1, 4)])
    for layer in range(NUM_LAYERS):
        kit.pipeline.wait(layer)
        assert all(kit.is_loaded(layer, part) for part in parts)
    assert load.errors == [None, None]
    kit.finish(bulk)
    assert kit.is_saved([(10, 1, 4)])
    save = kit.pipeline.submit_save([(20, 25, 3)])
    kit.finish(save)
    assert save.error is None
    assert kit.is_saved([(20, 25, 3)])
    assert torch.equal(kit.layers[0][25:28], kit.was_layers[0][25:28])
    assert kit.pipeline.close(PATIENCE_S)


# ---------------------------------------------------------------- failures


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=policies,
    layer=st.integers(0, NUM_LAYERS - 1),
    bad=st.integers(0, 2),
)
def test_a_copy_that_fails_fails_its_part_alone(
    seed: int, policy: str, layer: int, bad: int
) -> None:
    kit = LanesKit(VirtualLanes(seed, policy))
    parts: list[list[Run]] = [[(0, 1, 2)], [(4, 8, 3)], [(9, 20, 1)]]

    def fail(at: int, runs: Runs) -> None:
        if at == layer and list(runs.runs) == parts[bad]:
            raise OSError("the memory is gone")

    kit.copies.before = fail
    load = kit.pipeline.submit_load(parts, 1)
    for each in range(NUM_LAYERS):
        kit.pipeline.wait(each)
    kit.pipeline.finish_step()
    assert [str(error) for error in load.errors] == [
        "the memory is gone" if part == bad else "None" for part in range(3)
    ]
    assert all(kit.is_saved(part) for i, part in enumerate(parts) if i != bad)
    error = load.errors[bad]
    assert error is not None
    assert error.__traceback__ is None


def test_runs_that_do_not_fit_fail_their_part_and_copy_nothing_of_it() -> None:
    kit = LanesKit(VirtualLanes(0))
    load = kit.pipeline.submit_load([[(0, 1, 2), (23, 5, 2)], [(4, 8, 1)]], 1)
    kit.pipeline.finish_step()
    assert isinstance(load.errors[0], ConnectorError)
    assert load.errors[1] is None
    assert kit.is_untouched([1, 2, 5, 6])
    with pytest.raises(ConnectorError, match="does not fit"):
        kit.pipeline.submit_bulk([(23, 1, 2)])
    with pytest.raises(ConnectorError, match="does not fit"):
        kit.pipeline.submit_save([(0, 0, 1)])


def is_done(load: PipelinedLoad) -> bool:
    return load.is_done


def test_a_load_that_does_not_come_in_time_is_given_up_and_writes_no_more() -> None:
    kit = LanesKit(ThreadLanes(), deadline_s=0.01)
    let_go = block_lane(kit.pipeline._lane)
    load = kit.pipeline.submit_load([[(0, 1, 2)], [(4, 8, 1)]], 1)
    kit.pipeline.wait(0)
    assert ["within 0.01 s" in str(error) for error in load.errors] == [True, True]
    assert is_done(load), "its works were dropped"
    let_go.set()
    assert kit.is_untouched(range(NUM_BLOCKS))
    assert load.stats.num_bytes == 0
    assert kit.pipeline.close(PATIENCE_S)


def test_bulk_loads_and_saves_that_fail_stop_and_say_why() -> None:
    kit = LanesKit(VirtualLanes(0, "lazy"), window_bytes=4 * PAGE_BYTES)

    def fail(layer: int, runs: Runs) -> None:
        if layer == 2:
            raise OSError("no")

    kit.copies.before = fail
    load, save = kit.pipeline.submit_bulk([(0, 1, 4)]), kit.pipeline.submit_save([(9, 9, 4)])
    after = kit.pipeline.submit_bulk([(0, 20, 1)])
    kit.finish(load)
    kit.finish(save)
    kit.copies.before = lambda layer, runs: None
    kit.finish(after)
    assert [str(one.error) for one in (load, save, after)] == ["no", "no", "None"]
    assert kit.is_saved([(0, 20, 1)])
    assert load.stats.num_bytes < 4 * NUM_LAYERS * PAGE_BYTES
    assert load.stats.seconds is None


@pytest.mark.parametrize(
    "wrong", [{"group_size": 0}, {"window_bytes": 0}, {"deadline_s": 0.0}], ids=str
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        LanesKit(VirtualLanes(0), **wrong)


# ---------------------------------------------------------------- windows


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(1, 30), saves=st.booleans())
def test_no_more_than_a_window_is_queued(seed: int, window: int, saves: bool) -> None:
    lanes = VirtualLanes(seed)
    kit = LanesKit(lanes, window_bytes=window * PAGE_BYTES)
    feeder = kit.pipeline._store if saves else kit.pipeline._bulk
    submit = kit.pipeline.submit_save if saves else kit.pipeline.submit_bulk
    slice_bytes = max(PAGE_BYTES, window * PAGE_BYTES // 4)
    transfers = [submit([(4 * i, 5 * i + 1, 4)]) for i in range(5)]
    for _ in range(2000):
        kit.pipeline.poll()
        ahead = sum(one.num_bytes for *_, one in feeder._fed)
        assert ahead <= max(window * PAGE_BYTES, slice_bytes)
        if all(transfer.is_done for transfer in transfers):
            break
    assert [transfer.error for transfer in transfers] == [None] * 5
    assert all(kit.is_saved([(4 * i, 5 * i + 1, 4)]) for i in range(5))
    assert all(one.stats.num_bytes == 4 * NUM_LAYERS * PAGE_BYTES for one in transfers)
    assert feeder.is_idle


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 40), window=st.integers(8, 80))
def test_no_more_calls_than_so_many_are_queued_unless_somebody_hurries(
    seed: int, most: int, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_feeder, "MOST_CALLS", most)
        patch.setattr(worker_feeder, "MOST_QUEUED_CALLS", most + 10)
        kit = LanesKit(VirtualLanes(seed), window_bytes=window * PAGE_BYTES)
        feeder = kit.pipeline._bulk
        feeder._is_stream = True  # elsewhere calls take no longer than what they copy
        scattered: list[Run] = [(2 * i, 30 - 2 * i, 1) for i in range(10)]
        load = kit.pipeline.submit_bulk(scattered)
        most_calls = 0.0
        while not load.is_done:
            kit.pipeline.poll()
            calls = sum(one.num_calls for *_, one in feeder._fed)
            assert feeder._fed_calls == calls
            assert calls <= most or len(feeder._fed) == 1
            most_calls = max(most_calls, calls)
        assert load.error is None
        assert kit.is_saved(scattered)
        hurried = kit.pipeline.submit_from_the_back(scattered, 10, 1 << 20)
        calls = sum(one.num_calls for *_, one in feeder._fed)
        assert calls <= most + 10 or len(feeder._fed) == 1, "a forward is to be launched"
        kit.pipeline.poll()
        kit.pipeline.poll()
        assert sum(one.num_calls for *_, one in feeder._fed) > most_calls or hurried.is_done
        kit.finish(hurried)
        assert feeder._fed_calls == 0


def test_while_somebody_waits_slices_are_fed_for_a_moment_at_a_time() -> None:
    """And behind a forward none, once it is known that somebody will."""
    ticks = itertools.count()
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    clock = lambda: 0.9 * VISIT_S * next(ticks)  # noqa: E731
    kit = LanesKit(lanes, window_bytes=8 * PAGE_BYTES, clock=clock)
    assert not kit.pipeline.advance()
    load = kit.pipeline.submit_bulk([(0, 1, 8)])
    save = kit.pipeline.submit_save([(12, 12, 8)])
    fed = [(load.num_fed, save.num_fed)]
    for _ in range(3):
        assert kit.pipeline.advance()
        fed.append((load.num_fed, save.num_fed))
    assert fed == [(0, 0), (2, 2), (4, 4), (4, 4)], "up to the window"
    while not (load.is_done and save.is_done):
        for transfer in (load, save):
            assert transfer.last_gate is not None
            transfer.last_gate.wait(PATIENCE_S)
        kit.pipeline.advance()
    assert kit.is_saved([(0, 1, 8), (12, 12, 8)])
    assert not kit.pipeline.advance()


@pytest.mark.parametrize(("is_stream", "num_fed"), [(True, 2), (False, 4)])
def test_a_forward_that_is_to_be_launched_waits_for_feeding_a_moment(
    is_stream: bool, num_fed: int
) -> None:
    ticks = itertools.count()
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    clock = lambda: 0.9 * FORWARD_VISIT_S * next(ticks)  # noqa: E731
    kit = LanesKit(lanes, window_bytes=8 * PAGE_BYTES, clock=clock)
    kit.pipeline._bulk._is_stream = is_stream
    load = kit.pipeline.submit_bulk([(0, 1, 8)], begins_now=False)
    kit.pipeline.poll(Visit.BEFORE_FORWARD)
    assert load.num_fed == num_fed
    kit.pipeline.poll(Visit.BEHIND_FORWARD)
    assert load.num_fed == 4, "the window"


def test_what_was_kept_back_by_a_load_within_a_step_is_fed_behind_the_next_forward() -> None:
    """Else it would never be, where every step, or every second one, loads."""
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    kit = LanesKit(lanes, window_bytes=8 * PAGE_BYTES)
    kit.pipeline.advance()
    save = kit.pipeline.submit_save([(12, 12, 8)])
    within = kit.pipeline.submit_load([[(0, 1, 2)]], 1)
    assert not kit.pipeline.advance(), "not now"
    kit.pipeline.poll()
    assert save.num_fed == 0
    for gate in within.gates:
        assert gate.wait(PATIENCE_S)
    assert within.is_done
    kit.pipeline.poll()
    assert save.num_fed == 4, "a window"
    assert kit.pipeline.advance()
    for _ in range(100):
        kit.pipeline.poll()
    assert save.num_fed == 4, "from now on by advance"
    while not save.is_done:
        assert save.last_gate is not None
        save.last_gate.wait(PATIENCE_S)
        kit.pipeline.advance()
    assert kit.is_saved([(12, 12, 8)])


def test_before_a_forward_and_where_nothing_computes_it_is_fed_all_the_same() -> None:
    kit = LanesKit(VirtualLanes(0, "lazy", polls_per_work=1_000_000), window_bytes=8 * PAGE_BYTES)
    kit.pipeline.advance()
    load = kit.pipeline.submit_bulk([(0, 1, 8)])
    kit.pipeline.poll(Visit.BEFORE_FORWARD)
    assert load.num_fed == 4
    kit.pipeline.poll(Visit.IDLE)
    assert load.num_fed == 20, "up to six windows"
    kit.finish(load)


def test_what_a_slice_costs_the_host() -> None:
    runs = [(0, 1, 3), (5, 9, 3)]
    costs = {
        way: worker_feeder.Slice(2, 6, Runs(runs, 6, way), 0).num_calls
        for way in (CopyWay.STRIDED, CopyWay.BATCH, CopyWay.GATHER)
    }
    assert costs == {
        CopyWay.STRIDED: 8,
        CopyWay.BATCH: pytest.approx(24 / BATCHED_RUN_BLOCKS),
        CopyWay.GATHER: 1,
    }


def test_nothing_is_fed_while_a_step_waits_for_its_own_load() -> None:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    kit = LanesKit(lanes)
    load = kit.pipeline.submit_load([[(0, 1, 2)]], 1)
    save, bulk = kit.pipeline.submit_save([(9, 9, 1)]), kit.pipeline.submit_bulk([(5, 5, 1)])
    assert (save.num_fed, bulk.num_fed) == (0, 0)
    kit.pipeline.finish_step()
    assert load.is_done
    kit.pipeline.poll()
    assert save.num_fed
    assert bulk.num_fed
    kit.finish(save)
    kit.finish(bulk)
    assert kit.is_saved([(9, 9, 1), (5, 5, 1)])


# ---------------------------------------------------------------- fences, the end


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=policies,
    num_polls=st.integers(0, 12),
    window=st.integers(1, 40),
)
def test_after_a_fence_the_blocks_are_read_no_more(
    seed: int, policy: str, num_polls: int, window: int
) -> None:
    kit = LanesKit(VirtualLanes(seed, policy), window_bytes=window * PAGE_BYTES)
    runs = [(0, 3, 6)]
    save = kit.pipeline.submit_save(runs)
    other = kit.pipeline.submit_save([(10, 20, 2)])
    for _ in range(num_polls):
        kit.pipeline.poll()
    kit.pipeline.fence(save)
    saved = kit.records.clone()
    for layer in kit.layers:
        layer[3:9].fill_(0)  # handed on
    kit.finish(save)
    kit.finish(other)
    assert torch.equal(kit.records[:6], saved[:6]), "nothing was read afterwards"
    assert other.error is None
    assert kit.is_saved([(10, 20, 2)])
    if save.error is None:
        before = torch.stack([was.view(NUM_BLOCKS, -1)[3:9] for was in kit.was_layers], 1)
        assert torch.equal(kit.records[:6], before), "it had ended well"
    else:
        assert "given up" in str(save.error)


@pytest.mark.parametrize("submit", ["load", "bulk", "save"])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_closing_in_the_middle_ends_everything(submit: str, policy: str) -> None:
    kit = LanesKit(VirtualLanes(0, policy, polls_per_work=50), window_bytes=4 * PAGE_BYTES)
    runs = [(0, 1, 8)]
    if submit == "load":
        load = kit.pipeline.submit_load([runs], 1)
        assert kit.pipeline.close()
        assert load.is_done
        assert isinstance(load.errors[0], LaneClosedError | None)
        assert (load.errors[0] is None) == kit.is_saved(runs) == (policy == "eager")
    else:
        one = (kit.pipeline.submit_bulk if submit == "bulk" else kit.pipeline.submit_save)(runs)
        assert kit.pipeline.close()
        assert one.is_done
        assert (one.error is None) == kit.is_saved(runs)
    assert kit.pipeline.close()
    late = kit.pipeline.submit_load([runs], 2)
    assert isinstance(late.errors[0], LaneClosedError)
    kit.pipeline.wait(0)
    kit.pipeline.finish_step()


def test_closing_gives_up_on_a_lane_that_hangs() -> None:
    kit = LanesKit(ThreadLanes())
    let_go = block_lane(kit.pipeline._store.lane)
    save = kit.pipeline.submit_save([(0, 1, 8)])
    assert not kit.pipeline.close(0.01)
    assert save.is_done
    assert save.error is not None
    let_go.set()
    assert torch.equal(kit.records, kit.was_records)


def test_it_tells_ways_bytes_and_time() -> None:
    now = iter(range(100))
    kit = LanesKit(VirtualLanes(0, "eager"))
    kit.pipeline._store.watch = kit.pipeline.watch = ClockStopwatch(lambda: float(next(now)))
    save = kit.pipeline.submit_save([(0, 1, 8)])
    stats = save.stats
    assert (stats.num_bytes, stats.seconds) == (8 * NUM_LAYERS * PAGE_BYTES, 1.0)
    assert stats.num_copies == NUM_LAYERS
    assert [way.name for way in stats.ways] == ["STRIDED"]
    assert stats.gb_per_s == pytest.approx(8 * NUM_LAYERS * PAGE_BYTES / 1e9)
