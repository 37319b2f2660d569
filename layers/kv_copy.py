"""Copies KV blocks between the pages and host buffers: the engine's `CopyBlocksOp`.

The engine hands `copy_kv_blocks` to a connector that stages through host memory
(`set_host_xfer_buffer_ops`). In CPU memory numpy copies, so any thread may call it; who does so
from another thread than the device's sees to it that no step uses the blocks. Pages on a GPU are
copied by torch, on the device thread and in the order of its current stream: after the kernels that
were queued before, and layer by layer, so that copies take the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from interlace.engine.errors import ConnectorError
from interlace.layers.device_copies import to_device
from interlace.layers.kv_memory import zeroed

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numbers are copied as integers of their size: numpy has no bfloat16."""


def copy_kv_blocks(
    src_kv_caches: dict[str, torch.Tensor],
    dst_kv_caches: dict[str, torch.Tensor],
    src_block_ids: list[int],
    dst_block_ids: list[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copy block `src_block_ids[i]` to block `dst_block_ids[i]`, for each i, in every layer.

    Both dicts go by layer name and have the same names. Their tensors have the block dimension
    first, in any number and with any strides, and behind it the same shape. `direction` is "h2d"
    from host buffers to pages, "d2h" from pages to host buffers. Complete when it returns.

    Raises: `ConnectorError`, before anything is copied, if the arguments do not fit together.
    """
    if direction not in ("h2d", "d2h"):
        raise _error(f"has no direction {direction!r}; say 'h2d' (to the pages) or 'd2h'")
    if len(src_block_ids) != len(dst_block_ids):
        raise _error(
            f"got {len(src_block_ids)} source blocks and {len(dst_block_ids)} targets; "
            "give one target for each source"
        )
    _check_tensors(src_kv_caches, dst_kv_caches)
    _check_ids(src_kv_caches, src_block_ids, "source")
    _check_ids(dst_kv_caches, dst_block_ids, "target")
    if not src_block_ids:
        return
    for name, src in src_kv_caches.items():
        _copy(src, dst_kv_caches[name], src_block_ids, dst_block_ids)


def _copy(
    src: torch.Tensor, dst: torch.Tensor, src_block_ids: list[int], dst_block_ids: list[int]
) -> None:
    if src.device.type == dst.device.type == "cpu":
        _bits(dst)[dst_block_ids] = _bits(src)[src_block_ids]
        return
    source = to_device(src_block_ids, torch.int64, src.device)
    target = to_device(dst_block_ids, torch.int64, dst.device)
    dst.index_copy_(0, target, src.index_select(0, source).to(dst.device))
    if dst.device.type == "cuda":
        torch.cuda.current_stream(dst.device).synchronize()


def host_buffers(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """For each layer a zeroed CPU tensor of its shape and dtype, but with `num_blocks` blocks.

    They are contiguous in the logical order, whatever the layout of `kv_caches`, and take memory
    only where they are written to.

    Raises: `ConnectorError` for less than one block; `MemoryError`.
    """
    if num_blocks < 1:
        raise ConnectorError(f"host_buffers was asked for {num_blocks} blocks; ask for 1 or more.")
    return {
        name: zeroed((num_blocks, *pages.shape[1:]), pages.dtype)
        for name, pages in kv_caches.items()
    }


def _error(what: str) -> ConnectorError:
    return ConnectorError(f"copy_kv_blocks {what}.")


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The same memory, as numpy has it."""
    bits: np.ndarray[Any, np.dtype[Any]] = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


def _check_tensors(src: Mapping[str, torch.Tensor], dst: Mapping[str, torch.Tensor]) -> None:
    if src.keys() != dst.keys():
        names = ", ".join(sorted(src.keys() ^ dst.keys()))
        raise _error(f"got layers of one side alone ({names}); give both sides the same layers")
    for name, tensor in src.items():
        here, there = _kind(tensor), _kind(dst[name])
        if here != there:
            raise _error(
                f"got blocks of {here} and of {there} for {name}; make host buffers with "
                "host_buffers(), and copy KV of unlike workers apart"
            )
        for side in (tensor, dst[name]):
            if side.device.type not in ("cpu", "cuda"):
                raise _error(
                    f"copies in CPU and CUDA memory; {name} lies on {side.device}: move it there"
                )


def _kind(tensor: torch.Tensor) -> str:
    """What two tensors must have in common."""
    return f"shape {list(tensor.shape[1:])} and {tensor.dtype}"


def _check_ids(kv_caches: Mapping[str, torch.Tensor], ids: Sequence[int], side: str) -> None:
    for name, tensor in kv_caches.items():
        wrong = next((i for i in ids if not 0 <= i < len(tensor)), None)
        if wrong is not None:
            raise _error(
                f"got {side} block {wrong}, but {name} has blocks 0 to {len(tensor) - 1} there; "
                "give ids of the side that they belong to"
            )
