"""Moves blocks between host records and pages while the model computes. Knows no store.

    pipeline = LayerPipeline.over(records, layers, CudaLanes(CudaStreams(device)))
    load = pipeline.submit_load([runs_of_one_request, runs_of_another], step_id)
    ... each layer, before it writes its KV:  pipeline.wait(layer)
    ... or in a graph, captured with pipeline.layer_gates, if are_armed(step_id)
    save = pipeline.submit_save(runs, after=pipeline.record_compute())
    ... once a step:  pipeline.poll()
    ... and while the device computes, if that can be:  pipeline.advance()

Three lanes. On "load" a step's own loads go layer by layer over all of its requests, a gate for
each group of layers. On "bulk" and "store" whole records go beside the steps, in slices, so that
little is queued on the device at a time, and nothing more while a step waits for its own load; what
is loaded from the back goes on "bulk" too, its last records first.

**On a GPU** lanes are streams: copies are queued at once, behind all that is on the compute stream,
and whether CUDA takes them is known then. The host never waits. **On a CPU** lanes are threads, or
virtual: `wait` waits on the host, up to a deadline.

**A lane that hangs** is given up after the deadline, and a fresh one taken: what has not begun on
it never does, and has failed. A copy that is under way there may still write, so its blocks must
stay what they are. Beside the steps that is so: such a load is done only when its copy returns.
Within a step it is not, and `finish_step` raises.

All methods are for the device thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.worker_backward import BackwardTransfer
from interlace.connectors.pipeline.worker_checks import LoadCheck
from interlace.connectors.pipeline.worker_deadlines import PatientFeeder
from interlace.connectors.pipeline.worker_feeder import Copies, FedTransfer, Visit
from interlace.connectors.pipeline.worker_joint_save import SavePart, joint_saves
from interlace.connectors.pipeline.worker_loads import Pace, PipelinedLoad
from interlace.connectors.pipeline.worker_notes import LoadNotes, SliceNotes
from interlace.connectors.pipeline.worker_times import (
    ClockStopwatch,
    EventStopwatch,
    Stopwatch,
    TransferStats,
)
from interlace.engine.errors import ConfigError, ConnectorError, LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lanes, LayerGates, TransferRecorder
from interlace.engine.transfer_picture import LanePicture
from interlace.layers.cuda_gates import GraphGate
from interlace.layers.cuda_lanes import CudaLane, CudaLanes
from interlace.layers.page_copies import PageCopies, Run
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

__all__ = [
    "BackwardTransfer",
    "FedTransfer",
    "LaneCopies",
    "LayerPipeline",
    "Pace",
    "PipelinedLoad",
    "SaveTransfer",
    "TransferStats",
    "Visit",
    "transfer_of",
]

DEFAULT_GROUP_SIZE = 2
DEFAULT_WINDOW_BYTES = 32 << 20
"""Half a millisecond of a PCIe 5 link."""
DEFAULT_DEADLINE_S = 30.0
FIRST_BYTES = 80 << 20
"""Of a load that is submitted by layer, before anything else of the step: 1.5 ms of the link, in
which its inputs are made and its first layer is launched."""
AHEAD_BYTES = 160 << 20
"""Of it from then on, ahead of the layer that is launched."""
FIRST_SHARE = 8
"""Of a load whose gates are armed in two goes, one layer in so many comes first: the device has to
compute for them as long as the host queues the rest."""


SaveTransfer: TypeAlias = FedTransfer | SavePart


def transfer_of(save: SaveTransfer) -> FedTransfer:
    """What copies it, for others too if it is a small one."""
    return save.joint if isinstance(save, SavePart) else save


class LaneCopies(NamedTuple):
    """For each lane copies that suit it."""

    load: Copies
    bulk: Copies
    store: Copies

    @classmethod
    def over(
        cls, records: torch.Tensor | RecordSpace, layers: Sequence[torch.Tensor]
    ) -> LaneCopies:
        """Between these records and pages: see `PageCopies`. Raises: `ConnectorError`."""
        beside = PageCopies.beside_compute(records, layers)
        return cls(PageCopies.within_steps(records, layers), beside, beside)


class LayerPipeline:
    """See the module's docstring."""

    def __init__(
        self,
        lanes: Lanes,
        copies: LaneCopies,
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
        watch: Stopwatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`group_size`: layers that share a gate, see `LayerGroups`. `window_bytes`: what bulk
        loads, and saves, have queued at most, each. `deadline_s`: how long one layer waits, where
        the host does, and how long a work beside the steps may take, by `clock`. `watch` is for
        tests: by itself it is events on a GPU, and a clock elsewhere.

        Raises: `ConfigError` for numbers below 1.
        """
        if group_size < 1 or window_bytes < 1 or deadline_s <= 0:
            raise ConfigError(
                f"group_size ({group_size}) and window_bytes ({window_bytes}) must be at least 1,"
                f" and deadline_s ({deadline_s}) above 0."
            )
        is_cuda = isinstance(lanes, CudaLanes)
        self.watch = watch or (EventStopwatch() if is_cuda else ClockStopwatch(time.monotonic))
        self._compute = lanes.compute if isinstance(lanes, CudaLanes) else None
        self._copies = copies.load
        self._groups = LayerGroups(copies.load.num_layers, group_size)
        self._deadline_s = deadline_s
        self._clock = clock
        self._lanes = lanes
        self._lane = lanes.lane("load")
        self._bulk, self._store = (
            PatientFeeder(
                functools.partial(lanes.lane, name),
                one,
                copy_layers,
                window_bytes=window_bytes,
                watch=self.watch,
                deadline_s=deadline_s,
                clock=clock,
                is_stream=is_cuda,
            )
            for name, one, copy_layers in (
                ("bulk", copies.bulk, copies.bulk.load_layers),
                ("store", copies.store, copies.store.save_layers),
            )
        )
        self.is_advanced = False
        """Whether somebody calls `advance`: then little has to be queued ahead."""
        self._was_kept_back = False  # by a step's own load, when `advance` was called last
        self._load: PipelinedLoad | None = None  # the newest one
        self._loaded_bytes = 0  # by those before
        self._step_id = 0  # that it is of
        self._groups_ahead = 0  # of the one for which the step waits, so many are submitted
        self._may_write_late = False  # a copy of it that was given up
        self._num_late = 0  # loads within steps, since the start
        self._gates = self._make_gates(lanes) if isinstance(lanes, CudaLanes) else None
        self._recorder: TransferRecorder | None = None  # while somebody looks

    @classmethod
    def over(
        cls,
        records: torch.Tensor,
        layers: Sequence[torch.Tensor],
        lanes: Lanes,
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> LayerPipeline:
        """Between these records and pages: see `LaneCopies`, and the constructor.

        Raises: `ConnectorError`, `ConfigError`.
        """
        return cls(
            lanes,
            LaneCopies.over(records, layers),
            group_size=group_size,
            window_bytes=window_bytes,
            deadline_s=deadline_s,
        )

    def _make_gates(self, lanes: CudaLanes) -> PipelineGates:
        gates = [lanes.graph_gate() for _ in self._groups.ranges]
        return PipelineGates(gates, self._groups, self._arm_rest)

    def record(self, recorder: TransferRecorder | None) -> None:
        """Tell this one of what is copied from now on; None: nobody."""
        self._recorder = recorder
        self._bulk.notes = None if recorder is None else SliceNotes(recorder, "load")
        self._store.notes = None if recorder is None else SliceNotes(recorder, "save")

    @property
    def layer_gates(self) -> LayerGates | None:
        """Gates for captured graphs, one for each group; None if lanes are no streams."""
        return self._gates

    @property
    def newest_load(self) -> PipelinedLoad | None:
        """Within a step. Any thread."""
        return self._load

    def lanes_seen(self) -> tuple[LanePicture, ...]:
        """The lanes, for who looks on. Any thread; asks no device but whether events have passed.
        What goes beside the steps counts as busy until the next visit has seen its end."""
        load = self._load
        loaded_bytes = self._loaded_bytes + (0 if load is None else load.seen_bytes)
        beside = (
            LanePicture(name, feeder.num_bytes, is_busy=not feeder.is_idle)
            for name, feeder in (("bulk", self._bulk), ("store", self._store))
        )
        is_busy = load is not None and not load.is_done
        return (LanePicture("load", loaded_bytes, is_busy=is_busy), *beside)

    @property
    def is_on_streams(self) -> bool:
        """Whether lanes are streams: else the host computes too, and copies beside that."""
        return self._compute is not None

    # ---------------------------------------------------------------- within the step

    def submit_load(
        self,
        parts: Sequence[Sequence[Run]],
        step_id: int,
        *,
        pace: Pace = Pace.AT_ONCE,
        checks: Sequence[LoadCheck | None] = (),
        request_ids: Sequence[str] = (),
    ) -> PipelinedLoad:
        """Load the runs of all parts within step `step_id`, and arm its gates.

        With another `pace` the rest of a long load comes later, so that the step is launched
        sooner: `BY_LAYER` is for a step that calls `wait` for each layer, and then no captured
        graph may wait for the gates; `IN_TWO` for one whose graph is cut behind the first layers.
        `checks`, of each part, are queued behind the last layer when the step is: see
        `PipelinedLoad.check_gate`. `request_ids`, of each part, are for who looks.

        The load before must be done, or its step over. What goes wrong is in `errors`, part by
        part; never raises for it.
        """
        runs = [tuple(part) for part in parts]
        recorder = self._recorder
        notes = None if recorder is None else LoadNotes(recorder, step_id, request_ids)
        load = PipelinedLoad(self._copies, runs, self._groups, self.watch, checks, notes)
        load.on_streams = self.is_on_streams
        if self._load is not None:
            self._loaded_bytes += self._load.seen_bytes
        self._load = load
        if self._compute is not None:
            # What was queued before may still write to the blocks: zeros, for instance.
            self._lane.wait(self._compute.record())
        self._step_id = step_id
        num_first, self._groups_ahead = self._groups_of(load, pace)
        self._submit_up_to(num_first)
        return load

    def _groups_of(self, load: PipelinedLoad, pace: Pace) -> tuple[int, int]:
        """So many groups are submitted at first, and then ahead of the one that the step waits
        for."""
        if pace is Pace.AT_ONCE or self._gates is None:
            return load.num_groups, load.num_groups
        num_first = load.groups_within(FIRST_BYTES)
        if pace is Pace.BY_LAYER:
            return num_first, load.groups_within(AHEAD_BYTES)
        return max(num_first, self._gates.num_first_groups), load.num_groups

    def _arm_rest(self, step_id: int) -> None:
        """For `PipelineGates`."""
        if self._load is not None and self._step_id == step_id:
            self._submit_up_to(self._load.num_groups)

    def _submit_up_to(self, num_groups: int) -> None:
        """So many groups of the step's load, if they were not submitted yet."""
        load = self._load
        if load is None or load.is_given_up:
            return
        end = load.num_groups if self._gates is None else min(num_groups, load.num_groups)
        if len(load.gates) >= end:
            return
        begun_s = self._clock()
        try:
            self._submit_groups(load, range(len(load.gates), end))
        except (LaneFullError, LaneClosedError) as error:
            self._give_up(load, error)
        load.submit_s += self._clock() - begun_s

    def _submit_groups(self, load: PipelinedLoad, groups: range) -> None:
        """A gate for each group. A stream takes all in one work; where works take their time, each
        group is one, so that other lanes get their turn. Raises: as `Lane.submit`."""
        works = [functools.partial(load.copy_group, group) for group in groups]
        if self._gates is None or not isinstance(self._lane, CudaLane):
            for work in works:
                load.gates.append(self._lane.submit(work))
        else:
            gates = self._gates.gates[groups.start : groups.stop]
            load.gates += self._lane.submit_parts(works, gates, self._step_id)

    def submit_rest(self) -> None:
        """Nobody calls `wait` for this step any more: submit what it has not come to, and the
        checks, for which nothing of the step waits, but the host takes half a millisecond."""
        load = self._load
        if load is None:
            return
        self._submit_up_to(load.num_groups)
        if load.has_checks and load.check_gate is None and not load.is_given_up:
            try:
                load.check_gate = self._lane.submit(load.queue_checks)
            except (LaneFullError, LaneClosedError) as error:
                self._give_up(load, error)

    def wait(self, layer: int) -> None:
        """Let the step wait until what it loads of `layer` is in the pages, or has failed.

        Nothing if nothing is loaded. May be repeated.
        """
        load, group = self._load, self._groups.group_of[layer]
        if load is None or group in load.groups_passed:
            return
        # The device has no work before the first layer is launched.
        if group and len(load.gates) < min(load.num_groups, group + self._groups_ahead):
            self._submit_up_to(group + self._groups_ahead + 1)  # two at a time
        if group >= len(load.gates):
            return
        load.groups_passed.add(group)
        gate = load.gates[group]
        if self._compute is not None:
            has_come = self._compute.wait(gate, self._deadline_s)
        else:
            begun_s = self._clock()
            has_come = gate.wait(self._deadline_s)
            load.waited_s += self._clock() - begun_s
        if not has_come:
            self._give_up_late(load, layer)
        elif gate.error is not None:
            load.fail(gate.error)

    def _give_up_late(self, load: PipelinedLoad, layer: int) -> None:
        self._num_late += 1
        error = ConnectorError(
            f"layer {layer} was not loaded within {self._deadline_s:g} s: its blocks are computed"
            " instead. Is the machine busy with other things?"
        )
        self._give_up(load, error)
        if self._compute is None:
            self._lane.close(0.0)  # what has not begun is dropped
            self._lane = self._lanes.lane("load")

    def _give_up(self, load: PipelinedLoad, error: BaseException) -> None:
        self._may_write_late |= not load.give_up(error, self._deadline_s)

    def finish_step(self) -> None:
        """The step is over: `errors` of its load are final when this returns.

        On a GPU they are so when all is submitted. Elsewhere the host waits for what no layer has
        waited for. Whether what came is good is another question: see `wait_for_checks`.

        Raises: `ConnectorError` if a copy has not returned for twice the deadline. It may write to
        its blocks whenever it does, and nobody keeps those: nothing may be computed any more.
        """
        self.submit_rest()
        if self._compute is None:
            for layers in self._groups.ranges:
                self.wait(layers.start)
        if self._may_write_late:
            raise ConnectorError(
                f"a copy into the pages has not returned for {2 * self._deadline_s:g} s, and may"
                " still write to blocks that others would be given: close the engine, and look at"
                " what holds up the host's memory or its store."
            )

    def wait_for_checks(self, load: PipelinedLoad) -> set[int]:
        """When the step's tokens have come: blocks of its load whose content is bad, once. On a GPU
        it waits for as long as all of the load takes to be read from the device's own memory, less
        what the step computed behind its last layer's load."""
        gate = load.check_gate
        if gate is None:
            return set()
        if not gate.wait(self._deadline_s) or gate.error is not None:
            error = ConnectorError(
                f"what was loaded was not checked within {self._deadline_s:g} s ({gate.error}): it"
                " is computed instead."
            )
            self._give_up(load, error)
            return set()
        return load.judge_checks()

    # ---------------------------------------------------------------- beside the steps

    def submit_bulk(
        self,
        runs: Sequence[Run],
        *,
        after: Gate | None = None,
        window_bytes: int = 0,
        begins_now: bool = True,
        check: LoadCheck | None = None,
    ) -> FedTransfer:
        """Load these beside the steps, behind the loads that came before, and behind `after`; None:
        behind all that steps have queued so far. `window_bytes` of it may be queued, if the
        pipeline's own window is smaller: who polls once a step leaves the link idle else. Unless it
        `begins_now` it does with the next visit that feeds: see `poll`. `check` comes last.

        Raises: `ConnectorError` if `runs` do not fit.
        """
        after = self.record_compute() if after is None else after
        load = self._bulk.add(tuple(runs), after, window_bytes=window_bytes)
        load.check = check
        if begins_now:
            self.poll()
        return load

    def submit_from_the_back(
        self,
        runs: Sequence[Run],
        share: int,
        window_bytes: int,
        check: LoadCheck | None = None,
        available: int | None = None,
    ) -> BackwardTransfer:
        """Load the last `share` blocks of these beside the steps, the last ones first, behind the
        loads that came before. `window_bytes` of it may be queued, if the pipeline's own window is
        smaller: somebody waits for it. `available`: see `set_available`; None: all.

        Raises: `ConnectorError` if `runs` do not fit.
        """
        load = BackwardTransfer(
            self._bulk.copies,
            tuple(runs),
            share,
            after=self.record_compute(),
            window_bytes=max(window_bytes, self._bulk.window_bytes),
            watch=self.watch,
            available=available,
        )
        load.check = check
        self._bulk.append(load)
        self.poll(Visit.BEFORE_FORWARD)
        return load

    def set_share(self, load: BackwardTransfer, share: int) -> None:
        """Load that many blocks from the back in all, or as many as are under way."""
        load.set_share(share)
        self._bulk.append(load)
        self.poll(Visit.BEFORE_FORWARD)

    def set_available(self, load: BackwardTransfer, num_blocks: int) -> None:
        """So many blocks, from the back, may be loaded by now: see `BackwardTransfer`."""
        load.set_available(num_blocks)
        self._bulk.append(load)

    def submit_save(self, runs: Sequence[Run], after: Gate | None = None) -> FedTransfer:
        """Save these beside the steps, when `after`, a gate of `record_compute`, has opened.

        Raises: `ConnectorError` if `runs` do not fit.
        """
        save = self._store.add(tuple(runs), after)
        self.poll()
        return save

    def submit_saves(
        self, parts: Sequence[Sequence[Run]], after: Gate | None = None
    ) -> list[SaveTransfer | ConnectorError]:
        """Save each of these likewise; small ones share a transfer, whose failure is all theirs.

        Never raises: what does not fit is answered with why.
        """
        answers = joint_saves(self._store, [tuple(part) for part in parts], after)
        self.poll()
        return answers

    def record_compute(self) -> Gate | None:
        """A gate behind all that steps have queued so far; None where nothing is queued."""
        return None if self._compute is None else self._compute.record()

    def fence(self, transfer: SaveTransfer) -> None:
        """When this returns, what is computed from now on may overwrite the blocks of `transfer`.

        What of it is not queued on the device is given up, which fails it. On a GPU the compute
        stream waits for the rest, and the host for nothing.

        Raises: `ConnectorError` if the copy under way does not return in time: then nothing may be
        computed any more, since the blocks are others' by now.
        """
        if not transfer.give_up(self._deadline_s):
            raise ConnectorError(
                f"a copy for {transfer.name} has not returned for {self._deadline_s:g} s, and its"
                " blocks are handed on: close the engine, and look at what holds up the host's"
                " memory or its store."
            )
        if self._compute is not None and transfer.last_gate is not None:
            self._compute.wait(transfer.last_gate)

    def poll(self, visit: Visit = Visit.BEHIND_FORWARD) -> None:
        """Move on what goes on beside the steps. Never waits.

        Once somebody calls `advance`, nothing is fed behind a forward by this, unless the last time
        a step's own load was under way: where every step loads, that would be so for ever.
        """
        if self._is_quiet:
            return
        leaves_it = self.is_advanced and not self._was_kept_back
        self._poll(visit, may_feed=visit is not Visit.BEHIND_FORWARD or not leaves_it)

    def advance(self, visit: Visit = Visit.WAITING) -> bool:
        """Move it on a little, while the device computes and this thread waits for it; whether
        there is more to feed, and the step does not wait for a load of its own. Never waits."""
        self.is_advanced = True
        self._was_kept_back = not (self._is_quiet or self._may_feed)
        if self._is_quiet or self._was_kept_back:
            return False
        self._poll(visit, may_feed=True)
        return self._bulk.has_more or self._store.has_more

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing goes on beside the steps."""
        return self._bulk.is_idle and self._store.is_idle

    @property
    def _may_feed(self) -> bool:
        """Whether no step waits for its own load."""
        return self._load is None or self._load.is_done

    def _poll(self, visit: Visit, *, may_feed: bool) -> None:
        may_feed = may_feed and self._may_feed
        for feeder in (self._bulk, self._store):
            feeder.poll(may_feed=may_feed, visit=visit)

    @property
    def num_stuck(self) -> int:
        """Transfers of all kinds that were given up after the deadline, since the start."""
        return self._num_late + self._bulk.num_given_up + self._store.num_given_up

    @property
    def num_hanging(self) -> int:
        """Of those beside the steps, what has not returned."""
        return self._bulk.num_hanging + self._store.num_hanging

    def close(self, timeout_s: float = DEFAULT_DEADLINE_S) -> bool:
        """Give up what has not begun, and end the lanes; False if one took longer than that.

        After it, all that was submitted is done unless a lane hangs. May be repeated.
        """
        if self._load is not None and not self._load.is_done:
            closed = LaneClosedError("the pipeline was closed before this was loaded.")
            self._load.give_up(closed, timeout_s)
        ended = [self._bulk.close(timeout_s), self._store.close(timeout_s)]
        return all((*ended, self._lane.close(timeout_s)))


class PipelineGates:
    """`LateLayerGates` of a pipeline: layers of a group share one. Device thread."""

    def __init__(
        self, gates: Sequence[GraphGate], groups: LayerGroups, arm_rest: Callable[[int], None]
    ) -> None:
        """One gate for each group. `arm_rest` takes the number of a step."""
        self.gates = gates
        self.num_first_groups = groups.first_within(max(1, groups.num_layers // FIRST_SHARE))
        """That are armed before the others."""
        self._groups = groups
        self._arm_rest = arm_rest

    @property
    def num_first_layers(self) -> int:
        """See `LateLayerGates`: those of whole groups."""
        return self._groups.ranges[self.num_first_groups - 1].stop

    def wait_here(self, layer: int) -> None:
        """See `LayerGates`: the first layer of a group waits for all of it."""
        group = self._groups.group_of[layer]
        if layer == self._groups.ranges[group].start:
            self.gates[group].wait_here()

    def are_armed(self, step_id: int) -> bool:
        """See `LayerGates`."""
        return all(gate.armed_for == step_id for gate in self.gates)

    def are_first_armed(self, step_id: int) -> bool:
        """See `LateLayerGates`."""
        first = self.gates[: self.num_first_groups]
        return all(gate.armed_for == step_id for gate in first)

    def arm_rest(self, step_id: int) -> None:
        """See `LateLayerGates`. Never raises: what fails is in the load's `errors`."""
        self._arm_rest(step_id)
