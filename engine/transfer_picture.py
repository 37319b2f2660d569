"""What a KV connector shows of its transfers and stores: frozen pictures, for people.

A connector gives them out by `get_transfer_pictures`, an extension of the protocol; the engine
knows no more of a connector than this.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from interlace.engine.connector_errors import call_hook
from interlace.engine.errors import ConfigError, ConnectorError

logger = logging.getLogger(__name__)

LayerState = Literal["waiting", "reading", "copying", "arrived", "computed", "saved", "failed"]
"""Of one layer of a transfer.

`waiting`: nothing of it is under way. `reading`: it comes out of files. `copying`: between host and
device. `arrived`, `saved`: all of a load, or of a save, is where it belongs. `computed`: the step
that loaded it has computed it, too. `failed`: it will not come.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPicture:
    """One load, or one save."""

    kind: Literal["load", "save"]
    way: str
    """For people: "layer by layer", "in bulk"."""
    layers: tuple[LayerState, ...]
    num_requests: int
    num_blocks: int
    num_bytes: int
    """Of all of it; 0 if that is not known."""
    num_bytes_done: int
    seconds: float | None = None
    """From its first copy to its last one; None while it goes on."""
    hidden_share: float | None = None
    """Of the time that loading took, what nobody waited for; None if that is not known."""
    error: str | None = None
    """Why it, or a part of it, has failed."""

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes per second; None while it goes on."""
        return self.num_bytes_done / self.seconds / 1e9 if self.seconds else None


@dataclasses.dataclass(frozen=True, slots=True)
class LanePicture:
    """What goes one after the other."""

    name: str
    num_bytes: int
    """Copied since the engine was opened."""
    is_busy: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TierPicture:
    """A place where blocks are kept. Counts are since the engine was opened."""

    name: str
    """ "memory", "files"."""
    num_blocks: int
    """That can be hit."""
    num_room: int | None
    """Blocks that fit in all; None if nobody knows."""
    block_bytes: int
    num_hits: int
    """Blocks that were loaded from here."""
    num_stored: int
    """Blocks that came here."""
    num_evicted: int
    """That went to make room: blocks, or what `evicted_unit` says."""
    evicted_unit: str = "blocks"
    drops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> blocks that were not kept, or could not be had, for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorPicture:
    """One connector, or one side of it: the engine joins those of one name."""

    name: str
    load: TransferPicture | None = None
    """The one under way, or the newest one."""
    save: TransferPicture | None = None
    lanes: tuple[LanePicture, ...] = ()
    link_bytes_per_s: float | None = None
    """How fast the link is that lanes share, measured; None if it was not."""
    tiers: tuple[TierPicture, ...] = ()
    error: str | None = None
    """Why there is nothing to show."""

    def joined(self, other: ConnectorPicture) -> ConnectorPicture:
        """What the two sides of one connector show, together."""
        return ConnectorPicture(
            self.name,
            self.load or other.load,
            self.save or other.save,
            self.lanes + other.lanes,
            self.link_bytes_per_s or other.link_bytes_per_s,
            self.tiers + other.tiers,
            self.error or other.error,
        )


class ShowsTransfers(Protocol):
    """A side of a connector."""

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """See `KVConnectorBase_V1`."""
        ...


def pictures_of(side: ShowsTransfers) -> tuple[ConnectorPicture, ...]:
    """What one side of a connector shows. Any thread.

    Never raises: looking does no harm. If the hook raises, or answers something else, that is what
    is shown.
    """
    hook = "get_transfer_pictures"
    try:
        answer = call_hook(side, hook)
    except (ConnectorError, ConfigError) as error:
        return (_unshown(side, str(error)),)
    if isinstance(answer, tuple) and all(isinstance(one, ConnectorPicture) for one in answer):
        return answer
    return (_unshown(side, f"{hook} answered {answer!r}: give a tuple of ConnectorPictures"),)


def _unshown(side: ShowsTransfers, why: str) -> ConnectorPicture:
    logger.debug("%s shows nothing: %s", type(side).__name__, why)
    return ConnectorPicture(type(side).__name__, error=why)


def joined_by_name(pictures: Iterable[ConnectorPicture]) -> tuple[ConnectorPicture, ...]:
    """Those of one name as one, in the order in which the names came."""
    found: dict[str, ConnectorPicture] = {}
    for one in pictures:
        before = found.get(one.name)
        found[one.name] = one if before is None else before.joined(one)
    return tuple(found.values())
