"""Looks at a store once a second, so that what others add or remove is known though nobody asks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from interlace.connectors.slab_store.catalog import Catalog

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Between two looks, be they ours or somebody's who asks."""


class Watch:
    """A thread, until `close`. What it cannot look at it says once."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        every_s: float = WATCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts it. Raises: `RuntimeError` if there can be no thread."""
        self._catalog = catalog
        self._every_s = every_s
        self._clock = clock
        self._end = threading.Event()
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="interlace-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            if self._clock() - self._catalog.looked_s < self._every_s:
                continue  # somebody has asked
            try:
                self._catalog.look()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may do
                if not self._has_complained:
                    self._has_complained = True
                    logger.warning("the store cannot be watched: %s", error)

    def close(self, timeout_s: float) -> bool:
        """Look no more; False if a look takes longer than that. May be repeated."""
        self._end.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
