"""What a view shows: the newest frame, and what the viewer itself knows. Frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from interlace.engine.live_frame import Frame
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.gpu_load import GpuLoad

Page = Literal["overview", "requests", "stores"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """All that is drawn."""

    frame: Frame
    flow: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """(connector, lane) -> bytes a second, from the frames of the last second."""
    gpu: GpuLoad | Unknown | None = None
    """None: it is not known yet, or the engine computes on a CPU."""
    page: int = 0
    """Counted from 0; beyond the last one it begins again."""
    every_s: float = 0.5
    """Between two pictures."""
    is_paused: bool = False
    num_lost: int = 0
    """Frames that this viewer was too slow for."""
    gone: str | None = None
    """Why no more frames come."""
    note: str = ""
    """What became of a key."""


def connectors_of(frame: Frame) -> tuple[ConnectorPicture | None, ...]:
    """Each has an overview; without any there is one, too."""
    return frame.snapshot.connectors or (None,)


def pages_of(frame: Frame) -> tuple[tuple[Page, ConnectorPicture | None], ...]:
    """An overview for each connector, then all requests, then all stores."""
    overviews: list[tuple[Page, ConnectorPicture | None]] = [
        ("overview", one) for one in connectors_of(frame)
    ]
    return (*overviews, ("requests", None), ("stores", None))
