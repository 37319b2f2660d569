"""From what a GPU did to what was seen of a step: which copies and kernels belong to which layer.

A graph that is replayed tells no more than names, streams and times. So a layer is told by a kernel
that each has once, right behind its gate, and copies by their order: by their bytes, or as many for
each layer. What does not come out even is an error. Pure; imports no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from interlace.bench.step_trace.build import LayerLoad, StepMarks
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.trace import Piece
from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.engine.errors import InterlaceError

GATE_KERNEL = "rope_write_kernel"
"""Once a layer: the first one behind the gate."""
FEED_FORWARD_KERNEL = "silu_mul_kernel"
"""Once a layer; one matrix product of the layer follows."""
NORM_KERNEL = "rms_norm_kernel"
"""The first one behind a layer's feed-forward belongs to what follows the layer."""
RECORDS_KERNEL = "record_gather_kernel"
"""Copies several layers in place of copies, where blocks are no neighbours: those of a group, or of
a slice."""
GATHER_KERNEL = "page_gather_kernel"
"""Copies one, where layers lie differently."""
_OF_LAYERS = (GATE_KERNEL, FEED_FORWARD_KERNEL, NORM_KERNEL)
"""Streams with these compute; a graph's parts may be told as on several."""

Kind: TypeAlias = Literal["kernel", "to_device", "other"]


class DeviceEvent(NamedTuple):
    """One thing that a GPU did on one of its streams."""

    kind: Kind
    name: str
    stream: int
    begin_ns: int
    end_ns: int
    num_bytes: int | None = None
    """Of a copy, if it is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadShape:
    """What is known of the load beforehand."""

    num_layers: int
    page_bytes: int
    """Of one block of one layer: no copy of KV is smaller."""
    layer_bytes: int
    """All that is loaded of one layer."""
    group_size: int
    """See `LayerGroups`: one call may copy all layers of a group."""

    @property
    def groups(self) -> tuple[range, ...]:
        """The layers of each group."""
        return LayerGroups(self.num_layers, self.group_size).ranges


def marks_of(events: Iterable[DeviceEvent], shape: LoadShape) -> StepMarks:
    """What was seen of the one step among the events that loads within itself.

    Raises: `InterlaceError` if it cannot be told which of them belongs to which layer.
    """
    work, others = split_lanes(events)
    num_gates = len(gates_of(work))
    if num_gates != shape.num_layers:
        raise InterlaceError(
            f"{num_gates} kernels {GATE_KERNEL} were seen for {shape.num_layers} layers, so they"
            " cannot be shared out. Let the new tokens be computed in one step: fewer of them, or a"
            " larger max_num_batched_tokens."
        )
    return dataclasses.replace(step_marks(work), loads=_layer_loads(others, shape))


def split_lanes(
    events: Iterable[DeviceEvent],
) -> tuple[list[DeviceEvent], list[DeviceEvent]]:
    """(events of streams that compute, all others), each in order of time."""
    ordered = sorted(events, key=lambda event: (event.begin_ns, event.end_ns))
    streams = {event.stream for event in ordered if event.name in _OF_LAYERS}
    work = [event for event in ordered if event.stream in streams]
    return work, [event for event in ordered if event.stream not in streams]


def gates_of(work: Sequence[DeviceEvent]) -> list[int]:
    """Where each layer begins."""
    return [place for place, event in enumerate(work) if event.name == GATE_KERNEL]


def step_marks(work: Sequence[DeviceEvent], *, may_lack_head: bool = False) -> StepMarks:
    """What was seen of a step that did `work`, which is in order, but for its loads.

    Without a head, as a step outside of graphs that samples nothing, it ends with its last layer.
    Raises: `InterlaceError` if it may not.
    """
    gates = gates_of(work)
    ends = list(itertools.accumulate((event.end_ns for event in work), max))
    begin = work[0].begin_ns
    passed = [work[place].begin_ns for place in gates]
    # A kernel may begin a moment before the one before it has ended.
    reached = [min(work[p].begin_ns, ends[p - 1]) if p else begin for p in gates]
    head = _first_of_head(work, gates[-1])
    if head is None and not may_lack_head:
        raise InterlaceError(
            f"no {FEED_FORWARD_KERNEL} and {NORM_KERNEL} follow the last layer's gate, so its end"
            " is not known: record a step that samples a token."
        )
    return StepMarks(
        loads=(),
        begin_ns=begin,
        gates=tuple(itertools.starmap(Interval, zip(reached, passed, strict=True))),
        forward_end_ns=ends[-1] if head is None else ends[head - 1],
        end_ns=ends[-1],
        pieces=pieces_of(work),
    )


def _first_of_head(work: Sequence[DeviceEvent], last_gate: int) -> int | None:
    """Where what follows the last layer begins; None if nothing does."""
    names = [event.name for event in work]
    try:
        return names.index(NORM_KERNEL, names.index(FEED_FORWARD_KERNEL, last_gate))
    except ValueError:
        return None


def _layer_loads(others: Sequence[DeviceEvent], shape: LoadShape) -> tuple[LayerLoad, ...]:
    """By the order of the copies. `others`: events of all streams that compute nothing."""
    lane = _load_lane(others, shape)
    for sizes in _sizes(lane, shape):
        shares = _shared_out(lane, sizes, shape)
        if shares is not None:
            # Copies of one call may overlap; a layer has not come before those above it.
            ends = itertools.accumulate((max(one.end_ns for one in share) for share in shares), max)
            return tuple(
                LayerLoad(share[0].begin_ns, end, shape.layer_bytes, pieces_of(share))
                for share, end in zip(shares, ends, strict=True)
            )
    raise InterlaceError(
        f"{len(lane)} copies to the device were seen on the load lane, which do not share out among"
        f" {shape.num_layers} layers. Is the prefix loaded layer by layer, in one step, and is"
        " nothing else running?"
    )


def _load_lane(others: Sequence[DeviceEvent], shape: LoadShape) -> list[DeviceEvent]:
    """Copies of KV, or kernels in place of them, of the stream with the most bytes. Kernels tell
    none, so of those the first stream's: what is saved comes behind the load."""
    by_stream: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in others:
        if _is_load(event, shape):
            by_stream[event.stream].append(event)
    return max(by_stream.values(), key=lambda lane: sum(e.num_bytes or 0 for e in lane), default=[])


def _sizes(lane: Sequence[DeviceEvent], shape: LoadShape) -> Iterator[list[Fraction]]:
    """What each of them may hold, in layers; the surest guess first: by its bytes, as many alike
    for each layer, or one kernel a group."""
    sizes = [event.num_bytes or 0 for event in lane]
    if lane and all(sizes):
        yield [Fraction(size, shape.layer_bytes) for size in sizes]
    per_layer, rest = divmod(len(lane), shape.num_layers)
    if per_layer and not rest and sizes == sizes[:per_layer] * shape.num_layers:
        yield [Fraction(1, per_layer)] * len(lane)
    if len(lane) == len(shape.groups) and not any(sizes):
        yield [Fraction(len(layers)) for layers in shape.groups]


def _shared_out(
    lane: Sequence[DeviceEvent], sizes: Sequence[Fraction], shape: LoadShape
) -> list[list[DeviceEvent]] | None:
    """Events of each layer; None if some would be of two groups. One call copies a group's layers
    at most, and an event may be all of it: that is cut where layers end, by its size."""
    bounds = [Fraction(0), *itertools.accumulate(sizes)]
    if bounds[-1] != shape.num_layers or not {layers.stop for layers in shape.groups} <= {*bounds}:
        return None
    shares: list[list[DeviceEvent]] = [[] for _ in range(shape.num_layers)]
    for event, (begin, end) in zip(lane, itertools.pairwise(bounds), strict=True):
        length = (event.end_ns - event.begin_ns) / (end - begin)
        for layer in range(math.floor(begin), math.ceil(end)):
            part = max(begin, Fraction(layer)), min(end, Fraction(layer + 1))
            from_ns, to_ns = (event.begin_ns + round(length * (at - begin)) for at in part)
            shares[layer].append(event._replace(begin_ns=from_ns, end_ns=to_ns))
    return shares


def _is_load(event: DeviceEvent, shape: LoadShape) -> bool:
    """A copy, or a kernel that reads layers from host memory."""
    is_kernel = event.name in (GATHER_KERNEL, RECORDS_KERNEL)
    return is_kernel or is_copy_of_kv(event, shape.page_bytes)


def is_copy_of_kv(event: DeviceEvent, page_bytes: int) -> bool:
    """Whether it copies pages, which have so many bytes, to the device: smaller copies bring block
    ids."""
    is_large = event.num_bytes is None or event.num_bytes >= page_bytes
    return event.kind == "to_device" and is_large


def pieces_of(events: Iterable[DeviceEvent]) -> tuple[Piece, ...]:
    """The same for a timeline."""
    return tuple(Piece(event.name, event.begin_ns, event.end_ns) for event in events)
