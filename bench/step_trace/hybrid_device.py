"""From what a GPU did to what was seen of a prompt from both ends: which kernels belong to which
step and layer, which copies to which slice.

How many steps computed, and which slices were queued in which order, is known from the host
(`hybrid_tape.py`); a GPU tells when. Steps are told apart by the upload of their inputs, which
comes first; slices are shared out in order among the copies of the one stream whose copies come to
the same number, or the same bytes. What does not come out even is an error. Pure; imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from interlace.bench.step_trace.build import LayerLoad, StepMarks
from interlace.bench.step_trace.device import (
    GATE_KERNEL,
    GATHER_KERNEL,
    RECORDS_KERNEL,
    DeviceEvent,
    gates_of,
    is_copy_of_kv,
    pieces_of,
    split_lanes,
    step_marks,
)
from interlace.bench.step_trace.hybrid_build import HybridMarks
from interlace.bench.step_trace.hybrid_tape import HybridTape, NotedSlice
from interlace.engine.errors import InterlaceError

UPLOAD_KERNEL = "read_words_kernel"
"""Uploads a step's inputs, if a copy does not."""

_Events: TypeAlias = Sequence[DeviceEvent]
_CountCopies: TypeAlias = Callable[[_Events, NotedSlice], int | None]


def hybrid_marks_of(
    events: Iterable[DeviceEvent], tape: HybridTape, num_layers: int, page_bytes: int
) -> HybridMarks:
    """What was seen of the one request that the tape noted.

    `page_bytes`: of one block of one layer. Raises: `InterlaceError` if it cannot be told which
    event belongs to what.
    """
    work, others = split_lanes(events)
    steps = _steps(work, len(tape.ran), num_layers)
    return tape.marks(steps, _slice_loads(others, tape.slices, num_layers, page_bytes))


def _steps(work: _Events, num_steps: int, num_layers: int) -> list[StepMarks]:
    gates = gates_of(work)
    if not num_steps or len(gates) != num_steps * num_layers:
        raise InterlaceError(
            f"{len(gates)} kernels {GATE_KERNEL} were seen for {num_steps} steps of {num_layers}"
            " layers, so they cannot be shared out. Record again, with nothing else running."
        )
    lasts = gates[num_layers - 1 :: num_layers]
    firsts = [0, *(_next_upload(work, last) for last in lasts[:-1])]
    bounds = zip(firsts, [*firsts[1:], len(work)], strict=True)
    return [step_marks(work[first:end], may_lack_head=end < len(work)) for first, end in bounds]


def _next_upload(work: _Events, last_gate: int) -> int:
    """Where the step behind the one whose last layer begins there uploads its inputs."""
    for place in range(last_gate, len(work)):
        event = work[place]
        if event.kind == "to_device" or event.name == UPLOAD_KERNEL:
            return place
        if event.name == GATE_KERNEL and place > last_gate:
            break
    raise InterlaceError(
        "a step was seen whose inputs were not uploaded, so it cannot be told from the one before:"
        " record again, with nothing else running."
    )


def _slice_loads(
    others: _Events, slices: Sequence[NotedSlice], num_layers: int, page_bytes: int
) -> list[LayerLoad]:
    """Of each slice, in order. `others`: events of all streams that compute nothing."""
    by_stream: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in others:
        if event.name in (RECORDS_KERNEL, GATHER_KERNEL) or is_copy_of_kv(event, page_bytes):
            by_stream[event.stream].append(event)
    lanes = list(by_stream.values())  # by their first event: what is saved comes behind the loads
    for lane in lanes:
        shares = _shares(lane, slices, num_layers)
        if shares is not None:
            return [_load(share, one) for share, one in zip(shares, slices, strict=True)]
    seen = ", ".join(str(len(lane)) for lane in lanes) or "none"
    raise InterlaceError(
        f"{len(slices)} slices were queued, in {sum(one.num_copies for one in slices)} copies or"
        f" kernels; seen were, by streams, {seen}, which cannot be shared out among them. Record"
        " again, with nothing else running."
    )


def _shares(lane: _Events, slices: Sequence[NotedSlice], num_layers: int) -> list[_Events] | None:
    """Events of each slice; None if they do not come out even."""
    for count_copies in (_by_count, _by_bytes):
        left, shares = lane, list[_Events]()
        for one in slices:
            count = _count(left, one, num_layers, count_copies)
            if count is None or count > len(left):
                break
            shares.append(left[:count])
            left = left[count:]
        if len(shares) == len(slices) and not left:
            return shares
    return None


def _count(
    left: _Events, one: NotedSlice, num_layers: int, count_copies: _CountCopies
) -> int | None:
    """How many of the events, from the first one on, are the slice; None if that is not told."""
    if not left:
        return None
    kernels = {RECORDS_KERNEL: 1, GATHER_KERNEL: num_layers}
    return kernels.get(left[0].name) or count_copies(left, one)


def _by_count(left: _Events, one: NotedSlice) -> int | None:
    """Each copy that was queued is one event."""
    return one.num_copies


def _by_bytes(left: _Events, one: NotedSlice) -> int | None:
    """A copy may be told as several."""
    missing = one.num_bytes
    for count, event in enumerate(left, start=1):
        missing -= event.num_bytes or 0
        if missing <= 0:
            return count if missing == 0 else None
    return None


def _load(events: _Events, one: NotedSlice) -> LayerLoad:
    return LayerLoad(
        events[0].begin_ns,
        max(event.end_ns for event in events),
        one.num_bytes,
        pieces_of(events),
    )
