"""Copies blocks between a layer's pages and host memory, as bytes. Device thread only.

On a CPU with numpy, which starts no threads of its own; elsewhere with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from interlace.connectors.kv_folders.tensor_file import ByteArray
from interlace.engine.errors import ConnectorError


class LayerPages(Protocol):
    """One layer's pages, block by block."""

    block_shape: tuple[int, ...]
    """(2, block_size, kv heads, head size)."""
    block_bytes: int
    dtype: str

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """Copy these blocks to `rows`, [len(block_ids), block_bytes], contiguous."""
        ...

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """Fill these blocks from `rows`, [len(block_ids), block_bytes]."""
        ...


def layer_pages(layer_name: str, pages: torch.Tensor) -> LayerPages:
    """Pages [num_blocks, 2, block_size, kv heads, head size], contiguous.

    Raises: `ConnectorError` for any other layout: what was stored would be read as what it is not.
    """
    if pages.ndim != 5 or pages.shape[1] != 2 or not pages.is_contiguous():
        raise ConnectorError(
            f"register_kv_caches: {layer_name} has shape {tuple(pages.shape)} and strides"
            f" {pages.stride()}; KV folders hold contiguous pages"
            " [block][K,V][token][kv head][head size] only."
        )
    return HostPages(pages) if pages.device.type == "cpu" else DevicePages(pages)


class _Pages:
    def __init__(self, pages: torch.Tensor) -> None:
        self.block_shape = tuple(pages.shape[1:])
        self.dtype = str(pages.dtype).removeprefix("torch.")
        self._rows = pages.detach().view(torch.uint8).view(pages.shape[0], -1)
        self.block_bytes = self._rows.shape[1]


class HostPages(_Pages):
    """Pages in host memory."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__(pages)
        self._array: ByteArray = self._rows.numpy()

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        # `clip` writes straight into `out`; the default mode copies twice.
        np.take(self._array, block_ids, axis=0, out=rows, mode="clip")

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        self._array[np.asarray(block_ids)] = rows


class DevicePages(_Pages):
    """Pages anywhere."""

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        torch.from_numpy(rows).copy_(self._rows[self._ids(block_ids)])

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        self._rows[self._ids(block_ids)] = torch.from_numpy(rows).to(self._rows.device)

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, device=self._rows.device)
