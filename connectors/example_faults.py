"""Damages what ExampleConnector has stored, as `interlace check` asks for it.

Each kind is one that the index does not see, so that the blocks are promised and their load fails:
time stamps of folders are put back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.manifest import FILE_NAME, Manifest, layer_file_name
from interlace.connectors.kv_folders.tensor_file import DamagedFileError


def _flip(folder: Path, manifest: Manifest) -> None:
    """One bit of the last layer's last value."""
    path = _last_layer(folder, manifest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _shorten(folder: Path, manifest: Manifest) -> None:
    os.truncate(_last_layer(folder, manifest), manifest.files[-1].num_bytes - 1)


def _remove_layer(folder: Path, manifest: Manifest) -> None:
    _last_layer(folder, manifest).unlink()


def _remove_manifest(folder: Path, _: Manifest) -> None:
    (folder / FILE_NAME).unlink()


def _remove(folder: Path, _: Manifest) -> None:
    shutil.rmtree(folder)


def _last_layer(folder: Path, manifest: Manifest) -> Path:
    return folder / layer_file_name(len(manifest.files) - 1)


_FAULTS: dict[str, Callable[[Path, Manifest], None]] = {
    "missing": _remove,
    "missing layer": _remove_layer,
    "missing manifest": _remove_manifest,
    "short": _shorten,
    "flipped": _flip,
}
FAULT_KINDS = tuple(_FAULTS)


def damage(folders: KVFolders, kind: str, block_hash: bytes) -> set[bytes]:
    """Damage every folder that holds the block, and every one that holds a block of those: the
    hashes of all that is lost. File I/O. Raises: `KeyError` for an unknown kind; `OSError`."""
    fault = _FAULTS[kind]
    whole = _whole_folders(folders)
    lost, last = {block_hash}, set[bytes]()
    hit: dict[Path, Manifest] = {}
    while lost != last:
        last = set(lost)
        hit = {path: one for path, one in whole.items() if lost & set(one.block_hashes)}
        lost.update(*(one.block_hashes for one in hit.values()))
    for folder, manifest in hit.items():
        status = folder.stat()
        fault(folder, manifest)
        if folder.exists():
            os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    return lost if hit else set()


def _whole_folders(folders: KVFolders) -> dict[Path, Manifest]:
    """What a load could read now."""
    found = {}
    for path in sorted(folders.base.glob("[0-9a-f][0-9a-f]/*")):
        try:
            manifest = folders.check(path)
        except (DamagedFileError, OSError):
            continue
        if manifest.identity == folders.identity:
            found[path] = manifest
    return found
