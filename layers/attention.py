"""Attention over paged KV, batched over requests: the plain torch form for a CPU.

All KV of the step is written before anything is read, so a request may share blocks that another
one fills in the same step. Requests that compute one token are batched by context length; each
longer chunk is cut into pieces. The kernel is torch's flash attention for CPUs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from interlace.layers.kv_pages import K, KVPages, V

PIECE_TOKENS = 64
"""Query tokens of a long chunk that one kernel call takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceChunk:
    """One request's share of a step: tokens [start, end) of it, with everything before cached."""

    block_ids: Sequence[int]
    """Blocks of tokens [0, end), in order; more may follow."""
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Query tokens that one kernel call takes, and what they may see."""

    tokens: slice | Tensor
    """Where they lie in the batch."""
    mask: Tensor
    """Added to the scores: [B, 1, 1, keys] for one token each, else [query heads of a KV head *
    Q, keys]."""
    num_keys: int
    """Keys of each request that the kernel sees."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Requests whose KV is gathered together: B of them with one token each, or one with many."""

    batch: int
    block_ids: Tensor
    """int64 [B * N]: what to gather, N blocks a request."""
    pieces: tuple[_Piece, ...]
    """One for B tokens, or the chunk cut up."""


class PagedAttention:
    """The `Attend` of one step. Build one per step; all layers share its indices and masks.

    `chunks` are in batch order. Raises nothing; ids and ranges are the scheduler's promise.
    """

    def __init__(
        self,
        pages: KVPages,
        chunks: Sequence[SequenceChunk],
        num_heads: int,
        *,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        self._pages = pages
        self._num_heads = num_heads
        dtype = pages.layers[0].dtype
        self.slots = torch.from_numpy(
            np.concatenate([slots_of(chunk, pages.block_size) for chunk in chunks])
        )
        """Where the step's tokens go: `block_id * block_size + offset`, int64 [T]."""
        self._rows = pages.kv_rows(self.slots)
        starts = np.cumsum([0] + [chunk.end - chunk.start for chunk in chunks])
        decodes = [i for i, chunk in enumerate(chunks) if chunk.end - chunk.start == 1]
        prefills = [i for i, chunk in enumerate(chunks) if chunk.end - chunk.start > 1]
        triangle = _Triangle(
            group_size=num_heads // pages.num_kv_heads,
            size=piece_tokens,
            width=max((chunks[i].end for i in prefills), default=0),
            dtype=dtype,
        )
        self._groups = [
            _decode_group(pages, chunks, starts, members, dtype)
            for members in _by_length(chunks, decodes, pages.block_size)
        ] + [_prefill_group(pages, chunks[i], int(starts[i]), triangle) for i in prefills]
        most = max(len(group.block_ids) for group in self._groups)
        gathered = (most, pages.block_size, pages.num_kv_heads, pages.head_dim)
        self._k = torch.empty(gathered, dtype=dtype)
        self._v = torch.empty(gathered, dtype=dtype)

    def on(self, pages: KVPages) -> PagedAttention:
        """The same step on the pages of another worker, which are of the same shape and layout.

        Indices, masks and buffers are shared, so one of the two runs at a time.
        """
        other = copy.copy(self)
        other._pages = pages
        return other

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        self._pages.write(layer, self._rows, k, v)
        num_tokens = q.shape[0]
        out = torch.empty((num_tokens, self._num_heads, q.shape[-1]), dtype=q.dtype)
        for group in self._groups:
            gathered = self._gather(layer, group)
            for piece in group.pieces:
                out[piece.tokens] = self._attend(*gathered, piece, q)
        return out.view(num_tokens, -1)

    def _gather(self, layer: int, group: _Group) -> tuple[Tensor, Tensor]:
        """K and V of the group, each [B, kv heads, keys, head_dim], as views on a buffer."""
        pages, n = self._pages, len(group.block_ids)
        shape = (group.batch, -1, pages.num_kv_heads, pages.head_dim)
        k = pages.gather(layer, K, group.block_ids, self._k[:n]).view(shape)
        v = pages.gather(layer, V, group.block_ids, self._v[:n]).view(shape)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, k: Tensor, v: Tensor, piece: _Piece, q: Tensor) -> Tensor:
        """Q tokens of each of B requests. Returns [B * Q, heads, head_dim].

        The query heads that share a KV head take the place of more query tokens, so each key is
        read once for all of them.
        """
        batch, kv_heads, _, head_dim = k.shape
        grouped = q[piece.tokens].view(batch, -1, kv_heads, self._num_heads // kv_heads, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4)
        out = functional.scaled_dot_product_attention(
            grouped.reshape(batch, kv_heads, -1, head_dim),
            k[:, :, : piece.num_keys],
            v[:, :, : piece.num_keys],
            attn_mask=piece.mask,
        )
        return out.reshape(grouped.shape).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:])


def slots_of(chunk: SequenceChunk, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the chunk's tokens go: `block_id * block_size + offset`, int64 [end - start]."""
    positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
    first = chunk.start // block_size
    blocks = np.asarray(chunk.block_ids[first : -(-chunk.end // block_size)], dtype=np.int64)
    slots: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        blocks[positions // block_size - first] * block_size + positions % block_size
    )
    return slots


def _num_blocks(chunk: SequenceChunk, block_size: int) -> int:
    return -(-chunk.end // block_size)


def _by_length(
    chunks: Sequence[SequenceChunk], members: Sequence[int], block_size: int
) -> list[list[int]]:
    """Split requests so that padding each group to its longest at most doubles what is read."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(_num_blocks(chunks[i], block_size).bit_length(), []).append(i)
    return list(groups.values())


def _decode_group(
    pages: KVPages,
    chunks: Sequence[SequenceChunk],
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    members: Sequence[int],
    dtype: torch.dtype,
) -> _Group:
    width = max(_num_blocks(chunks[i], pages.block_size) for i in members)
    table = np.zeros((len(members), width), dtype=np.int64)  # padded with the null block
    for row, i in enumerate(members):
        n = _num_blocks(chunks[i], pages.block_size)
        table[row, :n] = chunks[i].block_ids[:n]
    ends = torch.tensor([chunks[i].end for i in members])
    num_keys = width * pages.block_size
    hidden = torch.arange(num_keys) >= ends[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    piece = _Piece(torch.from_numpy(starts[members]), mask[:, None, None], num_keys)
    return _Group(len(members), torch.from_numpy(table.reshape(-1)), (piece,))


class _Triangle:
    """The causal masks of all pieces of a step, as views on one matrix.

    It has `width` visible columns, for what lies before a piece, and then the piece's own
    triangle, `size` rows for each of the `group_size` query heads of a KV head.
    """

    def __init__(self, *, group_size: int, size: int, width: int, dtype: torch.dtype) -> None:
        self.size = size
        self._width = width
        hidden = torch.arange(-width, size) > torch.arange(size)[:, None]
        one_head = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        self._mask = one_head.repeat(group_size, 1, 1)

    def mask(self, num_before: int, num_tokens: int) -> Tensor:
        """For `num_tokens` after `num_before`: [group_size * num_tokens, both together].

        A view for a whole piece, a copy for a shorter one.
        """
        columns = slice(self._width - num_before, self._width + num_tokens)
        return self._mask[:, :num_tokens, columns].flatten(0, 1)


def _prefill_group(pages: KVPages, chunk: SequenceChunk, start: int, triangle: _Triangle) -> _Group:
    """One chunk whose tokens begin at `start` in the batch, cut into pieces.

    The kernel computes every score up to the last key and masks; a piece ends at its own last
    token, so a long prompt computes little more than the triangle below the diagonal.
    """
    offset = start - chunk.start  # from positions in the request to places in the batch
    pieces = []
    for first in range(chunk.start, chunk.end, triangle.size):
        end = min(first + triangle.size, chunk.end)
        mask = triangle.mask(first, end - first)
        pieces.append(_Piece(slice(first + offset, end + offset), mask, end))
    blocks = chunk.block_ids[: _num_blocks(chunk, pages.block_size)]
    return _Group(1, torch.tensor(blocks, dtype=torch.int64), tuple(pieces))
