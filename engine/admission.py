"""Where a waiting request can start from: what is cached here, and what a connector can bring.

Looks, and changes nothing. Loop thread.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from interlace.engine.connector_calls import ConnectorCalls, Match
from interlace.engine.kv_cache_manager import KVCacheManager, PrefixHit
from interlace.engine.request import Request

MAX_FAILED_LOADS = 2
"""After so many the connector is not asked for this request any more: it might promise for ever."""


class NotNow(enum.Enum):
    """Why a request cannot be admitted in this `schedule()`."""

    NO_ROOM = enum.auto()
    """Its known tokens do not fit beside what others hold and are promised."""
    ASK_AGAIN = enum.auto()
    """The connector does not know yet."""


class Start(NamedTuple):
    """What an admitted request begins with."""

    hit: PrefixHit
    """Cached on the device: whole blocks, and maybe part of one more."""
    loaded: range
    """Positions behind the whole blocks that the connector is to bring; empty beside a part."""
    is_async: bool
    num_asked_tokens: int
    """That the connector was asked for; 0 if it was not."""
    compute_end: int | None = None
    """Up to where the request computes at once, while the connector loads what is behind."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are there or will be."""
        return max(self.hit.num_tokens, self.loaded.stop)


def find_start(
    request: Request,
    kv_cache: KVCacheManager,
    connector: ConnectorCalls | None,
    num_reserved_blocks: int,
) -> Start | NotNow:
    """Look up the request's prefix here, and then with the connector.

    The connector is asked only if the request would fit, `num_reserved_blocks` being left to
    others. Raises: `ConnectorError`.
    """
    hit = kv_cache.find_longest_hit(request, num_reserved_blocks)
    if not kv_cache.can_admit(request, hit, num_reserved_blocks):
        return NotNow.NO_ROOM
    if connector is None or request.num_failed_loads >= MAX_FAILED_LOADS:
        return Start(hit, range(0), is_async=False, num_asked_tokens=0)
    whole = hit.aligned(kv_cache.block_size)
    match = connector.match(request, whole.num_tokens)
    if match is None:
        return NotNow.ASK_AGAIN
    num_asked = request.num_tokens - whole.num_tokens
    start = _longer(hit, whole, match, num_asked)
    if not start.is_async:
        return start
    end = connector.compute_end(request, start.loaded.stop, kv_cache.block_size)
    # Nothing to compute: it waits for its load like any other.
    return start if end is None or end <= whole.num_tokens else start._replace(compute_end=end)


def _longer(hit: PrefixHit, whole: PrefixHit, match: Match, num_asked: int) -> Start:
    """What the connector brings behind the whole blocks, or the part that can be copied there."""
    loaded = range(whole.num_tokens, whole.num_tokens + match.num_tokens)
    if loaded.stop > hit.num_tokens:
        return Start(whole, loaded, match.is_async, num_asked)
    return Start(hit, range(0), is_async=False, num_asked_tokens=num_asked)
