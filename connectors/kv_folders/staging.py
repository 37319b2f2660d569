"""Host memory for copies on their way to files, used again: touching fresh memory costs more than
copying into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from interlace.connectors.kv_folders.tensor_file import ByteArray

_KEPT = 2
_SMALL = 8
"""A request for less than this part of a slot gets fresh memory of its own size."""


def _pageable(num_bytes: int) -> ByteArray:
    return np.empty(num_bytes, dtype=np.uint8)


class StagingPool:
    """Slots of one size. Taken on the device thread, given back on the lane that writes."""

    def __init__(self, slot_bytes: int, allocate: Callable[[int], ByteArray] = _pageable) -> None:
        """`allocate` makes fresh memory of so many bytes, one-dimensional.

        Touches the first slot, so that the first save is as quick as the others.
        """
        self._slot_bytes = slot_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free = [allocate(slot_bytes)]
        self._free[0].fill(1)

    def take(self, num_bytes: int) -> ByteArray:
        """At least so many bytes, one-dimensional, with any content."""
        if num_bytes * _SMALL < self._slot_bytes or num_bytes > self._slot_bytes:
            return self._allocate(num_bytes)
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._allocate(self._slot_bytes)

    def give_back(self, memory: ByteArray) -> None:
        """What `take` returned is no longer read. Two free slots are kept."""
        with self._lock:
            if len(memory) == self._slot_bytes and len(self._free) < _KEPT:
                self._free.append(memory)
