"""What is stored, for the event loop: answers from memory, looks at the disk on a lane.

A look is begun by questions, when the last one is older than `refresh_s`, and nobody waits for
it. While nobody asks a thread of its own looks once a second (`watch.py`), so what others have
stored by then is found by the first question too.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from interlace.connectors.slab_store.catalog import Catalog, Place
from interlace.connectors.slab_store.watch import Watch
from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lane

logger = logging.getLogger(__name__)

AVOIDED_S = 30.0
MOST_SEEN = 1 << 20
"""Blocks whose uses are counted; the oldest are forgotten."""


class StoredBlocks:
    """One thread, the event loop. Never waits, but for `close`."""

    def __init__(
        self,
        catalog: Catalog,
        lane: Lane,
        *,
        refresh_s: float = 0.5,
        delay_s: float = 0.0,
        threshold: int = 1,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Begins the first look. Others come `delay_s` behind the question that begins them: who
        asks is about to launch a step, and a look needs the interpreter too. `threshold`: a block
        is worth storing at its so manieth use. `watch`: who looks while nobody asks, until
        `close`. `now_ns` is since the epoch."""
        self._watch = watch
        self._now_ns = now_ns
        self._catalog = catalog
        self._lane = lane
        self._refresh_s = refresh_s
        self._delay_s = delay_s
        self._end = threading.Event()
        self._threshold = threshold
        self._clock = clock
        self._looked_s = float("-inf")
        self._look: Gate | None = None
        self._being_stored: set[bytes] = set()
        self._unseen: set[bytes] = set()
        """Stored since the last look was begun."""
        self._seen_soon: set[bytes] = set()
        """Stored before it was, and found when it has ended."""
        self._avoided: dict[bytes, float] = {}
        """Until when a block is not to be found."""
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        """Of blocks that have not been stored since."""
        self.refresh()

    @property
    def is_looking(self) -> bool:
        """Whether a look is under way."""
        return self._look is not None and not self._look.query()

    def refresh(self) -> None:
        """Begin a look, if it is time for one."""
        now_s = self._clock()
        if now_s - self._looked_s < self._refresh_s or self.is_looking:
            return
        if self._look is not None and self._look.error is not None:
            logger.warning("the store cannot be looked at: %s", self._look.error)
        delay_s = self._delay_s if self._look is not None else 0.0
        self._looked_s = now_s
        self._seen_soon, self._unseen = self._unseen, set()
        try:
            self._look = self._lane.submit(functools.partial(self._look_later, delay_s))
        except (LaneFullError, LaneClosedError) as error:
            logger.warning("the store is not looked at: %s", error)

    def _look_later(self, delay_s: float) -> None:
        """On the lane."""
        if not self._end.wait(delay_s):
            self._catalog.look()

    # ---------------------------------------------------------------- loads

    def __len__(self) -> int:
        """Blocks that are stored, as far as is known."""
        return len(self._catalog)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is stored, as far as is known, and worth a try."""
        return block_hash in self._catalog and not self._is_avoided(block_hash)

    def _is_avoided(self, block_hash: bytes) -> bool:
        until_s = self._avoided.get(block_hash)
        if until_s is not None and self._clock() >= until_s:
            del self._avoided[block_hash]
            return False
        return until_s is not None

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first on, are stored."""
        self.refresh()
        return sum(1 for _ in itertools.takewhile(self.__contains__, block_hashes))

    def find(self, block_hash: bytes) -> Place | None:
        """Where the block lies, as far as is known, if it is worth a try."""
        if self._avoided and self._is_avoided(block_hash):
            return None
        return self._catalog.find(block_hash)

    @property
    def finder(self) -> Callable[[bytes], Place | None]:
        """What answers as `find` does now, for who has hundreds of questions."""
        return self.find if self._avoided else self._catalog.finder

    def use_places(self, places: Iterable[Place]) -> None:
        """What lies there is loaded: it counts as used, here and for all who share the store."""
        self._catalog.use_slabs({place.slab for place in places})

    def note_load(self, first_hash: bytes) -> None:
        """A prompt that begins with this block was loaded from files."""
        self._catalog.note_load(first_hash)

    def places(self, block_hashes: Sequence[bytes]) -> list[Place] | None:
        """Where these lie, for a load of them; None if one has gone meanwhile. They count as used,
        here and for all who share the store."""
        found = [place for place in map(self._catalog.finder, block_hashes) if place is not None]
        if len(found) < len(block_hashes):
            return None
        self.use_places(found)
        return found

    def avoid(self, block_hash: bytes) -> None:
        """The block could not be read, or not in time: do without it for a while."""
        self._avoided[block_hash] = self._clock() + AVOIDED_S

    def lose(self, block_hash: bytes, place: Place) -> None:
        """What lies there is damaged, or gone: it is not found there again."""
        self._catalog.forget(block_hash, place)

    def forget_all(self) -> None:
        """Nothing that is stored, or being stored, by now is found before it is stored again. Files
        stay: others may use them."""
        self._catalog.forget_before(self._now_ns())
        self._unseen.clear()
        self._seen_soon.clear()

    def wait_for_look(self, timeout_s: float) -> bool:
        """For who may wait: until the look under way has ended; False if that takes longer."""
        return self._look is None or self._look.wait(timeout_s)

    # ---------------------------------------------------------------- stores

    def wants(self, block_hash: bytes) -> bool:
        """Whether the block is to be stored now that it is used once more."""
        self.refresh()
        if block_hash in self._being_stored or self.is_unseen(block_hash) or block_hash in self:
            return False
        if self._threshold <= 1:
            return True
        uses = self._uses[block_hash] = self._uses.pop(block_hash, 0) + 1
        if len(self._uses) > MOST_SEEN:
            self._uses.popitem(last=False)
        return uses >= self._threshold

    def is_unseen(self, block_hash: bytes) -> bool:
        """Whether it was stored, and no look can have found it yet."""
        if block_hash in self._unseen:
            return True
        return block_hash in self._seen_soon and self.is_looking

    def begin_store(self, block_hashes: Sequence[bytes]) -> int:
        """These are being stored: nobody else is to do it. When that is, since the epoch: their
        entries are to say so."""
        self._being_stored.update(block_hashes)
        return self._now_ns()

    def end_store(self, block_hashes: Sequence[bytes], dropped: Container[bytes] = ()) -> None:
        """That has ended. A look that is begun from now on finds what is stored. `dropped` were
        not, so their next use is enough."""
        self._being_stored.difference_update(block_hashes)
        for block_hash in block_hashes:
            if block_hash not in dropped:
                self._unseen.add(block_hash)
                self._uses.pop(block_hash, None)
        self._looked_s = float("-inf")

    def close(self, timeout_s: float) -> bool:
        """Look no more, and let go of the files; False if a look takes longer than `timeout_s`."""
        self._end.set()
        has_ended = self._lane.close(timeout_s)
        has_ended &= self._watch is None or self._watch.close(timeout_s)
        if has_ended:
            self._catalog.close()
        return has_ended

    def __repr__(self) -> str:
        return f"<StoredBlocks {len(self._catalog)} being stored={len(self._being_stored)}>"
