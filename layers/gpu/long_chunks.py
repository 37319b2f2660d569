"""Attention of long chunks by the matrix library, where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture
from interlace.layers.attention import SequenceChunk
from interlace.layers.decoder import Decoder
from interlace.layers.kernels.gathered_attention import (
    KEY_GRAIN,
    QUERY_GRAIN,
    GatheredChunk,
    GatherWorkspace,
    prefers_gathered,
)
from interlace.layers.kv_pages import KVPages


class LongChunk(NamedTuple):
    """One request of a step."""

    tokens: slice
    """Where its new tokens are in the batch."""
    gathered: GatheredChunk


class LongChunks:
    """The library's attention over one pool of pages. Not for graphs."""

    def __init__(
        self, decoder: Decoder, pages: KVPages, num_sms: int, max_num_batched_tokens: int
    ) -> None:
        """`num_sms`: multiprocessors of the device. Takes memory for one request of any length."""
        a = decoder.architecture
        self._decoder = decoder
        self._pages = pages
        self._num_sms = num_sms
        self._max_new = max_num_batched_tokens
        self._scale = a.head_dim**-0.5
        self._workspace: GatherWorkspace | None = None
        if self._prefers(self._max_new, 0):
            self._workspace = GatherWorkspace.allocate(
                max_new=self._max_new,
                max_len=decoder.max_model_len,
                num_heads=a.num_heads,
                num_kv_heads=a.num_kv_heads,
                head_dim=a.head_dim,
                dtype=decoder.dtype,
                device=decoder.device,
            )

    def _prefers(self, new: int, context: int, num_tokens: int | None = None) -> bool:
        """For a chunk of a step of so many tokens; None: by the device alone, whatever else is in
        the step."""
        a = self._decoder.architecture
        return self._decoder.device.type == "cuda" and prefers_gathered(
            new,
            context,
            num_heads=a.num_heads,
            head_dim=a.head_dim,
            dtype=self._decoder.dtype,
            num_sms=self._num_sms,
            rest_flops=None if num_tokens is None else num_tokens * _matrix_flops(a),
        )

    def of(self, chunks: Sequence[SequenceChunk], block_table: Tensor) -> tuple[LongChunk, ...]:
        """What `attend` needs for each of these requests that computes several tokens, if it is
        the faster way for all of them; else nothing. `block_table`: int32, a row for each."""
        long: list[LongChunk] = []
        begin = 0
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        for row, chunk in enumerate(chunks):
            count = chunk.end - chunk.start
            if count > 1:
                if self._workspace is None or not self._prefers(count, chunk.start, num_tokens):
                    return ()
                tokens = slice(begin, begin + count)
                long.append(LongChunk(tokens, self._gathered(count, chunk.end, block_table[row])))
            begin += count
        return tuple(long)

    def _gathered(self, new: int, seq_len: int, block_ids: Tensor) -> GatheredChunk:
        assert self._workspace is not None
        return GatheredChunk(new, seq_len, block_ids, self._workspace, scale=self._scale)

    def attend(self, layer: int, q: Tensor, chunk: LongChunk, out: Tensor) -> None:
        """Put into `out` [T, heads, head_dim], for the chunk's tokens, what the paged kernel would
        compute, up to rounding. `q` is that of the whole batch."""
        chunk.gathered.attend(q[chunk.tokens], self._pages.layers[layer], out[chunk.tokens])

    def prepare(self, progress: Progress) -> None:
        """Let the library prepare the shapes that prompts have, which takes it 40 ms each: else
        the first prompts would wait for it. Device thread, before the first step."""
        if self._workspace is None:
            return
        shapes = self._shapes()
        a, decoder = self._decoder.architecture, self._decoder
        block_ids = torch.zeros(
            -(-decoder.max_model_len // self._pages.block_size),
            dtype=torch.int32,
            device=decoder.device,
        )
        with progress.task("preparing attention", len(shapes)) as advance:
            for new, context in shapes:
                q = torch.zeros(
                    (new, a.num_heads, a.head_dim), dtype=decoder.dtype, device=decoder.device
                )
                chunk = self._gathered(new, context + new, block_ids)
                chunk.attend(q, self._pages.layers[0], q)
                advance(1)

    def _shapes(self) -> list[tuple[int, int]]:
        """(new, context) that stand for all: chunks of each size, and each size of a piece."""
        longest = self._decoder.max_model_len
        rows = range(QUERY_GRAIN, min(self._max_new, longest) + 1, QUERY_GRAIN)
        shapes = [(new, 0) for new in rows if self._prefers(new, 0)]
        piece = KEY_GRAIN
        while piece < longest:
            shapes += [
                (new, piece)
                for new in rows
                if new + piece <= longest and new <= 4 * QUERY_GRAIN and self._prefers(new, piece)
            ]
            piece *= 2
        return shapes


def _matrix_flops(a: Architecture) -> float:
    """Of one token in the matrix products of one layer."""
    projections = a.hidden_size * (2 * a.q_size + 2 * a.kv_size)
    return 2.0 * (projections + 3 * a.hidden_size * a.intermediate_size)
