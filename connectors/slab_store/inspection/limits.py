"""`gc`: what goes to keep limits, and what would."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.connectors.slab_store.directory import NoRoomError, SlabDirectory, SlabFile
from interlace.connectors.slab_store.inspection.reports import Collected, FileReport


def collect(directory: SlabDirectory) -> Collected:
    """Let go what exceeds the directory's limits, and leftovers. Raises: `OSError`."""
    before = directory.slabs()
    try:
        return _collected(directory.collect(), None)
    except NoRoomError as error:
        remaining = {file.path for file in directory.slabs()}
        gone = [file for file in before if file.path not in remaining]
        return _collected(gone, str(error))


def plan_collection(directory: SlabDirectory) -> Collected:
    """What `collect` would let go, if nothing else happened meanwhile. Raises: `OSError`."""
    plan = directory.plan()
    return _collected(plan.files, plan.shortfall if plan.missing_bytes else None)


def _collected(files: Sequence[SlabFile], shortfall: str | None) -> Collected:
    reason = None if shortfall is None else shortfall.rstrip(".")
    return Collected(removed=tuple(map(FileReport.of, files)), shortfall=reason)
