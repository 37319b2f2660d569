"""What is told about a store: frozen, in plain values, and without a look at any file."""

from __future__ import annotations

import dataclasses

from interlace.connectors.slab_store.directory import SlabFile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """A file of the store."""

    name: str
    """Folder and name, below the directory."""
    num_bytes: int
    """On the disk: a slab's room is taken as records come."""
    used_ns: int
    """When it was last written to, or read: since the epoch."""
    is_new: bool
    """Whether it is being made, or was."""

    @classmethod
    def of(cls, file: SlabFile) -> FileReport:
        """Of a file below a space's folder."""
        name = f"{file.path.parent.name}/{file.path.name}"
        return cls(name=name, num_bytes=file.disk_bytes, used_ns=file.used_ns, is_new=file.is_new)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file whose records no engine finds."""

    name: str
    reason: str
    is_damaged: bool
    """Whether it is not what was written. Else it is in order, as far as can be told, but of
    another version, in a wrong folder, or not readable."""
    is_unread: bool
    """Whether it could not be read: what is there is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """All stored chains that begin with the same block."""

    first_hash: str
    """Hex."""
    model_names: tuple[str, ...]
    """One, unless engines call the same model by several names."""
    model: str
    """Hex digest."""
    dtype: str
    block_size: int
    group: int
    rank: int
    world_size: int
    num_tokens: int
    """Of the longest chain."""
    num_leaves: int
    """Chains: blocks that no stored block follows."""
    num_blocks: int
    num_bytes: int
    """Of the blocks, each counted once."""
    saved_ns: int
    """When the oldest block was saved: since the epoch."""
    used_ns: int
    """When a slab that holds some of it was last written to, or read."""
    num_hits: int
    """Loads of it, or of a part, that are remembered: see `hits`."""
    first_tokens: tuple[int, ...]
    """What its prompts begin with, as far as that was told."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What can be found from first blocks on."""

    prefixes: tuple[Prefix, ...]
    """The most recently used first."""
    num_prefixes: int
    """Those included that are not listed."""
    num_lost_blocks: int
    """Blocks behind ones that are not stored any more: found once those are computed again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of a space, or of all."""

    folder: str
    """Empty for all spaces together."""
    model_names: tuple[str, ...]
    model: str
    """Hex digest; empty for all spaces together, and for one without slabs."""
    num_slabs: int
    num_records: int
    file_bytes: int
    """Of all files, on the disk: slabs, those being made, leftovers, and what is left out."""
    reserved_bytes: int
    """More, which count too: room that slabs with a living writer may still take."""
    record_bytes: int
    """Of published records."""
    num_hits: int
    """Loads of prompts, or of parts of them, that are remembered: see `hits`."""
    num_free_records: int
    """In slabs that a process writes to."""
    oldest_ns: int | None
    """When the oldest record was saved: since the epoch. None if there is none."""
    newest_ns: int | None
    num_written: int
    """Slabs that a living process writes to."""
    num_being_made: int
    num_leftovers: int
    """Slabs that were being made by a process that is gone."""
    leftover_bytes: int
    left_out: tuple[LeftOut, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What `stat` tells."""

    spaces: tuple[Statistics, ...]
    total: Statistics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Something that is not as it was written, or could not be read."""

    record: int | None
    """None for the whole file."""
    reason: str
    is_unread: bool
    """Whether it could not be read: what is there is not known, and another time may tell."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlawedSlab:
    """A slab with flaws."""

    file: FileReport
    flaws: tuple[Flaw, ...]
    num_good: int
    """Records that are as they were written."""
    is_damaged: bool
    """Whether it is one to drop: something in it is wrong, however often it is read. See
    `LeftOut`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` found."""

    num_slabs: int
    num_records: int
    """That were read, bad ones included."""
    num_bytes: int
    """That were read."""
    flawed: tuple[FlawedSlab, ...]

    @property
    def num_bad_records(self) -> int:
        """In all slabs."""
        return self._count(of_files=False, unread=False)

    @property
    def num_bad_files(self) -> int:
        """Files that are bad as wholes."""
        return self._count(of_files=True, unread=False)

    @property
    def num_unread_records(self) -> int:
        """That could not be read."""
        return self._count(of_files=False, unread=True)

    @property
    def num_unread_files(self) -> int:
        """That could not be read, not even what they hold."""
        return self._count(of_files=True, unread=True)

    def _count(self, *, of_files: bool, unread: bool) -> int:
        flaws = [flaw for one in self.flawed for flaw in one.flaws]
        return sum((one.record is None, one.is_unread) == (of_files, unread) for one in flaws)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A file that could not be removed."""

    file: FileReport
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of files that were to go."""

    removed: tuple[FileReport, ...]
    """What others had removed by then included."""
    written: tuple[FileReport, ...]
    """They stay: a living process writes to them."""
    failed: tuple[Failure, ...]

    @property
    def num_bytes(self) -> int:
        """That were removed."""
        return sum(file.num_bytes for file in self.removed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What went to keep limits, or would go."""

    removed: tuple[FileReport, ...]
    shortfall: str | None
    """Why the limits are not kept, if they are not."""

    @property
    def num_bytes(self) -> int:
        """That were removed."""
        return sum(file.num_bytes for file in self.removed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Slabs to remove."""

    files: tuple[SlabFile, ...]
    num_records: int
    """In all of them."""
    num_other_records: int
    """Of these, records that were not asked for, but lie in the same slabs."""

    @property
    def num_bytes(self) -> int:
        """Of the files, on the disk."""
        return sum(file.disk_bytes for file in self.files)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model that slabs are of."""

    name: str
    """As engines called it."""
    digest: str
    """Hex."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What there is to choose from, for who chose nothing that is stored."""

    models: tuple[StoredModel, ...]
    """A few, those first whose names are most like what was asked for."""
    num_models: int
    """Those included that are not listed."""
    first_hashes: tuple[str, ...]
    """Hex, of a few prefixes, each once, the most recently used first."""
    num_first_hashes: int
    """Those included that are not listed."""
    used_ns: int | None
    """When the least recently used file was last written to, or read: since the epoch. None if
    there is no file."""
