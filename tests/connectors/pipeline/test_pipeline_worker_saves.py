"""Saves of one step that share a transfer: each ends as if it were alone, unless a copy fails."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes_kit import NUM_BLOCKS, NUM_RECORDS, PAGE_BYTES, PATIENCE_S, LanesKit, blocks_of

from interlace.connectors.pipeline.layer_pipeline import SaveTransfer
from interlace.connectors.pipeline.worker_joint_save import SavePart
from interlace.engine.errors import ConnectorError
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import Run, Runs
from interlace.layers.virtual_lanes import VirtualLanes

TOO_FAR: list[Run] = [(NUM_RECORDS - 1, 1, 2)]


def submit(kit: LanesKit, parts: list[list[Run]]) -> list[SaveTransfer]:
    """All of which fit."""
    saves = list[SaveTransfer]()
    for one in kit.pipeline.submit_saves(parts):
        assert not isinstance(one, ConnectorError)
        saves.append(one)
    return saves


def hold_copies(kit: LanesKit) -> tuple[threading.Event, threading.Event]:
    """(set when a copy has begun, to be set to let copies go on)."""
    has_begun, go_on = threading.Event(), threading.Event()

    def hold(layer: int, runs: Runs) -> None:
        has_begun.set()
        assert go_on.wait(PATIENCE_S)

    kit.copies.before = hold
    return has_begun, go_on


@st.composite
def some_saves(draw: st.DrawFn) -> list[list[Run]]:
    """Their blocks, and records, are all different."""
    blocks = draw(st.permutations(range(1, NUM_BLOCKS)))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    parts: list[list[Run]] = []
    record = 0
    for size in sizes:
        parts.append([(record + i, blocks[record + i], 1) for i in range(size)])
        record += size
    return parts


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["seed", "eager", "lazy"]),
    parts=some_saves(),
    num_polls=st.integers(0, 12),
    window=st.integers(1, 80),
    data=st.data(),
)
def test_fences_stop_their_own_save_only(
    seed: int,
    policy: str,
    parts: list[list[Run]],
    num_polls: int,
    window: int,
    data: st.DataObject,
) -> None:
    kit = LanesKit(VirtualLanes(seed, policy), window_bytes=window * PAGE_BYTES)
    saves = submit(kit, parts)
    for _ in range(num_polls):
        kit.pipeline.poll()
    fenced = data.draw(st.sets(st.sampled_from(range(len(parts)))))
    kept = {}
    for i in sorted(fenced):
        kit.pipeline.fence(saves[i])
        kept[i] = kit.records[[record for record, _, _ in parts[i]]]
        for layer in kit.layers:
            for block in blocks_of(parts[i]):
                layer[block].fill_(0)  # handed on
    for one in saves:
        kit.finish(one)
    for i, (one, part) in enumerate(zip(saves, parts, strict=True)):
        records = [record for record, _, _ in part]
        if i in fenced:
            assert torch.equal(kit.records[records], kept[i]), "nothing was read afterwards"
        if one.error is None:
            was = [kit.was_layers[n].view(NUM_BLOCKS, -1) for n in range(len(kit.layers))]
            pages = torch.stack([rows[[block for _, block, _ in part]] for rows in was], 1)
            assert torch.equal(kit.records[records], pages)
        else:
            assert i in fenced
            assert "given up" in str(one.error)
    assert kit.pipeline._store.is_idle


def test_small_ones_are_copied_together_and_large_ones_alone() -> None:
    kit = LanesKit(VirtualLanes(0, "eager"), window_bytes=4 * 8 * PAGE_BYTES)
    copied: list[tuple[int, int]] = []
    kit.copies.before = lambda layer, runs: copied.append((layer, runs.num_blocks))
    parts: list[list[Run]] = [
        [(0, 1, 3)],
        [(3, 5, 2), (5, 9, 3)],  # 8 blocks: what a work copies of a layer
        [(8, 12, 1)],
        [(9, 13, 9)],
        [(18, 23, 1)],
    ]
    saves = submit(kit, parts)
    for one in saves:
        kit.finish(one)
    assert all(kit.is_saved(part) for part in parts)
    assert [isinstance(one, SavePart) for one in saves] == [True, True, False, False, False]
    of_first_layer = [num_blocks for layer, num_blocks in copied if layer == 0]
    assert of_first_layer == [8, 1, 8, 1, 1], "one of nine blocks takes two works a layer"


def test_what_does_not_fit_is_said_of_it_alone() -> None:
    kit = LanesKit(VirtualLanes(0))
    first, refused, last = kit.pipeline.submit_saves([[(0, 1, 1)], TOO_FAR, [(1, 2, 1)]])
    assert isinstance(refused, ConnectorError)
    assert "does not fit" in str(refused)
    for one in (first, last):
        assert not isinstance(one, ConnectorError)
        kit.finish(one)
        assert one.error is None
    assert kit.is_saved([(0, 1, 2)])
    (alone,) = kit.pipeline.submit_saves([TOO_FAR])
    assert isinstance(alone, ConnectorError)
    assert kit.pipeline.submit_saves([]) == []


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_copy_that_fails_fails_all_of_them(policy: str) -> None:
    kit = LanesKit(VirtualLanes(0, policy), window_bytes=4 * 8 * PAGE_BYTES)

    def fail(layer: int, runs: Runs) -> None:
        if layer == 2:
            raise OSError("no")

    kit.copies.before = fail
    saves = submit(kit, [[(0, 1, 1)], [(1, 2, 1)]])
    for one in saves:
        kit.finish(one)
    assert [str(one.error) for one in saves] == ["no", "no"]
    kit.copies.before = lambda layer, runs: None
    for one in submit(kit, [[(0, 1, 1)], [(1, 2, 1)]]):
        kit.finish(one)
        assert one.error is None


def test_nothing_more_is_copied_when_all_are_fenced() -> None:
    kit = LanesKit(VirtualLanes(0, "lazy"), window_bytes=8 * PAGE_BYTES)
    saves = submit(kit, [[(0, 1, 1)], [(1, 2, 1)]])
    for one in saves:
        kit.pipeline.fence(one)
    num_fed = [one._joint.num_fed for one in saves if isinstance(one, SavePart)]
    for one in saves:
        kit.finish(one)
        assert "given up" in str(one.error)
    assert [one._joint.num_fed for one in saves if isinstance(one, SavePart)] == num_fed
    assert torch.equal(kit.records, kit.was_records)


def test_on_a_thread_a_fence_waits_for_the_copy_under_way_and_no_longer() -> None:
    kit = LanesKit(ThreadLanes(), window_bytes=8 * PAGE_BYTES)
    has_begun, go_on = hold_copies(kit)
    fenced, other = submit(kit, [[(0, 1, 1)], [(1, 2, 1)]])
    assert has_begun.wait(PATIENCE_S)
    threading.Timer(0.01, go_on.set).start()
    kit.pipeline.fence(fenced)
    assert go_on.is_set()
    for layer in kit.layers:
        layer[1].fill_(0)
    kit.finish(other)
    assert other.error is None
    assert kit.is_saved([(1, 2, 1)])
    assert "given up" in str(fenced.error)
    assert kit.pipeline.close(PATIENCE_S)


def test_a_fence_gives_up_on_a_copy_that_hangs() -> None:
    kit = LanesKit(ThreadLanes(), window_bytes=8 * PAGE_BYTES, deadline_s=0.05)
    has_begun, go_on = hold_copies(kit)
    fenced, _ = submit(kit, [[(0, 1, 1)], [(1, 2, 1)]])
    assert has_begun.wait(PATIENCE_S)
    with pytest.raises(ConnectorError, match="has not returned"):
        kit.pipeline.fence(fenced)
    go_on.set()
    assert kit.pipeline.close(PATIENCE_S)


def test_what_a_joint_save_costs_the_host_is_told() -> None:
    kit = LanesKit(VirtualLanes(0, "lazy", polls_per_work=1_000_000))
    submit(kit, [[(0, 1, 1)], [(1, 3, 1)], [(2, 5, 2)]])
    ((_, _, one),) = kit.pipeline._store._fed
    assert one.num_calls == 3 * len(kit.layers)
