"""`gc`: what goes to keep limits, and what would."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from interlace.connectors.slab_store.directory import (
    Limits,
    NoRoomError,
    SlabDirectory,
    SlabFile,
    has_writer,
)
from interlace.connectors.slab_store.inspection.reports import Collected, FileReport
from interlace.connectors.slab_store.inspection.survey import is_leftover


def collect(directory: SlabDirectory) -> Collected:
    """Let go what exceeds the directory's limits, and leftovers. Raises: `OSError`."""
    before = directory.slabs()
    try:
        return _collected(directory.collect(), None)
    except NoRoomError as error:
        remaining = {file.path for file in directory.slabs()}
        gone = [file for file in before if file.path not in remaining]
        return _collected(gone, str(error).rstrip("."))


def plan_collection(directory: SlabDirectory, limits: Limits, now_ns: int) -> Collected:
    """What `collect` would let go, if nothing else happened meanwhile. Raises: `OSError`."""
    files = directory.slabs()
    excess = _excess(directory.root, files, limits)
    going = [file for file in files if file.is_new and is_leftover(file, now_ns)]
    excess -= sum(file.num_bytes for file in going)
    for file in files:
        if excess > 0 and not file.is_new and _can_go(file.path):
            going.append(file)
            excess -= file.num_bytes
    shortfall = (
        f"{excess} bytes are missing, and not so much can be removed: end engines that write to"
        " the store, or give other limits"
    )
    return _collected(going, shortfall if excess > 0 else None)


def _collected(files: Sequence[SlabFile], shortfall: str | None) -> Collected:
    return Collected(removed=tuple(map(FileReport.of, files)), shortfall=shortfall)


def _excess(root: Path, files: Collection[SlabFile], limits: Limits) -> int:
    """Bytes that must go, as `SlabDirectory` reckons."""
    status = os.statvfs(root)
    excess = limits.min_free_bytes - status.f_bavail * status.f_frsize
    if limits.capacity_bytes is not None:
        excess = max(excess, sum(file.num_bytes for file in files) - limits.capacity_bytes)
    return excess


def _can_go(path: Path) -> bool:
    """Unless somebody writes to it, or it cannot be opened."""
    try:
        return not has_writer(path)
    except FileNotFoundError:  # gone already, and counts so
        return True
    except OSError:
        return False
