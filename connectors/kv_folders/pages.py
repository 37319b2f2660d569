"""Copies blocks between a layer's pages and host memory, as bytes. Device thread only.

On a CPU with numpy, which starts no threads of its own. On a GPU copies are queued on the current
stream, behind the kernels that wrote the pages and before those that read them, by way of pinned
memory: the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from interlace.connectors.kv_folders.tensor_file import ByteArray
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Gate
from interlace.layers.cuda_lanes import CudaLanes
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.device_copies import to_device


class LayerPages(Protocol):
    """One layer's pages, block by block."""

    block_shape: tuple[int, ...]
    """(2, block_size, kv heads, head size)."""
    block_bytes: int
    dtype: str

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """Copy these blocks to `rows`, [len(block_ids), block_bytes], contiguous.

        They are there, and may be let go of, when a gate of `copied` has opened.
        """
        ...

    def copied(self) -> Gate:
        """A gate that opens when all that was read so far is in its rows, of whatever layer."""
        ...

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """Fill these blocks from `rows`, [len(block_ids), block_bytes], before anything that is
        queued later. The rows may change as soon as it returns."""
        ...

    def staging(self, num_bytes: int) -> ByteArray:
        """Fresh memory that `read` fills without making the host wait."""
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


class _Open:
    """A gate of what has ended already."""

    error = None

    def query(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


class HostPages(_Pages):
    """Pages in host memory."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__(pages)
        self._array: ByteArray = self._rows.numpy()

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        # `clip` writes straight into `out`; the default mode copies twice.
        np.take(self._array, block_ids, axis=0, out=rows, mode="clip")

    def copied(self) -> Gate:
        """See `LayerPages`: at once."""
        return _Open()

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        self._array[np.asarray(block_ids)] = rows

    def staging(self, num_bytes: int) -> ByteArray:
        """See `LayerPages`."""
        return np.empty(num_bytes, dtype=np.uint8)


class DevicePages(_Pages):
    """Pages anywhere; those of `copied` and `staging` on a GPU."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__(pages)
        # The device moves eight bytes as fast as one.
        is_wide = self.block_bytes % 8 == 0
        self._numbers = self._rows.view(torch.int64) if is_wide else self._rows

    def read(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        found = self._numbers.index_select(0, self._ids(block_ids))
        # Into memory that is not pinned, the driver returns when it has copied.
        torch.from_numpy(rows).copy_(found.view(torch.uint8), non_blocking=True)

    def copied(self) -> Gate:
        """See `LayerPages`."""
        return CudaLanes(CudaStreams(self._rows.device)).compute.record()

    def write(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """See `LayerPages`."""
        uploaded = to_device(rows, torch.uint8, self._rows.device)
        self._numbers.index_copy_(0, self._ids(block_ids), uploaded.view(self._numbers.dtype))

    def staging(self, num_bytes: int) -> ByteArray:
        """See `LayerPages`."""
        memory: ByteArray = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return to_device(block_ids, torch.int64, self._rows.device)
