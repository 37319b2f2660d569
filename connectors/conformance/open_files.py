"""How many files and sockets the process has open, so that a leak of them is seen."""

from __future__ import annotations

import gc
from pathlib import Path

MAX_LEFT_OPEN = 40
"""That one engine's connector may keep open when all requests have ended: its store, its peers, a
small cache of handles. One for each block is many more, even in a check."""
_LISTS = (Path("/proc/self/fd"), Path("/dev/fd"))


class FilesSince:
    """Files that were opened after this object was made, and are open still."""

    def __init__(self) -> None:
        self._before = _num_open()

    def num_open(self) -> int:
        """How many; 0 where the system does not tell. Handles that nobody has do not count."""
        if _num_open() - self._before > MAX_LEFT_OPEN:
            gc.collect()
        return max(0, _num_open() - self._before)


def _num_open() -> int:
    for folder in _LISTS:
        try:
            return sum(not _is_a_drivers(handle) for handle in folder.iterdir())
        except OSError:
            continue
    return 0


def _is_a_drivers(handle: Path) -> bool:
    """Whether CUDA has opened it: it does so whenever it needs one more, and for good."""
    try:
        return str(handle.readlink()).startswith("/dev/nvidia")
    except OSError:  # it is no link here, or it has gone
        return False
