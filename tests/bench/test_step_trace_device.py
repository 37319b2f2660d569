"""Which copies and kernels of a GPU belong to which layer."""

from __future__ import annotations

import random

import pytest
from step_trace_kit import COMPUTE, LOAD, SHAPE, STORE, US, FakeDevice, a_step, facts

from interlace.bench.step_trace.build import build_trace
from interlace.bench.step_trace.device import (
    FEED_FORWARD_KERNEL,
    GATE_KERNEL,
    GATHER_KERNEL,
    NORM_KERNEL,
    RECORDS_KERNEL,
    LoadShape,
    marks_of,
)
from interlace.bench.step_trace.intervals import Interval
from interlace.engine.errors import InterlaceError
from interlace.layers.kernels import page_gather, pointwise, rope_write


def test_the_kernels_are_called_so() -> None:
    assert hasattr(rope_write, GATE_KERNEL)
    assert hasattr(pointwise, FEED_FORWARD_KERNEL)
    assert hasattr(pointwise, NORM_KERNEL)
    assert hasattr(page_gather, GATHER_KERNEL)
    assert hasattr(page_gather, RECORDS_KERNEL)


def test_copies_and_kernels_are_shared_out_among_layers() -> None:
    device = a_step()
    random.Random(1).shuffle(device.events)
    marks = marks_of(device.events, SHAPE)
    assert [(load.begin_ns, load.end_ns) for load in marks.loads] == [
        ((985 + 100 * layer) * US, (1085 + 100 * layer) * US) for layer in range(4)
    ]
    assert [load.num_bytes for load in marks.loads] == [8000] * 4
    assert [len(load.pieces) for load in marks.loads] == [2] * 4, "block ids are no KV"
    assert marks.begin_ns == 990 * US
    assert marks.gates[0] == Interval(1010 * US, 1086 * US)
    assert marks.gates[1] == Interval((1086 + 51 + 6) * US, 1186 * US)
    assert marks.forward_end_ns == (1386 + 50) * US, "the norm behind it is the head's"
    assert marks.end_ns == (1386 + 51 + 34) * US, "the save behind it is another lane's"
    trace = build_trace(marks, facts(1))
    assert [span.wait is not None for span in trace.compute] == [False, *[True] * 4, False]
    head = trace.compute[-1]
    assert [piece.name for piece in head.pieces] == [
        "rms_norm_kernel",
        "nvjet_head",
        "greedy_kernel",
    ]


def test_kernels_that_gather_many_blocks_are_the_load() -> None:
    device = a_step()
    device.events = [event for event in device.events if event.num_bytes != 4000]
    device.now = 980
    device.kernel("read_words_kernel", 3, LOAD)
    for layer in range(4):
        device.now = 985 + 100 * layer
        device.kernel("page_gather_kernel", 96, LOAD)
    loads = marks_of(device.events, SHAPE).loads
    assert [load.begin_ns for load in loads] == [(985 + 100 * layer) * US for layer in range(4)]
    assert [load.end_ns for load in loads] == [(1081 + 100 * layer) * US for layer in range(4)]


def test_parts_of_a_graph_may_be_on_several_streams() -> None:
    whole = marks_of(a_step().events, SHAPE)
    moved = [
        event._replace(stream=9)
        if event.stream == COMPUTE and event.begin_ns > 1180 * US
        else event
        for event in a_step().events
    ]
    assert marks_of(moved, SHAPE) == whole


def test_a_kernel_that_begins_before_the_last_one_ended() -> None:
    device = a_step()
    place = [event.name for event in device.events].index(GATE_KERNEL)
    early = device.events[place]._replace(begin_ns=1009 * US)  # the projection ends at 1010
    device.events[place] = early
    trace = build_trace(marks_of(device.events, SHAPE), facts(1))
    assert trace.compute[1].pieces[0].name == GATE_KERNEL
    assert trace.compute[1].wait is None
    assert trace.compute[0].end_ns == trace.compute[0].pieces[-1].end_ns


def test_copies_whose_size_is_not_known_are_counted() -> None:
    device = a_step()
    unsized = [e._replace(num_bytes=None) for e in device.events if e.num_bytes != 200]
    assert marks_of(unsized, SHAPE).loads[3].begin_ns == 1285 * US


@pytest.mark.parametrize("missing", [0, 3, 7])
def test_a_copy_too_few_is_an_error(missing: int) -> None:
    device = a_step()
    copies = [event for event in device.events if event.num_bytes == 4000]
    device.events.remove(copies[missing])
    with pytest.raises(InterlaceError, match=r"7 copies .* do not share out among 4 layers"):
        marks_of(device.events, SHAPE)


def test_a_load_in_another_order_is_an_error() -> None:
    device = a_step()
    for begin in (1400, 1410, 1420, 1430):
        device.copy(begin, 5, 2000)
    with pytest.raises(InterlaceError, match=r"12 copies .* do not share out among 4 layers"):
        marks_of(device.events, SHAPE)


# ---------------------------------------------------------------- calls for a whole group

PAIR_SHAPE = LoadShape(num_layers=6, page_bytes=1000, layer_bytes=8000, group_size=2)
"""Layers 2 and 3 are the one group of several."""
LAYERS_OF_GROUPS = [1, 1, 2, 1, 1]


def a_step_of_pairs(copies_of_pair: list[int], sizes_of_others: list[int]) -> FakeDevice:
    """A layer takes 80 us to load; copies of these sizes take their share of it."""
    device = a_step(6)
    device.events = [event for event in device.events if event.num_bytes != 4000]
    begin = 900
    for num_layers in LAYERS_OF_GROUPS:
        for size in copies_of_pair if num_layers == 2 else sizes_of_others:
            device.copy(begin, size // 100, size)
            begin += size // 100
    return device


@pytest.mark.parametrize(
    ("copies_of_pair", "num_pieces"),
    [
        ([3000, 5000, 3000, 5000], [2, 2]),
        ([16_000], [1, 1]),
        ([3000, 3000, 5000, 5000], [3, 2]),
        ([4000, 12_000], [2, 1]),
    ],
    ids=["in order", "one event", "in another order", "an event over the edge"],
)
def test_a_call_for_a_group_is_shared_out_by_bytes(
    copies_of_pair: list[int], num_pieces: list[int]
) -> None:
    device = a_step_of_pairs(copies_of_pair, [3000, 5000])
    loads = marks_of(device.events, PAIR_SHAPE).loads
    assert [(load.begin_ns, load.end_ns) for load in loads] == [
        ((900 + 80 * layer) * US, (980 + 80 * layer) * US) for layer in range(6)
    ]
    assert [load.num_bytes for load in loads] == [8000] * 6
    assert [len(load.pieces) for load in loads] == [2, 2, *num_pieces, 2, 2]


def test_copies_of_one_call_may_overlap() -> None:
    device = a_step_of_pairs([3000, 5000, 3000, 5000], [8000])
    place = [event.num_bytes for event in device.events].index(5000)
    late = device.events[place]._replace(end_ns=(1220 + 5) * US)
    device.events[place] = late
    loads = marks_of(device.events, PAIR_SHAPE).loads
    assert [load.end_ns // US for load in loads] == [980, 1060, 1225, 1225, 1300, 1380]


def test_bytes_that_are_of_two_groups_are_an_error() -> None:
    device = a_step_of_pairs([8000, 4000], [8000])
    place = [event.num_bytes for event in device.events].index(4000)
    after = device.events[place + 1]
    device.events[place + 1] = after._replace(num_bytes=12_000)
    with pytest.raises(InterlaceError, match=r"6 copies .* do not share out among 6 layers"):
        marks_of(device.events, PAIR_SHAPE)


def test_copies_that_repeat_are_told_apart_whatever_bytes_they_tell() -> None:
    device = a_step_of_pairs([3000, 7000, 3000, 7000], [3000, 7000])
    loads = marks_of(device.events, PAIR_SHAPE).loads
    assert [load.begin_ns // US for load in loads] == [900 + 100 * layer for layer in range(6)]


def test_a_kernel_loads_a_group_and_another_one_saves() -> None:
    device = a_step_of_pairs([], [])
    for group, num_layers in enumerate(LAYERS_OF_GROUPS):
        device.now = 900 + 80 * sum(LAYERS_OF_GROUPS[:group])
        device.kernel(RECORDS_KERNEL, 80 * num_layers, LOAD)
    device.now = 1500
    for _ in range(9):
        device.kernel(RECORDS_KERNEL, 2, STORE)
    loads = marks_of(device.events, PAIR_SHAPE).loads
    assert [(load.begin_ns, load.end_ns) for load in loads] == [
        ((900 + 80 * layer) * US, (980 + 80 * layer) * US) for layer in range(6)
    ]


def test_no_load_is_an_error() -> None:
    device = a_step()
    with pytest.raises(InterlaceError, match="0 copies to the device"):
        marks_of([event for event in device.events if event.stream == COMPUTE], SHAPE)


def test_several_steps_are_an_error() -> None:
    device = a_step()
    for _ in range(4):
        device.attend()
    with pytest.raises(InterlaceError, match="8 kernels rope_write_kernel were seen for 4 layers"):
        marks_of(device.events, SHAPE)
    with pytest.raises(InterlaceError, match="0 kernels"):
        marks_of([], SHAPE)


def test_a_step_without_a_head_is_an_error() -> None:
    device = FakeDevice()
    for layer in range(4):
        device.copy(985 + 100 * layer, 50)
        device.kernel(GATE_KERNEL, 5)
    with pytest.raises(InterlaceError, match="record a step that samples"):
        marks_of(device.events, SHAPE)
