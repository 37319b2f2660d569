"""`stat`: slabs, records and bytes, of each space and of all. Pure."""

from __future__ import annotations

from interlace.connectors.slab_store.directory import SlabFile
from interlace.connectors.slab_store.inspection.reports import Statistics, Store
from interlace.connectors.slab_store.inspection.survey import Survey, model_names


def statistics(found: Survey) -> Store:
    """Of each space, and of all. Pure."""
    spaces = [_statistics(folder, _within(found, folder)) for folder in found.folders]
    return Store(spaces=tuple(spaces), total=_statistics("", found))


def _within(found: Survey, folder: str) -> Survey:
    """What lies in one space's folder."""

    def is_in(file: SlabFile) -> bool:
        return file.path.parent.name == folder

    return Survey(
        folders=(folder,),
        hits={folder: found.hits.get(folder, {})},
        slabs=tuple(slab for slab in found.slabs if is_in(slab.file)),
        left_out=tuple(one for one in found.left_out if is_in(one[0])),
        being_made=tuple(filter(is_in, found.being_made)),
        leftovers=tuple(filter(is_in, found.leftovers)),
    )


def _statistics(folder: str, found: Survey) -> Statistics:
    saved = [slab.blocks["saved_ns"] for slab in found.slabs if len(slab.blocks)]
    written = [slab for slab in found.slabs if slab.is_written]
    files = (*found.files, *found.being_made)
    return Statistics(
        folder=folder,
        model_names=model_names(found.slabs),
        model=found.slabs[0].space.identity.model if folder and found.slabs else "",
        num_slabs=len(found.slabs),
        num_records=sum(len(slab.blocks) for slab in found.slabs),
        file_bytes=sum(file.disk_bytes for file in files),
        reserved_bytes=sum(file.reserved_bytes for file in files),
        record_bytes=sum(len(slab.blocks) * slab.shape.record_bytes for slab in found.slabs),
        num_hits=sum(sum(counts.values()) for counts in found.hits.values()),
        num_free_records=sum(slab.shape.num_records - len(slab.blocks) for slab in written),
        oldest_ns=min((int(times.min()) for times in saved), default=None),
        newest_ns=max((int(times.max()) for times in saved), default=None),
        num_written=len(written),
        num_being_made=len(found.being_made),
        num_leftovers=len(found.leftovers),
        leftover_bytes=sum(file.disk_bytes for file in found.leftovers),
        left_out=tuple(one for _, one in found.left_out),
    )
