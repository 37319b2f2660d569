"""Content hashes of full KV blocks: a SHA-256 chain, equal in every process and on every machine.

A block's hash covers the hash of the block before it, its own token ids, and, through the root of
the chain, everything else that changes KV for the same tokens: cache salt and adapter. Each extra
key is written with its tag and length, so that no salt can stand for an adapter of that name.
Knows nothing of block ids or of the pool.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

BlockHash = NewType("BlockHash", bytes)
"""32 bytes."""
TokenArray = NDArray[np.int64]
"""Token ids as the engine keeps those of a prompt: flat, and not to be changed."""

SEGMENT_BLOCKS = 32
"""Blocks of which `HashMemo` keeps the hashes together."""
_DOMAIN = b"interlace.kv-block.v1"


def root_hash(*, cache_salt: str | None = None, adapter: str | None = None) -> BlockHash:
    """The hash that stands before a request's first block."""
    digest = hashlib.sha256(_DOMAIN)
    for tag, value in ((b"salt", cache_salt), (b"adapter", adapter)):
        if value is not None:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(tag + struct.pack("<Q", len(data)) + data)
    return BlockHash(digest.digest())


class HashMemo:
    """Hashes of segments of prompts that were hashed before: those of a long one, seen again, are
    looked up ten times as fast. Keys hold all that a hash depends on. One thread.
    """

    def __init__(self, max_segments: int = 2048) -> None:
        """`max_segments` of `SEGMENT_BLOCKS` blocks each are kept, the latest: with blocks of 16
        tokens those of a million tokens, in 14 MB."""
        self._max_segments = max_segments
        self._known: OrderedDict[tuple[BlockHash, bytes], list[BlockHash]] = OrderedDict()

    def chain(self, parent: BlockHash, data: bytes, stride: int) -> list[BlockHash]:
        """What `_chain` returns."""
        key = (parent, data)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _chain(parent, data, stride)
            if len(self._known) > self._max_segments:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return known


def extend_hashes(
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int] | TokenArray,
    block_size: int,
    memo: HashMemo | None = None,
) -> None:
    """Append to `hashes` one hash for each full block of `token_ids` that has none yet.

    `hashes[i]` covers tokens [0, (i + 1) * block_size). Costs about 1 us per block that `memo` does
    not know; call it off the event loop for very long prompts.
    """
    first = len(hashes) * block_size
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return
    data = np.asarray(token_ids[first : num_full * block_size], dtype="<i8").tobytes()
    stride = block_size * 8
    segment_bytes = SEGMENT_BLOCKS * stride
    for start in range(0, len(data), segment_bytes):
        parent = hashes[-1] if hashes else root
        segment = data[start : start + segment_bytes]
        if memo is not None and len(segment) == segment_bytes:
            hashes += memo.chain(parent, segment, stride)
        else:
            hashes += _chain(parent, segment, stride)


def _chain(parent: BlockHash, data: bytes, stride: int) -> list[BlockHash]:
    """The hashes of blocks of `stride` bytes each behind `parent`."""
    hashes = []
    for start in range(0, len(data), stride):
        parent = BlockHash(hashlib.sha256(parent + data[start : start + stride]).digest())
        hashes.append(parent)
    return hashes
