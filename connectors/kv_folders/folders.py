"""Folders of one identity below one directory: written aside, renamed into place, removed.

All functions do file I/O: never call them on the event loop. Safe from several threads and
processes: what is visible is whole, and nobody changes it but by renaming it away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from interlace.connectors.kv_folders import manifest as manifests
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.manifest import Manifest
from interlace.connectors.kv_folders.tensor_file import (
    ByteArray,
    DamagedFileError,
    TensorFile,
    open_new,
    read_tensor,
    write_tensor,
)

_LEFTOVER_AGE_S = 600.0
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


class Signature(NamedTuple):
    """Tells a folder from a later one of the same name."""

    inode: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks in host memory, on their way to a folder."""

    parent_hash: bytes
    block_hashes: tuple[bytes, ...]
    block_shape: tuple[int, ...]
    layer_names: tuple[str, ...]
    rows: ByteArray
    """[layers, blocks, bytes of a block], contiguous."""
    release: Callable[[], None]
    """Called once, by any thread, when `rows` is no longer read."""


class KVFolders:
    """The folders of one identity."""

    def __init__(self, root: Path, identity: KVIdentity) -> None:
        """Touches nothing yet."""
        self.identity = identity
        # The version too: what a newer Interlace wrote is not damaged, and stays.
        self.base = root / f"{identity.model[:16]}-v{manifests.VERSION}"
        self.tmp = self.base / "tmp"

    def of_rank(self, rank: int) -> KVFolders:
        """Those of another worker of the same engine."""
        return KVFolders(self.base.parent, self.identity.of_rank(rank))

    def prepare(self) -> None:
        """Create what writing needs, and try it. Raises: `OSError`."""
        self._new_temporary().rmdir()

    def path_of(self, first_hash: bytes) -> Path:
        """Where a run that begins with this block lies."""
        name = self.identity.folder_name(first_hash)
        return self.base / name[:2] / name

    # ---------------------------------------------------------------- writing

    def write(self, run: Run) -> tuple[Path, Manifest]:
        """Write a run to a temporary folder, which nobody looks at.

        No fsync: a power cut may lose a run, and the digests find a torn one. Raises: `OSError`;
        then nothing is left.
        """
        folder = self._new_temporary()
        try:
            manifest = self._manifest(run, self._write_layers(folder, run))
            with open_new(folder / manifests.FILE_NAME) as file:
                file.write(manifest.to_bytes())
        except BaseException:
            self.discard(folder)
            raise
        return folder, manifest

    def _write_layers(self, folder: Path, run: Run) -> tuple[TensorFile, ...]:
        shape = (len(run.block_hashes), *run.block_shape)
        return tuple(
            write_tensor(folder / manifests.layer_file_name(i), self.identity.dtype, shape, rows)
            for i, rows in enumerate(run.rows)
        )

    def _manifest(self, run: Run, files: tuple[TensorFile, ...]) -> Manifest:
        return Manifest(
            identity=self.identity,
            parent_hash=run.parent_hash,
            block_hashes=run.block_hashes,
            block_shape=run.block_shape,
            layer_names=run.layer_names,
            files=files,
        )

    def publish(self, temporary: Path, manifest: Manifest) -> tuple[Path, Manifest]:
        """Make a written folder visible, and say what is visible under its name now.

        If another process was faster, its folder stays and ours goes: that is success too.
        Raises: `OSError`; then the temporary folder is gone.
        """
        target = self.path_of(manifest.block_hashes[0])
        try:
            self._make(target.parent)
            if self._rename(temporary, target):
                return target, manifest
            winner = self._winner(target)
            if winner is None and self._rename(temporary, target):
                return target, manifest
        except OSError:
            self.discard(temporary)
            raise
        self.discard(temporary)
        if winner is None:
            raise OSError(errno.EEXIST, "a damaged folder cannot be replaced", str(target))
        if winner.identity != self.identity:
            raise OSError(errno.EEXIST, "a folder of another identity is in the way", str(target))
        return target, winner

    def _rename(self, temporary: Path, target: Path) -> bool:
        """Whether the target was free."""
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            raise
        return True

    def _winner(self, target: Path) -> Manifest | None:
        """The manifest of who was faster; None if that one is damaged, and removed."""
        try:
            signature = self.signature(target)
            return self.check(target)
        except FileNotFoundError:
            return None
        except DamagedFileError:
            self.remove(target, signature)
            return None

    # ---------------------------------------------------------------- reading

    def signature(self, folder: Path) -> Signature:
        """Take it before reading what may have to be removed.

        Raises: `OSError`, of which `NotADirectoryError` for what is no folder.
        """
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        return Signature(status.st_ino, status.st_mtime_ns)

    def is_still(self, folder: Path, signature: Signature) -> bool:
        """Whether the folder is there, and the one that had this signature."""
        try:
            return self.signature(folder) == signature
        except OSError:
            return False

    def manifest(self, folder: Path) -> Manifest:
        """Raises: `DamagedFileError` (also without a manifest), `OSError`."""
        try:
            with (folder / manifests.FILE_NAME).open("rb") as file:
                data = file.read(manifests.MAX_BYTES)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise DamagedFileError(f"{folder.name} has no manifest") from error
        return Manifest.from_bytes(data)

    def check(self, folder: Path) -> Manifest:
        """The manifest, if all files are there in the right sizes. Reads no KV.

        Of a foreign identity only the manifest is checked. Raises: as `manifest`.
        """
        manifest = self.manifest(folder)
        if manifest.identity == self.identity:
            self.check_files(folder, manifest)
        return manifest

    def check_files(self, folder: Path, manifest: Manifest) -> None:
        """Raises: `DamagedFileError` unless all files are there in the right sizes; `OSError`."""
        for index, expected in enumerate(manifest.files):
            name = manifests.layer_file_name(index)
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError as error:
                raise DamagedFileError(f"{name} is missing") from error
            if size != expected.num_bytes:
                raise DamagedFileError(f"{name} is not as long as its manifest says")

    def read_layer(self, folder: Path, manifest: Manifest, index: int) -> ByteArray:
        """One layer of a run, checked: [blocks, bytes of a block].

        Raises: `DamagedFileError`, `OSError`.
        """
        num_blocks = len(manifest.block_hashes)
        data = read_tensor(
            folder / manifests.layer_file_name(index),
            self.identity.dtype,
            (num_blocks, *manifest.block_shape),
            manifest.files[index],
        )
        return data.reshape(num_blocks, -1)

    # ---------------------------------------------------------------- removing

    def remove(self, folder: Path, signature: Signature) -> bool:
        """Remove a folder that was found damaged, unless another has taken its place.

        Renamed away first, so that nobody sees half of it, and looked at then: a newer folder of
        the same name is put back. Whether it was removed; an undeletable one is left.
        """
        if not self.is_still(folder, signature):
            return False
        grave = self.tmp / self._unique_name()
        try:
            self._make(self.tmp)
            folder.rename(grave)
            if self.signature(grave) != signature:
                with contextlib.suppress(OSError):
                    grave.rename(folder)
                    return False
        except OSError:
            return False
        self.discard(grave)
        return True

    def discard(self, temporary: Path) -> None:
        """Remove a temporary folder as far as that is possible."""
        shutil.rmtree(temporary, ignore_errors=True)

    def remove_leftovers(self, now: float | None = None) -> None:
        """Remove temporary folders of dead processes. `now` is in seconds since the epoch.

        A process on another machine looks dead, so only old ones go.
        """
        oldest = (time.time() if now is None else now) - _LEFTOVER_AGE_S
        with contextlib.suppress(OSError):
            for folder in list(self.tmp.iterdir()):
                pid = re.match(r"(\d+)-", folder.name)
                if pid and folder.stat().st_mtime < oldest and not _is_alive(int(pid[1])):
                    self.discard(folder)

    def _new_temporary(self) -> Path:
        folder = self.tmp / self._unique_name()
        self._make(self.tmp)
        folder.mkdir(mode=0o700)
        return folder

    def _make(self, folder: Path) -> None:
        """Create a folder below `base`, and all above it: they may be removed at any time."""
        for one in (self.base.parent, self.base, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _unique_name(self) -> str:
        return f"{os.getpid()}-{secrets.token_hex(8)}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
