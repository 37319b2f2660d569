"""Weighted sums of what lies in pages, so that what was loaded can be checked where it has come to.

On a GPU a kernel makes them, on the current stream, and puts them into host memory; on a CPU they
are there at once, which is the kernel's twin. Device thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.layers.kernels import toolchain
from interlace.layers.kernels.host_copies import read_words, write_words
from interlace.layers.kernels.page_sums import COLUMNS, page_sums_kernel

_WORD_BYTES = 4
Weights = NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSums:
    """Sums of some blocks, when what the stream did by then has ended."""

    _host: torch.Tensor
    _used: tuple[torch.Tensor, ...] = ()
    """Kept until then."""

    def values(self) -> NDArray[np.uint64]:
        """Of each block, modulo 2^64."""
        found: NDArray[np.uint64] = self._host.numpy().view(np.uint64)
        return found


class PageSums:
    """See the module's docstring."""

    def __init__(
        self, layers: Sequence[torch.Tensor], row_weights: Weights, column_weights: Weights
    ) -> None:
        """`layers`: pages in order of depth, each block's contiguous, and alike; see `can_sum`.
        Words are of 32 bits, those of a block, over all layers, in rows of 1024; `row_weights` for
        each of these. A word's weight is that of its row and its column together. On a GPU it is
        compiled here."""
        assert column_weights.shape == (COLUMNS,)
        device = layers[0].device
        self._device = device
        self._rows = [pages.detach().view(torch.uint8).view(len(pages), -1) for pages in layers]
        self._page_words = self._rows[0].shape[1] // _WORD_BYTES
        num_words = len(layers) * self._page_words
        assert len(row_weights) * COLUMNS >= num_words
        self._is_host = not toolchain.runs_on(device)
        if self._is_host:
            weights = row_weights[:, None] + column_weights
            self._weights: Weights = weights.reshape(-1)[:num_words]
            return
        self._words = self._rows[0].view(torch.int32)
        places = [(rows.data_ptr() - self._words.data_ptr()) // _WORD_BYTES for rows in self._rows]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._row_weights, self._column_weights = (
            torch.from_numpy(one.view(np.int64)).to(device) for one in (row_weights, column_weights)
        )
        self.of([0])
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @staticmethod
    def can_sum(layers: Sequence[torch.Tensor]) -> bool:
        """Whether pages are alike, of whole words, and lie at those."""
        first = layers[0]
        strides = {pages.stride(0) * pages.itemsize for pages in layers}
        places = {pages.data_ptr() % (2 * _WORD_BYTES) for pages in layers}
        page_bytes = first[0].numel() * first.itemsize
        return (
            len(strides) == 1
            and not any(number % _WORD_BYTES for number in (*strides, *places, page_bytes))
            and len(places) == 1
        )

    def of(self, blocks: Sequence[int] | NDArray[np.int64]) -> BlockSums:
        """Sums of these blocks, one at least, as the current stream finds them."""
        if self._is_host:
            return BlockSums(self._on_host(blocks))
        is_cuda = self._device.type == "cuda"
        count = len(blocks)
        numbers = torch.empty(count, dtype=torch.int32, pin_memory=is_cuda)
        numbers.numpy()[:] = blocks
        on_device = torch.empty(count, dtype=torch.int32, device=self._device)
        read_words(numbers, on_device, count)
        sums = torch.zeros(count, dtype=torch.int64, device=self._device)
        page_sums_kernel[count, len(self._rows)](
            self._words, self._places, on_device, self._row_weights, self._column_weights, sums,
            self._page_words, page_stride=self._words.stride(0),
            whole_rows=self._page_words % COLUMNS == 0, columns=COLUMNS, num_warps=4,
        )  # fmt: skip
        host = torch.empty(count, dtype=torch.int64, pin_memory=is_cuda)
        write_words(sums.view(torch.int32), host.view(torch.int32), 2 * count)
        return BlockSums(host, (numbers, on_device, sums))

    def _on_host(self, blocks: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        sums = torch.empty(len(blocks), dtype=torch.int64)
        found = sums.numpy().view(np.uint64)
        for place, block in enumerate(blocks):
            words = np.concatenate([rows[block].numpy().view(np.uint32) for rows in self._rows])
            found[place] = (words * self._weights).sum()
        return sums
