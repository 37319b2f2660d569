"""`verify`: all records, read and checked. Changes nothing.

What is wrong is read again before it counts as damage, and what cannot be read is none: a cable, a
limit of open files, or somebody else's right to read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.directory import SlabDirectory, SlabFile
from interlace.connectors.slab_store.inspection.reports import (
    FileReport,
    Flaw,
    FlawedSlab,
    LeftOut,
    Verification,
)
from interlace.connectors.slab_store.inspection.survey import (
    Look,
    checked,
    read_part,
    unreadable,
    with_slab,
)
from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    DamagedRecordError,
    Entry,
    parse_entries,
)
from interlace.connectors.slab_store.slab import Slab
from interlace.engine.ports import Progress

_READS, _DAMAGED_READS = 3, 2
"""A record is read so often, at most, and is damaged after so many that say so."""


class _Verdict(NamedTuple):
    """On a slab that could be opened."""

    num_records: int
    """That were read."""
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
    if isinstance(found, LeftOut) and (found.is_damaged or found.is_unread):
        again = with_slab(file, lambda slab: _read_all(file, slab, note))
        # Damage counts if it is there twice.
        found = found if isinstance(again, LeftOut) and again.is_damaged else again
    note(file.disk_bytes)
    return found


def _read_all(file: SlabFile, slab: Slab, advance: Callable[[float], None]) -> _Verdict | LeftOut:
    """Raises: `OSError` if the index cannot be read."""
    found = checked(file, slab)
    if isinstance(found, LeftOut):
        return found
    entries, damaged = (found.entries, []) if found.is_written else _second_look(file, found)
    reason = "its entry is damaged, and nobody finds it"
    flaws = [Flaw(record=place, reason=reason, is_unread=False) for place in damaged]
    buffer = np.empty(found.shape.record_bytes, np.uint8)
    num_read = 0
    for entry in entries:
        flaw = _flaw(slab, entry, buffer)
        if flaw is not None:
            flaws.append(flaw)
        num_read += flaw is None or not flaw.is_unread
        advance(found.shape.pitch)
    flaws.sort(key=lambda flaw: flaw.record or 0)
    num_records = num_read + len(damaged)
    return _Verdict(num_records, num_read * found.shape.record_bytes, flaws)


def _flaw(slab: Slab, entry: Entry, buffer: npt.NDArray[np.uint8]) -> Flaw | None:
    """What is wrong with a record: damage, if two reads have found it."""
    reason = ""
    num_damaged = 0
    for _ in range(_READS):
        try:
            slab.read(entry, buffer)
        except DamagedRecordError as error:
            num_damaged += 1
            if num_damaged == _DAMAGED_READS:
                return Flaw(record=entry.record, reason=error.reason, is_unread=False)
            _forget_cached(slab, entry)
        except OSError as error:
            reason = unreadable(error)
        else:
            return None
    return Flaw(record=entry.record, reason=reason, is_unread=True)


def _forget_cached(slab: Slab, entry: Entry) -> None:
    """Ask the system to read it from the disk the next time: memory may have been wrong."""
    with contextlib.suppress(OSError), slab.path.open("rb", buffering=0) as file:
        at, length = slab.header.shape.record_at(entry.record), slab.header.shape.pitch
        os.posix_fadvise(file.fileno(), at, length, os.POSIX_FADV_DONTNEED)


def _second_look(file: SlabFile, found: Look) -> tuple[list[Entry], list[int]]:
    """(entries, damaged places) of a sealed slab's index: the former were whole at one of two
    looks, the latter were neither whole nor empty at any. Raises: `OSError`."""
    shape = found.shape
    data = read_part(file.path, shape.num_records * ENTRY_BYTES, shape.entry_at(0))
    seen = parse_entries(data, 0, is_sealed=True).entries
    whole = {entry.record: entry for entry in (*seen, *found.entries)}
    damaged = [
        place
        for place in range(shape.num_records)
        if place not in whole and any(data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
    ]
    return list(whole.values()), damaged


def _flawed_file(file: SlabFile, found: LeftOut) -> FlawedSlab:
    return FlawedSlab(
        file=FileReport.of(file),
        flaws=(Flaw(record=None, reason=found.reason, is_unread=found.is_unread),),
        num_good=0,
        is_damaged=found.is_damaged,
    )


def _flawed_slab(file: SlabFile, found: _Verdict) -> FlawedSlab:
    num_damaged = sum(not flaw.is_unread for flaw in found.flaws)
    return FlawedSlab(
        file=FileReport.of(file),
        flaws=tuple(found.flaws),
        num_good=found.num_records - num_damaged,
        is_damaged=num_damaged > 0,
    )
