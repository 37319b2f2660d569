"""What a step uploads: one packed buffer, filled on the host and read through views on the device.

The layout depends on the padded sizes alone, so a captured graph finds its inputs where they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.layers.attention import SequenceChunk, slots_of
from interlace.layers.gpu.pinned import PinnedTurns
from interlace.layers.kernels.host_copies import read_words, write_words

IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]
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
    known: IntArray
    """Ids of the chunk's tokens that the host knows: all, or all but the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class Additions:
    """Block ids that the block tables on the device lack, U of them."""

    places: Tensor
    """int64 [U]: where, in the tables as one row."""
    block_ids: Tensor
    """int32 [U]."""

    @staticmethod
    def num_bytes(count: int) -> int:
        """Of the packed buffer."""
        return 12 * count

    @classmethod
    def on(cls, buffer: Tensor, count: int) -> Additions:
        """Views on `buffer`, uint8 [at least `num_bytes`], that begins at a multiple of 8."""
        return cls(
            buffer[: 8 * count].view(torch.int64),
            buffer[8 * count : 12 * count].view(torch.int32),
        )

    @staticmethod
    def fill(buffer: Bytes, count: int, places: IntArray, block_ids: IntArray) -> None:
        """Write them to the host's buffer; up to `count` the last one is repeated."""
        for numbers, given in (
            (buffer[: 8 * count].view(np.int64), places),
            (buffer[8 * count : 12 * count].view(np.int32), block_ids),
        ):
            numbers[: len(given)], numbers[len(given) :] = given, given[-1]


class HostInputs(NamedTuple):
    """The numbers of `StepInputs` in host memory."""

    token_ids: IntArray
    sources: IntArray
    positions: IntArray
    slots: IntArray
    last_tokens: IntArray
    rows: IntArray
    seq_lens: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]

    @classmethod
    def on(cls, buffer: Bytes, size: StepSize) -> HostInputs:
        """Views on `buffer`, as of `StepInputs.on`."""
        tokens, requests = size
        ends = np.cumsum([tokens, tokens, tokens, tokens, requests, requests])
        wide = buffer[: 8 * int(ends[-1])].view(np.int64)
        narrow = buffer[wide.nbytes : StepInputs.num_bytes(size)].view(np.int32)
        token_ids, sources, positions, slots, last_tokens, rows = np.split(wide, ends[:-1])
        seq_lens, query_start_loc = np.split(narrow, [requests])
        return cls(
            token_ids, sources, positions, slots, last_tokens, rows, seq_lens, query_start_loc
        )


def fill(inputs: HostInputs, items: Sequence[BatchItem], block_size: int, nobody: int) -> None:
    """Write a step's numbers to host views, padding included. `nobody` is the row of padding."""
    starts = np.array([item.chunk.start for item in items])
    ends = np.array([item.chunk.end for item in items])
    behind = np.cumsum(ends - starts)
    num_tokens, num_requests = int(behind[-1]), len(items)
    fill_tokens = _fill_decodes if num_tokens == num_requests else _fill_chunks
    fill_tokens(inputs, items, starts, block_size)
    for numbers, padding in (
        (inputs.token_ids, 0),
        (inputs.sources, NO_SLOT),
        (inputs.positions, 0),
        (inputs.slots, NO_SLOT),
    ):
        numbers[num_tokens:] = padding
    last, rows = inputs.last_tokens, inputs.rows
    last[:num_requests], last[num_requests:] = behind - 1, 0
    rows[:num_requests], rows[num_requests:] = [item.row for item in items], nobody
    seq_lens, begins = inputs.seq_lens, inputs.query_start_loc
    seq_lens[:num_requests], seq_lens[num_requests:] = ends, 0
    begins[0] = 0
    begins[1 : num_requests + 1], begins[num_requests + 1 :] = behind, num_tokens


def _fill_decodes(
    inputs: HostInputs, items: Sequence[BatchItem], starts: IntArray, block_size: int
) -> None:
    """One token of each request: no loop over small arrays, since this is done every few ms."""
    count = len(items)
    blocks = [item.chunk.block_ids[item.chunk.start // block_size] for item in items]
    known = [int(item.known[0]) if len(item.known) else NO_SLOT for item in items]
    rows = np.array([item.row for item in items])
    ids = np.array(known)
    inputs.token_ids[:count] = np.maximum(ids, 0)
    inputs.sources[:count] = np.where(ids < 0, rows, NO_SLOT)
    inputs.positions[:count] = starts
    inputs.slots[:count] = np.array(blocks) * block_size + starts % block_size


def _fill_chunks(
    inputs: HostInputs, items: Sequence[BatchItem], starts: IntArray, block_size: int
) -> None:
    token_ids, sources = inputs.token_ids, inputs.sources
    positions, slots = inputs.positions, inputs.slots
    begin = 0
    for item in items:
        chunk = item.chunk
        end = begin + chunk.end - chunk.start
        sources[begin:end] = NO_SLOT
        token_ids[begin : begin + len(item.known)] = item.known
        if len(item.known) < end - begin:
            token_ids[end - 1], sources[end - 1] = 0, item.row
        positions[begin:end] = np.arange(chunk.start, chunk.end)
        slots[begin:end] = slots_of(chunk, block_size)
        begin = end


class InputBuffer:
    """The device's packed buffer, and pinned ones that it is filled from in turns: more than steps
    in flight. Device thread."""

    def __init__(
        self, largest: StepSize, most_additions: int, device: torch.device, num_buffers: int = 3
    ) -> None:
        """For steps of up to that size, with up to so many additions to the block tables."""
        self.most_additions = most_additions
        num_bytes = _aligned(StepInputs.num_bytes(largest)) + Additions.num_bytes(most_additions)
        num_bytes = _aligned(num_bytes)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pinned = PinnedTurns(num_bytes, num_buffers, device)
        hosts = self._pinned.buffers
        self.is_on_gpu = self._pinned.is_on_gpu
        self._host_bytes: list[Bytes] = [host.numpy() for host in hosts]
        # The same few sizes come again and again, and views take long to make.
        self.views = functools.lru_cache(64)(functools.partial(StepInputs.on, self._device))
        """Where a step of a size finds its inputs."""
        self._host_views = [
            functools.lru_cache(64)(functools.partial(HostInputs.on, host))
            for host in self._host_bytes
        ]
        self._first = [
            functools.lru_cache(64)(functools.partial(_first, buffer))
            for buffer in (*hosts, self._device)
        ]
        self._words = [buffer.view(torch.int32) for buffer in (*hosts, self._device)]
        if self.is_on_gpu:
            # Compiled now, not in a step.
            read_words(self._words[0], self._words[-1], 1)
            write_words(self._words[-1], self._words[0], 1)
        self._added = functools.lru_cache(64)(functools.partial(_added, self._device))

    def upload(
        self,
        items: Sequence[BatchItem],
        size: StepSize,
        block_size: int,
        nobody: int,
        additions: tuple[IntArray, IntArray],
    ) -> tuple[StepInputs, Additions | None]:
        """Queue the upload of a step's numbers; returns the device's views.

        `additions`: places in the block tables, and block ids, at most `most_additions`.
        """
        places, block_ids = additions
        count = self._padded(len(places))
        begin = _aligned(StepInputs.num_bytes(size))
        end = begin + Additions.num_bytes(count)
        turn = self._pinned.take()
        fill(self._host_views[turn](size), items, block_size, nobody)
        if count:
            Additions.fill(self._host_bytes[turn][begin:], count, places, block_ids)
        if self.is_on_gpu:  # a copy would wait for loads that are on their way
            read_words(self._words[turn], self._words[-1], end // 4)
        else:
            self._first[-1](end).copy_(self._first[turn](end), non_blocking=True)
        self._pinned.note_read()
        return self.views(size), self._added(begin, count) if count else None

    def _padded(self, count: int) -> int:
        """So many additions are uploaded: few different numbers, so that views are made seldom."""
        return min(1 << (count - 1).bit_length(), self.most_additions) if count else 0

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


def _first(buffer: Tensor, num_bytes: int) -> Tensor:
    return buffer[:num_bytes]


def _added(buffer: Tensor, begin: int, count: int) -> Additions:
    return Additions.on(buffer[begin:], count)


def _aligned(num_bytes: int) -> int:
    """Rounded up to a multiple of 8."""
    return -(-num_bytes // 8) * 8
