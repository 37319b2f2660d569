"""`verify`: all records, read and checked. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from interlace.connectors.slab_store.directory import SlabDirectory, SlabFile
from interlace.connectors.slab_store.inspection.reports import (
    FileReport,
    Flaw,
    FlawedSlab,
    LeftOut,
    Verification,
)
from interlace.connectors.slab_store.inspection.survey import (
    SlabContents,
    checked,
    read_part,
    unreadable,
    with_slab,
)
from interlace.connectors.slab_store.layout import ENTRY_BYTES, DamagedSlabError
from interlace.connectors.slab_store.slab import Slab
from interlace.engine.ports import Progress


class _Verdict(NamedTuple):
    """On a slab that could be opened."""

    num_records: int
    num_bytes: int
    flaws: list[Flaw]


def verify(directory: SlabDirectory, progress: Progress) -> Verification:
    """Read all records and check them. What others remove meanwhile is passed over.

    Raises: `OSError` if the directory cannot be listed.
    """
    files = [file for file in directory.slabs() if not file.is_new]
    num_slabs = num_records = num_bytes = 0
    flawed: list[FlawedSlab] = []
    with progress.task("verify", sum(file.disk_bytes for file in files)) as advance:
        for file in files:
            found = _verdict(file, advance)
            if isinstance(found, LeftOut):
                flawed.append(_flawed_file(file, found))
            elif found is not None:
                num_slabs += 1
                num_records += found.num_records
                num_bytes += found.num_bytes
                flawed += [_flawed_slab(file, found)] if found.flaws else []
    return Verification(
        num_slabs=num_slabs, num_records=num_records, num_bytes=num_bytes, flawed=tuple(flawed)
    )


def _verdict(file: SlabFile, advance: Callable[[float], None]) -> _Verdict | LeftOut | None:
    """None if it was removed meanwhile. `advance` gets the file's bytes."""
    num_read = 0

    def note(num_bytes: float) -> None:
        nonlocal num_read
        # Records may have come since it was listed, or take less room on the disk.
        step = min(int(num_bytes), file.disk_bytes - num_read)
        num_read += step
        advance(step)

    found = with_slab(file, lambda slab: _read_all(file, slab, note))
    note(file.disk_bytes)
    return found


def _read_all(file: SlabFile, slab: Slab, advance: Callable[[float], None]) -> _Verdict | LeftOut:
    """Raises: `OSError` if the index cannot be read."""
    found = checked(file, slab)
    if isinstance(found, LeftOut):
        return found
    damaged = [] if found.is_written else _damaged_places(found)
    flaws = [
        Flaw(record=place, reason="its entry is damaged, and nobody finds it") for place in damaged
    ]
    buffer = np.empty(found.shape.record_bytes, np.uint8)
    for entry in found.entries:
        try:
            slab.read(entry, buffer)
        except DamagedSlabError as error:
            flaws.append(Flaw(record=entry.record, reason=str(error)))
        except OSError as error:
            flaws.append(Flaw(record=entry.record, reason=unreadable(error)))
        advance(found.shape.pitch)
    flaws.sort(key=lambda flaw: flaw.record or 0)
    num_records = len(found.entries) + len(damaged)
    return _Verdict(num_records, len(found.entries) * found.shape.record_bytes, flaws)


def _damaged_places(found: SlabContents) -> list[int]:
    """Places of a sealed slab's index that are neither an entry nor empty. Raises: `OSError`."""
    shape = found.shape
    data = read_part(found.file.path, shape.num_records * ENTRY_BYTES, shape.entry_at(0))
    whole = {entry.record for entry in found.entries}
    return [
        place
        for place in range(shape.num_records)
        if place not in whole and any(data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
    ]


def _flawed_file(file: SlabFile, found: LeftOut) -> FlawedSlab:
    return FlawedSlab(
        file=FileReport.of(file),
        flaws=(Flaw(record=None, reason=found.reason),),
        num_good=0,
        is_damaged=found.is_damaged,
    )


def _flawed_slab(file: SlabFile, found: _Verdict) -> FlawedSlab:
    return FlawedSlab(
        file=FileReport.of(file),
        flaws=tuple(found.flaws),
        num_good=found.num_records - len(found.flaws),
        is_damaged=True,
    )
