"""What PipelineConnector's worker side shows of its transfers. See `get_transfer_pictures`.

`WorkerPictures` is told of transfers on the device thread, which costs an assignment. Pictures are
taken on the event loop's thread meanwhile: from what only grows, or is replaced as a whole, so
without a lock. The worst that a race does is a picture of a moment ago. Of an ended load nothing
that names its request is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.connectors.pipeline.layer_pipeline import (
    FedTransfer,
    PipelinedLoad,
    SaveTransfer,
    transfer_of,
)
from interlace.connectors.pipeline.worker_bulk import BulkLoad
from interlace.engine.transfer_picture import LayerState, TransferPicture


class WorkerPictures:
    """The newest load and the newest save. See the module's docstring for threads."""

    def __init__(self) -> None:
        """Nothing was loaded or saved. `num_layers` is set when pages are known."""
        self.num_layers = 0
        self.record_bytes = 0
        self._load: PipelinedLoad | BulkLoad | TransferPicture | None = None
        self._num_requests = 0
        self._save: FedTransfer | None = None

    # ---------------------------------------------------------------- on the device thread

    def note_step_load(self, load: PipelinedLoad, num_requests: int) -> None:
        """A step loads within itself."""
        self._num_requests = num_requests
        self._load = load

    def end_step(self) -> None:
        """The step that loads within itself has been computed."""
        load = self._load
        if isinstance(load, PipelinedLoad):
            load.is_computed = True

    def note_bulk_load(self, load: BulkLoad) -> None:
        """A request is loaded beside the steps."""
        self._load = load

    def end_bulk_load(self, load: BulkLoad) -> None:
        """It has ended: what it looks like is kept, and not whose it was."""
        if self._load is load:
            self._load = self._of_bulk(load)

    def note_saves(self, saves: Sequence[SaveTransfer]) -> None:
        """A step's saves were queued."""
        if saves:
            self._save = transfer_of(saves[-1])

    def forget(self) -> None:
        """The pages go."""
        self._load = self._save = None

    # ---------------------------------------------------------------- any thread

    def load(self) -> TransferPicture | None:
        """The newest one."""
        load = self._load
        if isinstance(load, PipelinedLoad):
            return _of_step_load(load, self._num_requests)
        if isinstance(load, BulkLoad):
            return self._of_bulk(load)
        return load

    def save(self) -> TransferPicture | None:
        """The newest one."""
        save = self._save
        if save is None:
            return None
        seen = save.seen()
        is_done = save.is_done
        return TransferPicture(
            kind="save",
            way="beside the steps",
            layers=tuple(_states([save], self.num_layers, "saved")),
            num_requests=0,
            num_blocks=self._blocks_of(seen.num_bytes) if is_done else 0,
            num_bytes=seen.num_bytes if is_done else 0,
            num_bytes_done=seen.num_bytes,
            seconds=seen.seconds if is_done else None,
            error=_told(save.error),
        )

    def _blocks_of(self, num_bytes: int) -> int:
        return num_bytes // self.record_bytes if self.record_bytes else 0

    def _of_bulk(self, load: BulkLoad) -> TransferPicture:
        transfers = load.transfers
        backward = load.backward
        num_blocks = sum(run.num_blocks for run in load.load.runs)
        if backward is not None:
            num_blocks = backward.share
        states: list[LayerState] = ["waiting"] * self.num_layers
        if transfers:
            states = _states(transfers, self.num_layers, "arrived")
        if load.has_waiting:  # in files
            for layer, state in enumerate(states):
                if state in ("waiting", "arrived"):
                    states[layer] = "reading"
        errors = [one.error for one in transfers if one.error is not None]
        seen = [one.seen() for one in transfers]
        is_done = load.is_done
        times = [one.seconds for one in seen if one.seconds is not None]
        num_unread = sum(len(chunk.unfilled) for chunk in load.begun)
        error = _told(errors[0]) if errors else None
        if error is None and num_unread:
            error = f"{num_unread} blocks could not be read; they are computed"
        if is_done and num_unread and num_unread >= num_blocks:
            states = ["failed"] * self.num_layers
        return TransferPicture(
            kind="load",
            way="in bulk" if load.load.share is None else "from the back",
            layers=tuple(states),
            num_requests=1,
            num_blocks=num_blocks,
            num_bytes=num_blocks * self.record_bytes,
            num_bytes_done=sum(one.num_bytes for one in seen),
            seconds=sum(times) if is_done and times else None,
            error=error,
        )


def _of_step_load(load: PipelinedLoad, num_requests: int) -> TransferPicture:
    seen = load.seen()
    states = _states_of_step(load)
    errors = [one for one in load.errors if one is not None]
    is_done = load.is_done
    seconds = seen.seconds if is_done and not load.is_given_up else None
    error = None
    if errors:
        error = f"of {len(errors)} of {len(load.errors)} requests: {_told(errors[0])}"
    return TransferPicture(
        kind="load",
        way="layer by layer",
        layers=tuple(states),
        num_requests=num_requests,
        num_blocks=load.num_blocks,
        num_bytes=load.num_bytes,
        num_bytes_done=seen.num_bytes,
        seconds=seconds,
        hidden_share=_hidden_share(load, seconds),
        error=error,
    )


def _states_of_step(load: PipelinedLoad) -> list[LayerState]:
    gates, ranges = tuple(load.gates), load.groups.ranges
    states: list[LayerState] = []
    is_copying = True  # whoever is next
    for group, layers in enumerate(ranges):
        state: LayerState = "waiting"
        if load.num_groups == 0:  # nothing fits, or nothing is to be copied
            state = "arrived"
        elif group < len(gates) and gates[group].query():
            state = "failed" if gates[group].error is not None else "arrived"
        elif load.is_given_up:
            state = "failed"
        elif group < len(gates) and is_copying:
            state, is_copying = "copying", False
        has_computed = load.is_computed or (not load.on_streams and group + 1 in load.groups_passed)
        if state == "arrived" and has_computed:
            state = "computed"
        states += [state] * len(layers)
    failed_from = load.failed_from
    if failed_from is not None:
        states[failed_from:] = ["failed"] * (len(states) - failed_from)
    return states


def _hidden_share(load: PipelinedLoad, seconds: float | None) -> float | None:
    """Where the host waits at gates it is known for how long: the rest of the load was hidden."""
    if not seconds or load.on_streams or not load.is_computed or any(load.errors):
        return None
    return min(1.0, max(0.0, 1.0 - load.waited_s / seconds))


def _states(transfers: Sequence[FedTransfer], num_layers: int, end: LayerState) -> list[LayerState]:
    """Of whole records, some of them in each transfer: a layer is where all of its slices are."""
    of_each = [_states_of(one, num_layers, end) for one in transfers]
    return [_least(states) for states in zip(*of_each, strict=True)]


def _least(states: tuple[LayerState, ...]) -> LayerState:
    if "failed" in states:
        return "failed"
    if len(set(states)) > 1:
        return "copying"
    return states[0]


def _states_of(one: FedTransfer, num_layers: int, end: LayerState) -> list[LayerState]:
    num_ended, num_fed, has_failed = one.num_ended, one.num_fed, one.error is not None
    if not one.layer_ranges:  # cut as it goes on: all layers at a time
        if has_failed:
            return ["failed"] * num_layers
        if one.is_done:
            return [end] * num_layers
        return ["copying" if num_fed else "waiting"] * num_layers
    first: list[int | None] = [None] * num_layers
    last = [0] * num_layers
    for number, (begin, stop) in enumerate(one.layer_ranges):
        for layer in range(begin, stop):
            last[layer] = number
            if first[layer] is None:
                first[layer] = number
    states: list[LayerState] = []
    for layer in range(num_layers):
        begun = first[layer]
        if last[layer] < num_ended and not (has_failed and last[layer] == num_ended - 1):
            states.append(end)
        elif has_failed:
            states.append("failed")
        else:
            states.append("copying" if begun is not None and begun < num_fed else "waiting")
    return states


def _told(error: BaseException | None) -> str | None:
    """In one line."""
    if error is None:
        return None
    return " ".join(str(error).split()) or type(error).__name__
