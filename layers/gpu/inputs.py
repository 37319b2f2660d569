"""What a step uploads: one packed buffer, filled on the host and read through views on the device.

The layout depends on the padded sizes alone, so a captured graph finds its inputs where they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from interlace.layers.attention import SequenceChunk, slots_of

NO_SLOT = -1
"""The slot of a padding token: written nowhere."""


class StepSize(NamedTuple):
    """Padded numbers of tokens and requests."""

    num_tokens: int
    num_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """Views on one packed buffer. T tokens, B requests, both padded."""

    token_ids: Tensor
    """int64 [T]; what stands where `sources` names a row does not matter."""
    sources: Tensor
    """int64 [T]: the row of a request whose newest token, sampled on the device, is the input; -1
    for a token that the host knows."""
    positions: Tensor
    """int64 [T]."""
    slots: Tensor
    """int64 [T]: `block_id * block_size + offset`; `NO_SLOT` for padding."""
    last_tokens: Tensor
    """int64 [B]: where in the batch each request's last token is."""
    rows: Tensor
    """int64 [B]: each request's row of the block tables; padding has the row of nobody."""
    seq_lens: Tensor
    """int32 [B]: tokens of each request when the step ends; 0 for padding."""
    query_start_loc: Tensor
    """int32 [B + 1]."""

    @staticmethod
    def num_bytes(size: StepSize) -> int:
        """Of the packed buffer."""
        tokens, requests = size
        return 8 * (4 * tokens + 2 * requests) + 4 * (2 * requests + 1)

    @classmethod
    def on(cls, buffer: Tensor, size: StepSize) -> StepInputs:
        """Views on `buffer`, uint8 [at least `num_bytes`], that begins at a multiple of 8."""
        tokens, requests = size
        wide = buffer[: 8 * (4 * tokens + 2 * requests)].view(torch.int64)
        narrow = buffer[wide.nbytes : cls.num_bytes(size)].view(torch.int32)
        token_ids, sources, positions, slots, last_tokens, rows = torch.split(
            wide, [tokens, tokens, tokens, tokens, requests, requests]
        )
        seq_lens, query_start_loc = torch.split(narrow, [requests, requests + 1])
        return cls(
            token_ids, sources, positions, slots, last_tokens, rows, seq_lens, query_start_loc
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BatchItem:
    """One request's share of a step."""

    row: int
    """Of the block tables."""
    chunk: SequenceChunk
    known: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Ids of the chunk's tokens that the host knows: all, or all but the last."""


def fill(inputs: StepInputs, items: Sequence[BatchItem], block_size: int, nobody: int) -> None:
    """Write a step's numbers to host views, padding included. `nobody` is the row of padding."""
    counts = np.array([item.chunk.end - item.chunk.start for item in items])
    ends = np.cumsum(counts)
    num_tokens, num_requests = int(ends[-1]), len(items)
    token_ids, sources = inputs.token_ids.numpy(), inputs.sources.numpy()
    positions, slots = inputs.positions.numpy(), inputs.slots.numpy()
    sources[:] = NO_SLOT
    token_ids[num_tokens:] = positions[num_tokens:] = 0
    slots[num_tokens:] = NO_SLOT
    for item, end, count in zip(items, ends.tolist(), counts.tolist(), strict=True):
        chunk, begin = item.chunk, end - count
        token_ids[begin : begin + len(item.known)] = item.known
        if len(item.known) < count:
            token_ids[end - 1], sources[end - 1] = 0, item.row
        positions[begin:end] = np.arange(chunk.start, chunk.end)
        slots[begin:end] = slots_of(chunk, block_size)
    last, rows = inputs.last_tokens.numpy(), inputs.rows.numpy()
    last[:num_requests], last[num_requests:] = ends - 1, 0
    rows[:num_requests], rows[num_requests:] = [item.row for item in items], nobody
    seq_lens, starts = inputs.seq_lens.numpy(), inputs.query_start_loc.numpy()
    seq_lens[:num_requests] = [item.chunk.end for item in items]
    seq_lens[num_requests:] = 0
    starts[0] = 0
    starts[1 : num_requests + 1], starts[num_requests + 1 :] = ends, num_tokens


class InputBuffer:
    """The device's packed buffer, and how it is filled."""

    def __init__(self, largest: StepSize, device: torch.device) -> None:
        self._device = torch.zeros(StepInputs.num_bytes(largest), dtype=torch.uint8, device=device)
        self._pins = device.type == "cuda"

    def upload(
        self, items: Sequence[BatchItem], size: StepSize, block_size: int, nobody: int
    ) -> StepInputs:
        """Queue the upload of a step's numbers; returns the device's views.

        The host's copy is pinned and kept until it was read: the allocator sees to that.
        """
        num_bytes = StepInputs.num_bytes(size)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        fill(StepInputs.on(host, size), items, block_size, nobody)
        self._device[:num_bytes].copy_(host, non_blocking=True)
        return self.views(size)

    def pad(self, size: StepSize, nobody: int) -> StepInputs:
        """Fill the inputs of a step of this size with padding alone, to capture it."""
        inputs = self.views(size)
        for numbers in (inputs.token_ids, inputs.positions, inputs.last_tokens):
            numbers.zero_()
        inputs.sources.fill_(NO_SLOT)
        inputs.slots.fill_(NO_SLOT)
        inputs.rows.fill_(nobody)
        inputs.seq_lens.zero_()
        inputs.query_start_loc.fill_(size.num_tokens)
        inputs.query_start_loc[0] = 0
        return inputs

    def views(self, size: StepSize) -> StepInputs:
        """Where a step of this size finds its inputs."""
        return StepInputs.on(self._device, size)
