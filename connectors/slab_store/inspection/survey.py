"""Opening a store, and looking at its slabs: headers and indexes, but no records.

What engines leave out is left out here too.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store import hits
from interlace.connectors.slab_store.directory import MARKER, Limits, SlabDirectory, SlabFile
from interlace.connectors.slab_store.files import open_to_read, read_at
from interlace.connectors.slab_store.inspection.reports import FileReport, LeftOut
from interlace.connectors.slab_store.layout import (
    HASH_BYTES,
    MAGIC,
    NO_PARENT,
    VERSION,
    DamagedSlabError,
    Entry,
    SlabHeader,
    SlabShape,
)
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Progress

T = TypeVar("T")
_WORDS = ("model", "dtype", "layout", "model_name")
_NUMBERS = ("block_size", "group", "rank", "world_size", "num_layers", "page_bytes")


BLOCK = np.dtype(
    [
        ("block_hash", f"V{HASH_BYTES}"),
        ("parent_hash", f"V{HASH_BYTES}"),
        ("saved_ns", "<u8"),
    ]
)
"""What is kept of an entry: a store may have millions."""


class Look(NamedTuple):
    """What a slab says of itself."""

    space: Space
    shape: SlabShape
    entries: list[Entry]
    is_written: bool
    """Whether a living process writes to it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlabContents:
    """A slab that was looked into."""

    file: SlabFile
    space: Space
    shape: SlabShape
    blocks: npt.NDArray[np.void]
    """Of `BLOCK`: one of each published record."""
    is_written: bool
    """Whether a living process writes to it."""
    first_tokens: Mapping[bytes, tuple[int, ...]]
    """Hash of a block without a parent -> what its prompts begin with, as far as that was told."""

    @classmethod
    def of(cls, file: SlabFile, look: Look) -> Self:
        """What is kept of a look."""
        rows = [(one.block_hash, one.parent_hash, one.saved_ns) for one in look.entries]
        return cls(
            file=file,
            space=look.space,
            shape=look.shape,
            blocks=np.array(rows, BLOCK),
            is_written=look.is_written,
            first_tokens={
                one.block_hash: one.first_tokens
                for one in look.entries
                if one.parent_hash == NO_PARENT and one.first_tokens
            },
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All files of a store, each in one of the lists."""

    folders: tuple[str, ...]
    """Of spaces, empty ones included."""
    hits: Mapping[str, Mapping[bytes, int]]
    """Folder -> hash of a first block -> how often it was loaded lately: see `hits`."""
    slabs: tuple[SlabContents, ...]
    left_out: tuple[tuple[SlabFile, LeftOut], ...]
    being_made: tuple[SlabFile, ...]
    leftovers: tuple[SlabFile, ...]

    @property
    def files(self) -> tuple[SlabFile, ...]:
        """Slabs and leftovers, but not what is being made."""
        left_out = (file for file, _ in self.left_out)
        return (*(slab.file for slab in self.slabs), *left_out, *self.leftovers)


def open_store(
    root: Path, limits: Limits | None = None, now_ns: Callable[[], int] = time.time_ns
) -> SlabDirectory:
    """The store in `root`, which is only looked at. `now_ns` is since the epoch.

    Raises: `ConfigError` if there is none, or one of another version; `OSError`.
    """
    try:
        names = os.listdir(root)  # noqa: PTH208 - names will do
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be listed ({error.strerror}): name the directory of a store of slabs."
        ) from error
    if MARKER not in names:
        raise ConfigError(
            f"{root} is no store of slabs (it has no {MARKER}): name the directory that engines"
            " were given."
        )
    directory = SlabDirectory(root, limits or Limits(), now_ns=now_ns)
    directory.prepare()  # checks the marker; it would make what is missing, and nothing is
    return directory


def survey(directory: SlabDirectory, progress: Progress) -> Survey:
    """Look at all files, but read no record. Raises: `OSError`."""
    slabs: list[SlabContents] = []
    left_out: list[tuple[SlabFile, LeftOut]] = []
    new: dict[bool, list[SlabFile]] = {False: [], True: []}  # is it a leftover?
    folders = sorted(folder.name for folder in directory.spaces())
    files = directory.slabs()
    with progress.task("looking at slabs", len(files)) as advance:
        for file in files:
            advance(1)
            if file.is_new:
                new[directory.is_leftover(file)].append(file)
                continue
            found = _contents(file)
            if isinstance(found, SlabContents):
                slabs.append(found)
            elif found is not None:
                left_out.append((file, found))
    return Survey(
        folders=tuple(folders),
        hits={name: hits.count(directory.root / name) for name in folders},
        slabs=tuple(slabs),
        left_out=tuple(left_out),
        being_made=tuple(new[False]),
        leftovers=tuple(new[True]),
    )


def read_part(path: Path, num_bytes: int, offset: int) -> bytes:
    """So many bytes, the rest zeros if the file ends. Raises: `OSError`."""
    data = bytearray(num_bytes)
    fd = open_to_read(path)
    try:
        read_at(fd, memoryview(data), offset)
    finally:
        os.close(fd)
    return bytes(data)


def _contents(file: SlabFile) -> SlabContents | LeftOut | None:
    """What is in a slab; None if it was removed meanwhile."""
    look = with_slab(file, lambda slab: checked(file, slab))
    return SlabContents.of(file, look) if isinstance(look, Look) else look


def with_slab(file: SlabFile, work: Callable[[Slab], T]) -> T | LeftOut | None:
    """What `work` makes of the slab; None if it was removed meanwhile."""
    try:
        with Slab.open(file.path) as slab:
            return work(slab)
    except FileNotFoundError:
        return None
    except DamagedSlabError as error:
        return _left_out(file, str(error), is_damaged=not _is_of_another_version(file.path))
    except OSError as error:
        return _left_out(file, unreadable(error), is_unread=True)


def unreadable(error: OSError) -> str:
    """The reason that is told."""
    return f"it cannot be read: {error.strerror or error}"


def _left_out(
    file: SlabFile, reason: str, *, is_damaged: bool = False, is_unread: bool = False
) -> LeftOut:
    name = FileReport.of(file).name
    return LeftOut(name=name, reason=reason, is_damaged=is_damaged, is_unread=is_unread)


def _is_of_another_version(path: Path) -> bool:
    """Whether it begins as a slab of a version that is not ours."""
    try:
        data = read_part(path, len(MAGIC) + 4, 0)
    except OSError:
        return False
    version = int.from_bytes(data[len(MAGIC) :], "little")
    return data.startswith(MAGIC) and version != VERSION


def checked(file: SlabFile, slab: Slab) -> Look | LeftOut:
    """Leave out what engines leave out. Raises: `OSError`."""
    space, shape = _space_of(slab.header), slab.header.shape
    if space is None:
        return _left_out(file, "its header does not say what KV it holds")
    if space.folder_name != file.path.parent.name:
        return _left_out(file, "its header says that it holds other KV than its folder")
    if shape.record_bytes != space.record_bytes:
        return _left_out(file, f"its records have {shape.record_bytes} bytes")
    entries = slab.look(with_tokens=True)
    return Look(space, shape, entries, is_written=not slab.is_sealed)


def _space_of(header: SlabHeader) -> Space | None:
    """None if the header does not tell all that it should, or more."""
    facts = header.space
    words = {name: facts.get(name) for name in _WORDS}
    numbers = {name: facts.get(name) for name in _NUMBERS}
    if not all(isinstance(word, str) for word in words.values()):
        return None
    if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
        return None
    values: dict[str, Any] = {**words, **numbers}
    identity = {field.name: values.pop(field.name) for field in dataclasses.fields(KVIdentity)}
    space = Space(identity=KVIdentity(**identity), **values)
    return space if space.facts == facts else None


def by_folder(slabs: Iterable[SlabContents]) -> dict[str, list[SlabContents]]:
    """Folder -> its slabs, as they come."""
    folders: dict[str, list[SlabContents]] = {}
    for slab in slabs:
        folders.setdefault(slab.file.path.parent.name, []).append(slab)
    return folders


def model_names(slabs: Iterable[SlabContents]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(sorted({slab.space.model_name for slab in slabs}))
