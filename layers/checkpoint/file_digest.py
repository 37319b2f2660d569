"""SHA-256 of large files, each read once: the digest is remembered by path, size, time and inode.

What is remembered lies in one small JSON file of the cache. Whatever is wrong with that file costs
a file another reading, never a wrong digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from interlace.engine.file_access import replacing
from interlace.layers.checkpoint.cache_folder import (
    cache_folder,
    private_folder,
    remove_stale_scratch,
)

MEMO_NAME: Final = "digests.json"
_CHUNK_BYTES: Final = 8 << 20
_MAX_REMEMBERED: Final = 1000
_MAX_MEMO_BYTES: Final = 4 << 20
_SETTLED_NS: Final = 2_000_000_000
"""A file younger than this may change once more within one tick of its file system's clock."""
_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """What a file was at some time; one that is written anew or replaced has another stamp."""

    path: Path
    """Links resolved."""
    size: int
    """Bytes."""
    mtime_ns: int
    inode: int


def stamps_of(paths: Iterable[Path]) -> tuple[FileStamp, ...]:
    """One stamp per file, in order; none at all if one of them cannot be had."""
    try:
        real = [Path(os.path.realpath(path)) for path in paths]
        return tuple(_stamp(path, path.stat()) for path in real)
    except OSError:
        return ()


def digests_of(
    files: Sequence[FileStamp],
    advance: Callable[[float], None],
    *,
    memo: Path | None = None,
) -> list[str] | None:
    """SHA-256 in hex of each file; None if one is not any more what its stamp says.

    `advance` is called with bytes that are done. `memo` is the file that remembers, by default in
    the cache folder. Blocks for as long as reading takes. Raises: what `advance` raises.
    """
    memo = memo or default_memo()
    remembered = _read(memo)
    digests = []
    for stamp in files:
        digest = _look_up(remembered, stamp)
        if digest is not None:
            advance(stamp.size)
        else:
            digest = _sha256(stamp, advance)
            if digest is None:
                return None
            _remember(memo, stamp, digest)
        digests.append(digest)
    return digests


def unread_bytes(files: Sequence[FileStamp], *, memo: Path | None = None) -> int:
    """How much of `files` would have to be read."""
    remembered = _read(memo or default_memo())
    return sum(f.size for f in files if _look_up(remembered, f) is None)


def default_memo() -> Path:
    """The file that remembers, in the cache folder."""
    return cache_folder() / "weights" / MEMO_NAME


def _stamp(path: Path, status: os.stat_result) -> FileStamp:
    return FileStamp(path, status.st_size, status.st_mtime_ns, status.st_ino)


def _sha256(stamp: FileStamp, advance: Callable[[float], None]) -> str | None:
    """Read the whole file; None if it changed before or meanwhile, or cannot be read."""
    digest = hashlib.sha256()
    try:
        with stamp.path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
            unchanged = _stamp(stamp.path, os.fstat(file.fileno())) == stamp
    except OSError:
        return None
    return digest.hexdigest() if unchanged else None


def _read(memo: Path) -> dict[str, Any]:
    """Path -> what is remembered of the file; nothing if the memo is missing or damaged."""
    try:
        if memo.stat().st_size > _MAX_MEMO_BYTES:
            return {}
        content = json.loads(memo.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _look_up(remembered: dict[str, Any], stamp: FileStamp) -> str | None:
    entry = remembered.get(os.fsencode(stamp.path).hex())
    if not isinstance(entry, list) or entry[:3] != [stamp.size, stamp.mtime_ns, stamp.inode]:
        return None
    digest = entry[3] if len(entry) == 4 else None
    return digest if isinstance(digest, str) and _HEX.fullmatch(digest) else None


def _remember(memo: Path, stamp: FileStamp, digest: str) -> None:
    """Add one file to what is remembered, as far as the cache folder can be written."""
    if time.time_ns() - stamp.mtime_ns < _SETTLED_NS:
        return
    with contextlib.suppress(OSError):
        folder = private_folder(memo.parent)
        remove_stale_scratch(folder)
        remembered = _read(memo)  # another process may have added to it meanwhile
        key = os.fsencode(stamp.path).hex()
        remembered.pop(key, None)
        kept = dict(list(remembered.items())[-(_MAX_REMEMBERED - 1) :])
        kept[key] = [stamp.size, stamp.mtime_ns, stamp.inode, digest]
        with replacing(memo) as file:
            file.write(json.dumps(kept).encode())
