"""What each piece of a transfer was, and when, for who looks at an engine's steps: see
`KVConnectorBase_V1.record_transfers`.

Works note their pieces on their lanes, around their copies, and only while somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from interlace.engine.ports import TransferRecorder
from interlace.engine.step_timings import TransferTiming, Way
from interlace.layers.page_copies import Runs


class Counted(Protocol):
    """`TransferMeter`, as far as notes ask it."""

    @property
    def num_bytes(self) -> int:
        """Copied so far."""
        ...


class Named(Protocol):
    """`FedTransfer`, likewise."""

    @property
    def name(self) -> str:
        """For people: the request that loads, or which save it is; known soon after it begins."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why not everything was copied."""
        ...


class _Begun(NamedTuple):
    """A piece that is being copied."""

    mark: Any
    num_bytes: int
    """Of its transfer, before."""


class _Notes:
    def __init__(self, recorder: TransferRecorder) -> None:
        self._recorder = recorder

    def begin(self, meter: Counted) -> _Begun:
        """A piece is about to be copied, which `meter` counts."""
        return _Begun(self._recorder.mark(), meter.num_bytes)

    def _end(self, begun: _Begun, tell: Callable[[float, float], TransferTiming]) -> None:
        self._recorder.add(begun.mark, self._recorder.mark(), tell)


class LoadNotes(_Notes):
    """Of what one step loads within itself: a piece is a group of layers, of all its requests."""

    def __init__(
        self, recorder: TransferRecorder, step_id: int, request_ids: Sequence[str]
    ) -> None:
        """`request_ids`: of each part."""
        super().__init__(recorder)
        self._step_id = step_id
        self._request_ids = tuple(request_ids)

    def end(
        self,
        begun: _Begun,
        layers: range,
        parts: Iterable[Runs | None],
        meter: Counted,
        errors: Iterable[BaseException | None],
    ) -> None:
        """A group was copied, but for parts that have failed."""
        fitting = [runs for runs in parts if runs is not None]
        num_bytes = meter.num_bytes - begun.num_bytes
        whys = list(errors)
        reason = next((str(error) for error in whys if error is not None), None)
        failed = tuple(
            one for one, error in zip(self._request_ids, whys, strict=False) if error is not None
        )

        def tell(begin_s: float, end_s: float) -> TransferTiming:
            return TransferTiming(
                "load", "load", self._request_ids, layers.start, layers.stop,
                num_blocks=sum(runs.num_blocks for runs in fitting),
                num_bytes=num_bytes,
                copied_by=_ways(fitting),
                begin_s=begin_s,
                end_s=end_s,
                step_id=self._step_id,
                error=reason,
                failed_ids=failed,
            )  # fmt: skip

        self._end(begun, tell)


class SliceNotes(_Notes):
    """Of what goes on one lane beside the steps: a piece is a slice."""

    def __init__(self, recorder: TransferRecorder, way: Way) -> None:
        """`way`: what the lane does."""
        super().__init__(recorder)
        self._way = way

    def end(
        self, begun: _Begun, lane: str, transfer: Named, layers: range, runs: Runs, meter: Counted
    ) -> None:
        """A slice was copied; nothing if its transfer had been given up before."""
        num_bytes = meter.num_bytes - begun.num_bytes
        error = None if transfer.error is None else str(transfer.error)
        if not num_bytes and error is None:
            return

        def tell(begin_s: float, end_s: float) -> TransferTiming:
            return TransferTiming(
                lane, self._way,
                (transfer.name,) if self._way == "load" else (),
                layers.start, layers.stop, runs.num_blocks, num_bytes, _ways([runs]),
                begin_s, end_s,
                error=error,
                failed_ids=(transfer.name,) if self._way == "load" and error is not None else (),
                transfer=transfer.name,
            )  # fmt: skip

        self._end(begun, tell)


def _ways(parts: Iterable[Runs]) -> str:
    return "+".join(sorted({runs.way.name.lower() for runs in parts}))
