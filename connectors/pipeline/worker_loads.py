"""What one step loads within itself: group of layers by group of layers, over all its requests."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.worker_checks import LoadCheck
from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.connectors.pipeline.worker_notes import LoadNotes
from interlace.connectors.pipeline.worker_times import Stopwatch, TransferMeter, TransferStats
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Gate
from interlace.layers.lane_queue import without_frames
from interlace.layers.page_copies import Run, Runs


class Pace(enum.Enum):
    """How soon a load within a step is submitted, where works queue on a stream; elsewhere all is
    at once."""

    AT_ONCE = enum.auto()
    """Before its step is launched."""
    IN_TWO = enum.auto()
    """The first layers before, the others when the step's gates are told to arm the rest."""
    BY_LAYER = enum.auto()
    """The first layers before, the others as the step comes along and waits for each."""


class PipelinedLoad:
    """One load of several parts, a part a request: one that fails leaves the others alone.

    Made and asked on the device thread; its works run on the load lane.
    """

    def __init__(
        self,
        copies: Copies,
        parts: Sequence[tuple[Run, ...]],
        groups: LayerGroups,
        watch: Stopwatch,
        checks: Sequence[LoadCheck | None] = (),
        notes: LoadNotes | None = None,
    ) -> None:
        """For `LayerPipeline`. A part whose runs do not fit has failed. `checks`: of each part, if
        there are any. `notes` are taken while somebody looks."""
        self.errors: list[BaseException | None] = [None] * len(parts)
        """Of each part, why it is not in the pages. Final when its last group's gate has opened; on
        a GPU as soon as that group was submitted."""
        self.gates: list[Gate] = []
        """Of each group that was submitted, in their order."""
        self.groups_passed: set[int] = set()
        """Those for which the step waits already."""
        self.check_gate: Gate | None = None
        """Behind the checks, once they were submitted: no layer waits for them."""
        self._checks = checks
        self._copies = copies
        self._groups = groups
        self._lock = threading.Lock()  # held while a group is copied
        self.is_given_up = False
        """Whether no copy is begun any more."""
        self.failed_from: int | None = None
        """The first layer that may lack something of a part that has failed."""
        self.on_streams = False
        """Whether the host does not wait at its gates."""
        self.is_computed = False
        """Whether the step has computed what it loaded."""
        self.waited_s = 0.0
        """For which the host has waited at its gates, where it does."""
        self.submit_s = 0.0
        """For which the host was busy with submitting it, so far."""
        self._meter = TransferMeter(watch)
        self._notes = notes
        self._runs: list[Runs | None] = [self._prepared(i, part) for i, part in enumerate(parts)]
        self._num_blocks = sum(runs.num_blocks for runs in self._runs if runs is not None)
        self.num_groups = len(groups.ranges) if self._num_blocks else 0
        """Works that it takes: none if there is nothing to copy."""

    def _prepared(self, part: int, runs: tuple[Run, ...]) -> Runs | None:
        try:
            return self._copies.prepare(runs)
        except ConnectorError as error:
            self.errors[part] = error
            self.failed_from = 0
            return None

    def groups_within(self, num_bytes: int) -> int:
        """How many of the first groups come to so many bytes, or a little more."""
        if not self._num_blocks:
            return 0
        layer_bytes = self._num_blocks * self._copies.page_bytes
        num_layers = min(-(-num_bytes // layer_bytes), self._groups.num_layers)
        return self._groups.first_within(num_layers)

    @property
    def is_done(self) -> bool:
        """Whether it touches neither pages nor records any more. Never waits."""
        if self.is_given_up:  # works that were dropped are not in order any more
            return all(gate.query() for gate in self.gates)
        if len(self.gates) < self.num_groups or (self.has_checks and self.check_gate is None):
            return False
        last = self.check_gate or (self.gates[-1] if self.gates else None)
        return last is None or last.query()

    @property
    def has_checks(self) -> bool:
        """Whether a work is owed that checks what has come."""
        return self.num_groups > 0 and any(check is not None for check in self._checks)

    def queue_checks(self) -> None:
        """The work behind that of the last group, on the lane."""
        with self._lock:
            for part, check in enumerate(self._checks):
                if check is not None and self._may_copy(part):
                    check.queue(0)

    def judge_checks(self) -> set[int]:
        """When `check_gate` has opened, once: blocks whose content is bad."""
        checks = (one for one in self._checks if one is not None)
        return set().union(*(check.judge(1) for check in checks))

    @property
    def stats(self) -> TransferStats:
        """What was copied so far."""
        return self._meter.stats()

    @property
    def num_blocks(self) -> int:
        """Of all parts that fit."""
        return self._num_blocks

    @property
    def num_bytes(self) -> int:
        """Of all of these."""
        return self._num_blocks * self._groups.num_layers * self._copies.page_bytes

    @property
    def groups(self) -> LayerGroups:
        """Layers that share a gate."""
        return self._groups

    @property
    def seen_bytes(self) -> int:
        """That were copied so far. Any thread."""
        return self._meter.num_bytes

    def seen(self) -> TransferStats:
        """As `stats`, for who looks on from another thread: changes nothing."""
        return self._meter.seen()

    def copy_group(self, group: int) -> None:
        """The work of one group, on the lane: part by part, each over all its layers, which may
        be one call for a stream. The gate opens behind all parts, so their order is all one."""
        layers = self._groups.ranges[group]
        with self._lock:
            if self.is_given_up:
                return
            begun = None if self._notes is None else self._notes.begin(self._meter)
            self._meter.begin()
            for part, runs in enumerate(self._runs):
                if runs is not None:
                    self._copy(part, layers, runs)
            if layers.stop == self._groups.num_layers:
                self._meter.end()
            if self._notes is not None and begun is not None:
                self._notes.end(begun, layers, self._runs, self._meter, self.errors)

    def _may_copy(self, part: int) -> bool:
        return self.errors[part] is None and not self.is_given_up

    def _copy(self, part: int, layers: range, runs: Runs) -> None:
        if not self._may_copy(part):
            return
        try:
            for copied in self._copies.load_layers(layers, runs):
                self._meter.add(copied)
                if not self._may_copy(part):
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, this part has failed
            self.errors[part] = without_frames(error, "of a load")
            if self.failed_from is None:
                self.failed_from = layers.start

    def fail(self, error: BaseException) -> None:
        """All parts that have not failed yet have now."""
        self.errors = [one or error for one in self.errors]

    def give_up(self, error: BaseException, timeout_s: float) -> bool:
        """Begin no copy any more. In host memory none is under way when this returns True: it waits
        for the one that is; False if that takes longer than `timeout_s`."""
        self.is_given_up = True  # whoever copies looks at it before each copy, under the lock
        self.fail(error)
        has_ended = self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if has_ended:
            self._lock.release()
        return has_ended
