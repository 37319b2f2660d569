"""Transfers that go on beside the steps, fed to their lane in slices. Device thread.

What is on a stream cannot be taken back, and copies that come later share the link with it. So no
more than a window of bytes is queued at a time, and nothing more while others are in a hurry.
"""

from __future__ import annotations

import enum
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

from interlace.connectors.pipeline.worker_checks import LoadCheck
from interlace.connectors.pipeline.worker_notes import SliceNotes
from interlace.connectors.pipeline.worker_times import Stopwatch, TransferMeter, TransferStats
from interlace.engine.errors import ConnectorError, LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lane
from interlace.layers.lane_queue import without_frames
from interlace.layers.page_copies import (
    BATCHED_RUN_BLOCKS,
    Copied,
    CopyWay,
    Run,
    Runs,
    cut_runs,
)

SLICES_PER_WINDOW = 4
_IDLE_WINDOWS = 6
"""The link's work for some 24 ms: the longest pause of an engine that only waits for transfers is
20."""
_MOST_WORKS = 256
"""On the lane at a time: slices may be much smaller than a window allows."""
MOST_CALLS = 192
"""Of the driver, for what is on a stream at a time: where runs are short a window of bytes would
keep the host from its steps for milliseconds. A call takes 4 to 10 us."""
MOST_QUEUED_CALLS = 768
"""The same where they do not come at once, or somebody computes towards the load. A stream that has
been given a thousand lets the host wait."""
VISIT_S = 0.0003
"""For so long slices are fed while somebody waits for a step: who does learns of its end later."""
FORWARD_VISIT_S = 0.0006
"""The same before a forward is launched: two slices, which last until that is done."""
_CALLS_OF_BLOCK = 1 / BATCHED_RUN_BLOCKS
"""What a block of a batch costs the host, in calls."""

CopyLayers: TypeAlias = Callable[[range, Runs], Iterable[Copied]]
"""Copies one layer of some runs: `PageCopies.load` or `save`."""


class Copies(Protocol):
    """`PageCopies`, as far as lanes ask for it."""

    @property
    def num_layers(self) -> int:
        """Layers with pages."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        ...

    def prepare(self, runs: list[Run] | tuple[Run, ...]) -> Runs:
        """Runs that fit. Raises: `ConnectorError`."""
        ...

    def load(self, layer: int, runs: Runs) -> Copied:
        """From records into pages."""
        ...

    def save(self, layer: int, runs: Runs) -> Copied:
        """From pages into records."""
        ...

    def load_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """Of several layers; each copy is queued as it is asked for."""
        ...

    def save_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """Likewise."""
        ...


class Slice(NamedTuple):
    """One work."""

    first_layer: int
    end_layer: int
    runs: Runs
    num_bytes: int
    may_be_last: bool = False
    """Of its transfer."""

    @property
    def num_calls(self) -> float:
        """About what it costs the host, in strided copies."""
        num_layers = self.end_layer - self.first_layer
        match self.runs.way:
            case CopyWay.STRIDED:
                return num_layers * len(self.runs.runs)
            case CopyWay.BATCH:
                return num_layers * self.runs.num_blocks * _CALLS_OF_BLOCK
            case CopyWay.GATHER:
                return 1


class Visit(enum.Enum):
    """When the device thread comes by, and so how much it should feed."""

    IDLE = enum.auto()
    """Nothing computes, so nobody may come by for a while: several windows are fed. Not all there
    is, since a step that comes meanwhile may load within itself."""
    BEFORE_FORWARD = enum.auto()
    """A forward is to be launched, and shall not wait: feed for `FORWARD_VISIT_S`."""
    BEHIND_FORWARD = enum.auto()
    """The device computes, so the host has time; the next visit may be one step later."""
    WAITING = enum.auto()
    """It waits for the device, and comes by again soon: feed for `VISIT_S`, one slice at least."""


class FedTransfer:
    """One transfer of whole records. Its works copy part by part, each part over all layers."""

    window_bytes: int = 0
    """Bytes of it that may be queued at a time, if the feeder's own window is smaller."""
    is_hurried = False
    """Whether somebody computes towards it, and not just waits."""
    name: str = "nobody in particular"
    """For people: the request that loads, or which save it is."""
    check: LoadCheck | None = None
    """Of what it loads, behind the last copy."""

    def __init__(
        self,
        slices: Iterable[Slice],
        copy_layers: CopyLayers,
        after: Gate | None,
        watch: Stopwatch,
    ) -> None:
        """For `Feeder`."""
        self.after = after
        self.num_fed = 0
        """Slices on the lane, or past it."""
        self.last_gate: Gate | None = None
        """Of the slice that was fed last."""
        self._slices = deque(slices)
        self.layer_ranges = tuple((one.first_layer, one.end_layer) for one in self._slices)
        """Of its slices, in order, if they are known from the start."""
        self._copy_layers = copy_layers
        self._num_run = 0
        self._num_ended = 0
        self._error: BaseException | None = None
        self._is_given_up = False
        self._lock = threading.Lock()  # held while a slice is copied
        self._meter = TransferMeter(watch)

    @property
    def is_done(self) -> bool:
        """Whether it will touch neither pages nor records any more."""
        return self.next_slice is None and self._num_ended == self.num_fed

    @property
    def next_slice(self) -> Slice | None:
        """For `Feeder`: what is to be fed next; None if there is nothing more."""
        return self._slices[0] if self._slices else None

    @property
    def has_more(self) -> bool:
        """Whether not all of it was copied, or queued on a device."""
        return self.next_slice is not None or self._num_run < self.num_fed

    def runs_of(self, one: Slice) -> Runs:
        """What a work copies. On the lane, under the lock."""
        return one.runs

    def take(self, gate: Gate) -> None:
        """For `Feeder`: the next slice was fed, and ends with `gate`."""
        self._slices.popleft()
        self.num_fed += 1
        self.last_gate = gate

    def drop(self) -> None:
        """For `Feeder`: feed nothing more."""
        self._slices.clear()

    @property
    def error(self) -> BaseException | None:
        """Why not everything was copied; None while it goes well."""
        return self._error

    @property
    def stats(self) -> TransferStats:
        """What was copied so far."""
        return self._meter.stats()

    @property
    def num_ended(self) -> int:
        """Slices that are known to have ended."""
        return self._num_ended

    def seen(self) -> TransferStats:
        """As `stats`, for who looks on from another thread: changes nothing."""
        return self._meter.seen()

    def give_up(self, timeout_s: float) -> bool:
        """Copy nothing that has not been begun, nor queued on a device: it fails, unless that is
        nothing. In host memory nothing is copied any more when this returns True: it waits for the
        one copy under way; False if that takes longer than `timeout_s`."""
        has_ended = self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if not has_ended or self.has_more:
            self._is_given_up = True
            self._error = self._error or given_up()
        self.drop()
        if has_ended:
            self._lock.release()
        return has_ended

    def fail(self, error: BaseException) -> None:
        """For `Feeder`: nothing more of it can be queued."""
        self._error = self._error or error
        self.drop()

    def note_ended(self, gate: Gate) -> None:
        """For `Feeder`: a slice has ended."""
        self._num_ended += 1
        if self.check is not None and self.check.judge(self._num_ended):
            self.note_bad()
        if gate.error is not None:
            self.fail(gate.error)
        elif self._error is not None:
            self.drop()

    def copy(self, one: Slice) -> None:
        """The work of one slice, on the lane. What a copy raises becomes `error`."""
        with self._lock:
            if self._is_given_up or self._error is not None:
                return
            self._meter.begin()
            try:
                layers = range(one.first_layer, one.end_layer)
                for copied in self._copy_layers(layers, self.runs_of(one)):
                    self._meter.add(copied)
                if self.check is not None:
                    self.queue_check(self.check, one)
            except Exception as error:  # noqa: BLE001 - whatever it is, this transfer has failed
                self._error = without_frames(error, "of a transfer")
                return
            self._num_run += 1
            if one.may_be_last:
                self._meter.end()

    def copy_noted(self, one: Slice, notes: SliceNotes, lane: str) -> None:
        """As `copy`, while somebody looks."""
        begun = notes.begin(self._meter)
        self.copy(one)
        layers = range(one.first_layer, one.end_layer)
        notes.end(begun, lane, self, layers, one.runs, self._meter)

    def queue_check(self, check: LoadCheck, one: Slice) -> None:
        """Behind the copies of a slice, if blocks are whole then. On the lane."""
        if one.may_be_last:
            check.queue(self._num_run)

    def note_bad(self) -> None:
        """The check of some blocks has failed. The others are good."""


def _most_calls(transfer: FedTransfer, visit: Visit) -> float:
    """Of the driver, that may be on a stream."""
    if transfer.is_hurried and visit is Visit.BEHIND_FORWARD:
        return math.inf  # the host has time, and may not come by soon
    are_many = transfer.is_hurried or visit in (Visit.IDLE, Visit.WAITING)
    return MOST_QUEUED_CALLS if are_many else MOST_CALLS


def given_up() -> ConnectorError:
    """The error of what was given up for whom its blocks are handed on to."""
    return ConnectorError(
        "the transfer was given up, since its blocks are handed on: copy them again"
    )


class Feeder:
    """Feeds one lane, in the order in which transfers came.

    Its queue is bounded by what there is to copy: each transfer has records of its own.
    """

    def __init__(
        self,
        lane: Lane,
        copies: Copies,
        copy_layers: CopyLayers,
        *,
        window_bytes: int,
        watch: Stopwatch,
        is_stream: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds."""
        self.lane = lane
        self._is_stream = is_stream
        self._clock = clock
        self.copies = copies
        self._copy_layers = copy_layers
        self.window_bytes = window_bytes
        self.slice_bytes = max(1, window_bytes // SLICES_PER_WINDOW)
        self.watch = watch
        self._waiting: deque[FedTransfer] = deque()
        self._fed: deque[tuple[FedTransfer, Gate, Slice]] = deque()
        self._fed_bytes = 0
        self._fed_calls = 0.0
        self.num_bytes = 0
        """Of what has ended, since it was made."""
        self.notes: SliceNotes | None = None
        """Taken of slices that are fed from now on, while somebody looks."""

    def add(
        self, runs: tuple[Run, ...], after: Gate | None = None, *, window_bytes: int = 0
    ) -> FedTransfer:
        """A transfer that begins, when it is its turn, behind `after`. `poll` moves it on.
        `window_bytes` of it may be queued, if the feeder's own window is smaller.

        Raises: `ConnectorError` if `runs` do not fit.
        """
        slice_bytes = max(self.slice_bytes, window_bytes // SLICES_PER_WINDOW)
        slices = _cut(self.copies, runs, slice_bytes)
        transfer = FedTransfer(slices, self._copy_layers, after, self.watch)
        transfer.window_bytes = window_bytes
        self.append(transfer)
        return transfer

    def append(self, transfer: FedTransfer) -> None:
        """Feed this one, or feed it on, when those that came before are fed."""
        if transfer not in self._waiting:
            self._waiting.append(transfer)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is on the lane."""
        return not self._waiting and not self._fed

    @property
    def has_more(self) -> bool:
        """Whether something is still to be fed."""
        return bool(self._waiting)

    def poll(self, *, may_feed: bool, visit: Visit = Visit.BEHIND_FORWARD) -> None:
        """Take note of what has ended; feed more, if that is allowed, as much as the visit asks."""
        begun_s = self._clock()
        while self._fed and self._fed[0][1].query():
            transfer, gate, one = self._fed.popleft()
            self._fed_bytes -= one.num_bytes
            self.num_bytes += one.num_bytes
            self._fed_calls -= one.num_calls
            transfer.note_ended(gate)
        while self._waiting and (transfer := self._waiting[0]):
            if transfer.error is not None:
                transfer.drop()
            following = transfer.next_slice
            if following is None:
                self._waiting.popleft()
            elif not may_feed or not self._has_room(transfer, following, visit):
                break
            else:
                self._feed(transfer, following)
                if self._clock() - begun_s >= self._most_s(visit):
                    break

    def _most_s(self, visit: Visit) -> float:
        """For which a visit may feed."""
        if visit is Visit.WAITING:
            return VISIT_S
        # Elsewhere feeding takes no time, and the next visit may be long in coming.
        return FORWARD_VISIT_S if visit is Visit.BEFORE_FORWARD and self._is_stream else math.inf

    def _has_room(self, transfer: FedTransfer, one: Slice, visit: Visit) -> bool:
        """Whether the window, and the lane, take one more. One slice always fits."""
        window_bytes = max(self.window_bytes, transfer.window_bytes)
        if visit is Visit.IDLE:
            window_bytes *= _IDLE_WINDOWS
        fits = self._fed_bytes + one.num_bytes <= window_bytes
        if self._is_stream:
            fits &= self._fed_calls + one.num_calls <= _most_calls(transfer, visit)
        return not self._fed or (fits and len(self._fed) < _MOST_WORKS)

    def _feed(self, transfer: FedTransfer, one: Slice) -> None:
        if transfer.after is not None:
            self.lane.wait(transfer.after)
            transfer.after = None
        notes, name = self.notes, self.lane.name
        work = functools.partial(transfer.copy, one)
        if notes is not None:
            work = functools.partial(transfer.copy_noted, one, notes, name)
        try:
            gate = self.lane.submit(work)
        except (LaneFullError, LaneClosedError) as error:
            transfer.fail(error)
            return
        transfer.take(gate)
        self._fed.append((transfer, gate, one))
        self._fed_bytes += one.num_bytes
        self._fed_calls += one.num_calls

    def close(self, timeout_s: float) -> bool:
        """Give up what waits, and end the lane; False if that takes longer than `timeout_s`."""
        for transfer in (*self._waiting, *(fed[0] for fed in self._fed)):
            transfer.give_up(timeout_s)
        has_ended = self.lane.close(timeout_s)
        self.poll(may_feed=False)
        return has_ended


def _cut(copies: Copies, runs: tuple[Run, ...], slice_bytes: int) -> list[Slice]:
    """Slices of about `slice_bytes`, at least one page each: parts of the runs, all layers of one
    before the next."""
    copies.prepare(runs)  # refuses them as a whole
    parts = cut_runs(runs, max(1, slice_bytes // copies.page_bytes))
    return layer_slices(copies, [copies.prepare(part) for part in parts], slice_bytes)


def layer_slices(copies: Copies, parts: Iterable[Runs], slice_bytes: int) -> list[Slice]:
    """All slices of a transfer: some layers of a part at a time, about `slice_bytes`, one layer at
    least."""
    slices: list[Slice] = []
    for part in parts:
        layer_bytes = part.num_blocks * copies.page_bytes
        step = max(1, slice_bytes // layer_bytes)
        for first in range(0, copies.num_layers, step):
            end = min(first + step, copies.num_layers)
            slices.append(Slice(first, end, part, (end - first) * layer_bytes))
    return [*slices[:-1], *(last._replace(may_be_last=True) for last in slices[-1:])]
