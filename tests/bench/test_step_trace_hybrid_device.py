"""Which kernels of a GPU belong to which step, and which copies to which slice."""

from __future__ import annotations

import random

import pytest
from step_trace_kit import (
    BY_COPIES,
    BY_KERNEL,
    COMPUTE,
    LOAD,
    STORE,
    US,
    BothEndsDevice,
    a_run_from_both_ends,
    a_tape,
    both_ends_facts,
)

from interlace.bench.step_trace.device import GATE_KERNEL, RECORDS_KERNEL, DeviceEvent
from interlace.bench.step_trace.hybrid_build import HybridMarks, build_hybrid_trace
from interlace.bench.step_trace.hybrid_device import UPLOAD_KERNEL, hybrid_marks_of
from interlace.bench.step_trace.hybrid_tape import NotedSlice
from interlace.bench.step_trace.trace import Blocks
from interlace.engine.errors import InterlaceError
from interlace.layers.kernels import host_copies, page_gather


def marks_of(
    events: list[DeviceEvent], *slices: NotedSlice, num_steps: int = 2, num_layers: int = 4
) -> HybridMarks:
    tape = a_tape(*(slices or (BY_COPIES, BY_KERNEL)), num_steps=num_steps)
    return hybrid_marks_of(events, tape, num_layers, 1000)


def test_the_kernels_are_called_so() -> None:
    assert hasattr(page_gather, RECORDS_KERNEL)
    assert hasattr(host_copies, UPLOAD_KERNEL)


def test_slices_and_steps_are_told_apart() -> None:
    device = a_run_from_both_ends()
    random.Random(1).shuffle(device.events)
    marks = marks_of(device.events)
    assert [one.blocks for one in marks.slices] == [Blocks(4, 8), Blocks(3, 4)]
    times = [(one.load.begin_ns, one.load.end_ns) for one in marks.slices]
    assert times == [(995 * US, 1155 * US), (1156 * US, 1206 * US)]
    assert [one.load.num_bytes for one in marks.slices] == [16_000, 4000]
    assert [len(one.load.pieces) for one in marks.slices] == [8, 1]
    first, second = marks.steps
    assert first.begin_ns == 1000 * US
    assert [piece.name for piece in first.pieces][-2:] == ["nvjet_head", "greedy_kernel"]
    assert second.pieces[0].name == UPLOAD_KERNEL
    assert second.begin_ns == first.end_ns + 40 * US, "the pause is none of either"
    trace = build_hybrid_trace(marks, both_ends_facts(3, 5, marks.ran))
    heads = [span for span in trace.compute if span.part == "head"]
    assert [[piece.name for piece in span.pieces] for span in heads] == [
        ["rms_norm_kernel", "nvjet_head", "greedy_kernel"]
    ] * 2
    layers = [span for span in trace.compute if span.part == "layer"]
    assert {span.pieces[0].name for span in layers} == {GATE_KERNEL}
    assert all(span.wait is None for span in layers)
    assert trace.end_ns == marks.steps[-1].end_ns - 995 * US, "the save behind it is another lane's"


def test_a_step_that_samples_nothing_may_have_no_head() -> None:
    marks = marks_of(a_run_from_both_ends(has_head=False).events)
    first = marks.steps[0]
    assert first.forward_end_ns == first.end_ns
    assert first.pieces[-1].name == "attention_kernel"
    trace = build_hybrid_trace(marks, both_ends_facts(3, 5, marks.ran))
    head = trace.compute[5]
    assert (head.part, head.begin_ns) == ("head", head.end_ns)


def test_the_last_step_needs_its_head() -> None:
    device = BothEndsDevice()
    device.slices(995)
    device.step(has_head=False)
    with pytest.raises(InterlaceError, match="record a step that samples"):
        marks_of(device.events, num_steps=1)


def test_copies_that_are_told_as_several_are_shared_out_by_bytes() -> None:
    device = BothEndsDevice()
    for copy in range(8):
        for part in range(2):
            device.copy(995 + 20 * copy + 10 * part, 10, 1000)
    for copy in range(4):
        device.copy(1155 + 10 * copy, 10, 1000)
    device.step()
    device.step()
    marks = marks_of(device.events, BY_COPIES, NotedSlice([(33, 103, 1)], 0, 0, 4000, 4))
    assert [len(one.load.pieces) for one in marks.slices] == [16, 4]
    assert marks.slices[1].load.begin_ns == 1155 * US


def test_copies_whose_size_is_not_known_are_counted() -> None:
    events = [
        event._replace(num_bytes=None) if event.stream == LOAD else event
        for event in a_run_from_both_ends().events
    ]
    assert marks_of(events).slices == marks_of(a_run_from_both_ends().events).slices


def test_a_kernel_for_each_layer_is_one_slice() -> None:
    device = BothEndsDevice()
    device.now = 995
    for _ in range(4):
        device.kernel("page_gather_kernel", 10, LOAD)
    device.step()
    (one,) = marks_of(device.events, BY_KERNEL, num_steps=1).slices
    assert (one.load.begin_ns, one.load.end_ns) == (995 * US, 1035 * US)


def test_a_save_by_the_same_kernel_is_no_slice() -> None:
    """It comes later, on a stream of its own."""
    device = BothEndsDevice()
    device.now = 995
    device.kernel(RECORDS_KERNEL, 50, LOAD)
    device.step()
    device.kernel(RECORDS_KERNEL, 9, STORE)
    (one,) = marks_of(device.events, BY_KERNEL, num_steps=1).slices
    assert one.load.begin_ns == 995 * US


@pytest.mark.parametrize("number", [0, 5, 8])
def test_a_copy_too_few_or_too_many_is_an_error(number: int) -> None:
    device = a_run_from_both_ends()
    loads = [e for e in device.events if e.stream == LOAD and e.name != UPLOAD_KERNEL]
    device.events.remove(loads[number])
    with pytest.raises(InterlaceError, match=r"2 slices were queued, in 9 copies .* 8, 1, which"):
        marks_of(device.events)
    device = a_run_from_both_ends()
    device.copy(1300, 5, 2000)
    with pytest.raises(InterlaceError, match="cannot be shared out"):
        marks_of(device.events)


def test_no_copies_are_an_error() -> None:
    events = [event for event in a_run_from_both_ends().events if event.stream == COMPUTE]
    with pytest.raises(InterlaceError, match="seen were, by streams, none"):
        marks_of(events)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_another_number_of_steps_is_an_error(num_steps: int) -> None:
    with pytest.raises(InterlaceError, match=f"8 kernels .* seen for {num_steps} steps"):
        marks_of(a_run_from_both_ends().events, num_steps=num_steps)


def test_a_step_without_an_upload_is_an_error() -> None:
    events = [e for e in a_run_from_both_ends().events if e.name != UPLOAD_KERNEL]
    with pytest.raises(InterlaceError, match="inputs were not uploaded"):
        marks_of(events)
