"""The pages of one layer as bits, wherever they are."""

from __future__ import annotations

import torch

from interlace.connectors.conformance.number_format import Bits, format_of


class LayerPages:
    """Of one worker, [num_blocks, ...], with any strides.

    In a CPU's memory what is returned are views, which show what is written later. From a GPU it is
    copied, when all that was queued on any of its streams has ended. The thread of the scenario.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        self.shape = tuple(pages.shape)
        self._bits = pages.view(format_of(pages.dtype).torch_bits)
        self._host: Bits | None = None if pages.is_cuda else self._bits.numpy()

    def all(self) -> Bits:
        """Those of all blocks, in the logical order of dimensions. To be read only."""
        return _copied(self._bits) if self._host is None else self._host

    def block(self, block_id: int) -> Bits:
        """Those of one block. To be read only."""
        return _copied(self._bits[block_id]) if self._host is None else self._host[block_id]

    def fill(self, block_id: int, bits: int) -> None:
        """Write the same everywhere in one block; on a GPU on the current stream."""
        if self._host is None:
            self._bits[block_id].fill_(bits)
        else:
            self._host[block_id] = bits

    def put(self, block_id: int, bits: Bits) -> None:
        """Write one block; on a GPU it is in place when this returns."""
        if self._host is None:
            self._bits[block_id].copy_(torch.from_numpy(bits))
        else:
            self._host[block_id] = bits


def _copied(bits: torch.Tensor) -> Bits:
    torch.cuda.synchronize(bits.device)
    host: Bits = bits.cpu().numpy()
    return host
