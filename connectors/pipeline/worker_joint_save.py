"""Small saves of one step that share a transfer: what a copy costs the host is paid once for all.

Where many requests decode together, their blocks fill up together. Device thread; works run on the
store lane.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from interlace.connectors.pipeline.worker_feeder import (
    Copies,
    FedTransfer,
    Feeder,
    Slice,
    given_up,
    layer_slices,
)
from interlace.connectors.pipeline.worker_times import Stopwatch
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Gate
from interlace.layers.page_copies import Run, Runs


class SavePart:
    """One save of a `JointSave`. Device thread."""

    name = "nobody in particular"
    """For people."""

    def __init__(self, joint: JointSave, runs: tuple[Run, ...]) -> None:
        """For `JointSave`."""
        self._joint = joint
        self.joint: FedTransfer = joint
        """That it is a part of."""
        self.runs = runs
        self.own_error: BaseException | None = None
        """Why it alone fails; whoever copies looks at it under the lock of the joint save."""

    @property
    def is_done(self) -> bool:
        """Whether it will touch neither pages nor records any more."""
        return self._joint.is_done

    @property
    def error(self) -> BaseException | None:
        """Why not everything was copied; None while it goes well."""
        return self.own_error or self._joint.error

    @property
    def last_gate(self) -> Gate | None:
        """See `FedTransfer`."""
        return self._joint.last_gate

    def give_up(self, timeout_s: float) -> bool:
        """See `FedTransfer`. The others are saved nevertheless."""
        return self._joint.give_up_part(self, timeout_s)


class JointSave(FedTransfer):
    """Saves all parts, some layers of all of them at a time. A copy that fails fails all."""

    def __init__(
        self,
        copies: Copies,
        parts: Sequence[tuple[Run, ...]],
        after: Gate | None,
        watch: Stopwatch,
        *,
        slice_bytes: int,
    ) -> None:
        """`parts` are runs that fit: see `Copies.prepare`. A work copies about `slice_bytes`."""
        all_runs = copies.prepare([run for runs in parts for run in runs])
        slices = layer_slices(copies, [all_runs] if all_runs.num_blocks else [], slice_bytes)
        super().__init__(slices, copies.save_layers, after, watch)
        self.name = f"{len(parts)} saves of one step"
        self.parts = tuple(SavePart(self, runs) for runs in parts)
        self._copies = copies
        self._has_changed = False  # who is left, since the last copy
        self._runs = [all_runs]  # kept until all is done; the last ones are of who is left

    def runs_of(self, one: Slice) -> Runs:
        """See `FedTransfer`: of the parts that are left."""
        if self._has_changed:
            self._has_changed = False
            left = (part for part in self.parts if part.own_error is None)
            self._runs.append(self._copies.prepare([run for part in left for run in part.runs]))
        return self._runs[-1]

    def give_up_part(self, part: SavePart, timeout_s: float) -> bool:
        """For `SavePart`."""
        has_ended = self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if not has_ended or self.has_more:
            part.own_error = part.own_error or given_up()
            self._has_changed = True
        if all(one.own_error is not None for one in self.parts):
            self.drop()
        if has_ended:
            self._lock.release()
        return has_ended


def joint_saves(
    feeder: Feeder, parts: Sequence[tuple[Run, ...]], after: Gate | None
) -> list[FedTransfer | SavePart | ConnectorError]:
    """Let `feeder` save these behind `after`, in order. Neighbours of which one work can copy a
    layer are joined. What does not fit the records or the pages is answered with why."""
    most_blocks = feeder.slice_bytes // feeder.copies.page_bytes
    answers: list[FedTransfer | SavePart | ConnectorError] = []
    for group in _groups([_num_blocks(runs) for runs in parts], most_blocks):
        answers += _save_group(feeder, [parts[i] for i in group], after)
    return answers


def _save_group(
    feeder: Feeder, parts: list[tuple[Run, ...]], after: Gate | None
) -> list[FedTransfer | SavePart | ConnectorError]:
    reasons = [_why_not(feeder.copies, runs) for runs in parts]
    fitting = [runs for runs, why_not in zip(parts, reasons, strict=True) if why_not is None]
    made: list[FedTransfer | SavePart] = []
    if len(fitting) == 1:
        made.append(feeder.add(fitting[0], after))
    elif fitting:
        slice_bytes = feeder.slice_bytes
        joint = JointSave(feeder.copies, fitting, after, feeder.watch, slice_bytes=slice_bytes)
        feeder.append(joint)
        made += joint.parts
    rest = iter(made)
    return [why_not or next(rest) for why_not in reasons]


def _why_not(copies: Copies, runs: tuple[Run, ...]) -> ConnectorError | None:
    try:
        copies.prepare(runs)
    except ConnectorError as error:
        return error
    return None


def _groups(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours whose sum is at most `most`, as many as possible; one at least."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if begin < i and total + size > most:
            yield range(begin, i)
            begin, total = i, 0
        total += size
    if sizes:
        yield range(begin, len(sizes))


def _num_blocks(runs: Sequence[Run]) -> int:
    return sum(count for _, _, count in runs)
