"""Copies between host records and the pages of one layer, by runs of neighbours.

A record is one block over all layers, `[layer][K,V][token][kv head][head size]`. So one strided
copy takes a layer out of a run of neighbouring records and puts it into a run of neighbouring
blocks: at the link's speed, and without a kernel. Many runs go by way of a slab.

On a CPU numpy copies at once, on any thread. On a GPU copies are queued on the current stream;
device thread.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from interlace.engine.errors import ConnectorError
from interlace.layers.device_copies import to_device

SLAB_BYTES = 32 << 20
"""One layer of 512 blocks of 64 KiB."""
_MOST_STRIDED_RUNS = 16
"""Beyond it, strided copies are slower than a slab and one kernel."""

Run: TypeAlias = tuple[int, int, int]
"""(first record, first block, number of blocks): neighbours on both sides."""


class CopyWay(enum.Enum):
    """How a layer was copied."""

    STRIDED = enum.auto()
    """One two-dimensional copy for each run."""
    SLAB = enum.auto()
    """A copy to or from a contiguous slab for each run of records; one kernel for the pages."""
    PLAIN = enum.auto()
    """torch's copy for each run: where `cuda.bindings` is missing."""


class Copied(NamedTuple):
    """What one call copied."""

    way: CopyWay
    num_copies: int
    """Kernels are not counted."""
    num_bytes: int


class Memcpy2D(Protocol):
    """Strided copies of rows between host and device."""

    def current_stream(self) -> int:
        """A handle of the stream on which to queue."""
        ...

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        """Queue `height` rows of `width` bytes. Raises: `ConnectorError`."""
        ...


class Runs:
    """Runs that fit the records and the pages, for use with any layer: see `PageCopies.prepare`."""

    def __init__(self, runs: Sequence[Run], num_blocks: int, way: CopyWay) -> None:
        self.runs = runs
        self.num_blocks = num_blocks
        self.way = way
        """How each layer is copied."""
        self.copied: Copied | None = None
        """What a copy of one layer comes to, since the first one."""
        self.slab_parts: list[_SlabPart] | None = None
        """Made when a slab is first used."""


class _SlabPart(NamedTuple):
    """What fits into the slab at once."""

    records: list[Run]
    """(first record, first row of the slab, number of rows)."""
    block_ids: torch.Tensor
    """int64, of each row, on the device."""
    slab: torch.Tensor
    """Those rows, as wide numbers."""


class _Rows(NamedTuple):
    """Where rows of bytes lie."""

    address: int
    pitch: int
    """Bytes from one to the next."""

    @classmethod
    def of(cls, rows: torch.Tensor) -> _Rows:
        """The rows of uint8 [rows, ...]."""
        return cls(rows.data_ptr(), rows.stride(0))


class PageCopies:
    """Copies for one lane: what is queued with one of these stays in order."""

    def __init__(
        self,
        records: torch.Tensor,
        layers: Sequence[torch.Tensor],
        *,
        memcpy: Memcpy2D | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """`records`: uint8 [num_records, num_layers, page_bytes], contiguous, pinned for a GPU.

        `layers`: pages [num_blocks, ...] in order of depth, each block's contiguous; blocks may lie
        further apart. `memcpy` is for pages on a GPU, or for tests: None takes the driver's
        copies if they can be had. With it, a slab of `slab_bytes`, one page at least, is allocated.

        Raises: `ConnectorError` for pages or records of another layout.
        """
        self._rows = [_page_rows(i, pages) for i, pages in enumerate(layers)]
        _check_records(records, self._rows)
        self._records = records
        self._num_blocks, self._page_bytes = (int(n) for n in self._rows[0].shape)
        device = self._rows[0].device
        self._is_host = device.type == "cpu" and memcpy is None
        if self._is_host:
            self._host_records = records.numpy()
            self._host_rows = [rows.numpy() for rows in self._rows]
            return
        self._memcpy = memcpy or cuda_memcpy_2d(device)
        # Asked once: a tensor takes longer to tell than a copy to queue.
        self._record_rows = _Rows.of(records)
        self._layer_rows = [_Rows.of(rows) for rows in self._rows]
        if self._memcpy is not None:
            num_rows = max(1, min(slab_bytes // self._page_bytes, self._num_blocks))
            self._slab = torch.empty((num_rows, self._page_bytes), dtype=torch.uint8, device=device)
            self._slab_rows = _Rows.of(self._slab)
            self._wide = _widest(self._rows)

    @property
    def num_layers(self) -> int:
        """Layers with pages."""
        return len(self._rows)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self._page_bytes

    def prepare(self, runs: Sequence[Run]) -> Runs:
        """Check runs, once for all layers. Raises: `ConnectorError` for what lies outside."""
        num_blocks = num_record_runs = 0
        end = -1
        for record, block, count in runs:
            fits_records = record >= 0 and record + count <= len(self._records)
            if count < 1 or not fits_records or block < 1 or block + count > self._num_blocks:
                raise ConnectorError(
                    f"a copy of {count} blocks between record {record} and block {block} does not"
                    f" fit {len(self._records)} records and blocks 1 to {self._num_blocks - 1}:"
                    " mend the connector's scheduler side."
                )
            num_blocks += count
            num_record_runs += record != end
            end = record + count
        return Runs(runs, num_blocks, self._way_of(len(runs), num_record_runs))

    def _way_of(self, num_runs: int, num_record_runs: int) -> CopyWay:
        if not self._is_host and self._memcpy is None:
            return CopyWay.PLAIN
        is_slab = num_runs > _MOST_STRIDED_RUNS and 2 * num_record_runs <= num_runs
        return CopyWay.SLAB if is_slab and not self._is_host else CopyWay.STRIDED

    def load(self, layer: int, runs: Runs) -> Copied:
        """From records into the pages of `layer`. Raises: `ConnectorError` if CUDA refuses."""
        return self._copy(layer, runs, to_pages=True)

    def save(self, layer: int, runs: Runs) -> Copied:
        """From the pages of `layer` into records. Raises: as `load`."""
        return self._copy(layer, runs, to_pages=False)

    def _copy(self, layer: int, runs: Runs, *, to_pages: bool) -> Copied:
        if self._is_host:
            self._copy_on_host(layer, runs, to_pages=to_pages)
        elif self._memcpy is None:
            self._copy_plainly(layer, runs, to_pages=to_pages)
        elif runs.way is CopyWay.SLAB:
            self._copy_by_slab(self._memcpy, layer, runs, to_pages=to_pages)
        else:
            self._queue(self._memcpy, layer, self._layer_rows[layer], runs.runs, to_pages=to_pages)
        return runs.copied or self._note_copied(runs)

    def _note_copied(self, runs: Runs) -> Copied:
        parts = runs.slab_parts
        num_copies = len(runs.runs) if parts is None else sum(len(part.records) for part in parts)
        runs.copied = Copied(runs.way, num_copies, runs.num_blocks * self._page_bytes)
        return runs.copied

    def _copy_on_host(self, layer: int, runs: Runs, *, to_pages: bool) -> None:
        records, pages = self._host_records, self._host_rows[layer]
        for record, block, count in runs.runs:
            kept, page = records[record : record + count, layer], pages[block : block + count]
            if to_pages:
                page[:] = kept
            else:
                kept[:] = page

    def _copy_plainly(self, layer: int, runs: Runs, *, to_pages: bool) -> None:
        pages = self._rows[layer]
        with torch.inference_mode():
            for record, block, count in runs.runs:
                kept = self._records[record : record + count, layer]
                page = pages[block : block + count]
                target, source = (page, kept) if to_pages else (kept, page)
                target.copy_(source, non_blocking=True)

    def _queue(
        self,
        memcpy: Memcpy2D,
        layer: int,
        rows: _Rows,
        runs: Sequence[Run],
        *,
        to_pages: bool,
    ) -> None:
        """Strided copies between the layer's part of records and rows of bytes on the device."""
        width, (records_at, pitch), (rows_at, row_pitch) = self._page_bytes, self._record_rows, rows
        records_at += layer * width
        stream = memcpy.current_stream()
        for record, row, count in runs:
            host, device = records_at + record * pitch, rows_at + row * row_pitch
            if to_pages:
                memcpy.copy(device, row_pitch, host, pitch, width, count, stream, to_device=True)
            else:
                memcpy.copy(host, pitch, device, row_pitch, width, count, stream, to_device=False)

    def _copy_by_slab(self, memcpy: Memcpy2D, layer: int, runs: Runs, *, to_pages: bool) -> None:
        rows = self._wide[layer]
        if runs.slab_parts is None:
            runs.slab_parts = self._slab_parts(runs.runs, rows.dtype)
        with torch.inference_mode():
            for part in runs.slab_parts:
                if to_pages:
                    self._queue(memcpy, layer, self._slab_rows, part.records, to_pages=True)
                    rows.index_copy_(0, part.block_ids, part.slab)
                else:
                    torch.index_select(rows, 0, part.block_ids, out=part.slab)
                    self._queue(memcpy, layer, self._slab_rows, part.records, to_pages=False)

    def _slab_parts(self, runs: Sequence[Run], dtype: torch.dtype) -> list[_SlabPart]:
        """Runs in pieces that fit into the slab; block ids are uploaded on the current stream."""
        parts: list[_SlabPart] = []
        for piece in cut_runs(runs, len(self._slab)):
            ids = np.concatenate([np.arange(block, block + n) for _, block, n in piece])
            uploaded = to_device(ids, torch.int64, self._slab.device)
            slab = self._slab[: len(ids)].view(dtype)
            parts.append(_SlabPart(_merged_records(piece), uploaded, slab))
        return parts


def cut_runs(runs: Sequence[Run], most_blocks: int) -> list[list[Run]]:
    """The same runs, in order, in lists of at most `most_blocks` blocks, all full but the last."""
    pieces: list[list[Run]] = []
    room = 0
    for record, block, count in runs:
        done = 0
        while done < count:
            if not room:
                pieces.append([])
                room = most_blocks
            taken = min(count - done, room)
            pieces[-1].append((record + done, block + done, taken))
            done, room = done + taken, room - taken
    return pieces


def _merged_records(runs: Sequence[Run]) -> list[Run]:
    """(first record, first row, rows), one row a block, with neighbouring records in one."""
    merged: list[Run] = []
    row = 0
    for record, _, count in runs:
        if merged and merged[-1][0] + merged[-1][2] == record:
            first, first_row, rows = merged[-1]
            merged[-1] = (first, first_row, rows + count)
        else:
            merged.append((record, row, count))
        row += count
    return merged


class _CudaMemcpy2D:
    """`cudaMemcpy2DAsync`."""

    def __init__(self, runtime: Any, device: torch.device) -> None:
        self._copy = runtime.cudaMemcpy2DAsync
        self._forget_error = runtime.cudaGetLastError
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._device_index = torch.cuda.current_device() if device.index is None else device.index

    def current_stream(self) -> int:
        """See `Memcpy2D`. Without the object that `torch.cuda.current_stream` makes each time."""
        return torch._C._cuda_getCurrentRawStream(self._device_index)

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        """See `Memcpy2D`."""
        kind = self._to_device if to_device else self._to_host
        (code,) = self._copy(
            target, target_pitch, source, source_pitch, width, height, kind, stream
        )
        if int(code) != 0:
            self._forget_error()  # else whoever asks next would be told of it
            raise ConnectorError(
                f"cudaMemcpy2DAsync of {height} rows of {width} bytes failed with"
                f" {getattr(code, 'name', code)}: are the records pinned, and is the device well?"
            )


def cuda_memcpy_2d(device: torch.device) -> Memcpy2D | None:
    """The driver's strided copies; None if `cuda.bindings` cannot be imported."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return _CudaMemcpy2D(runtime, device)


def _page_rows(layer: int, pages: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, [num_blocks, page_bytes]. Raises: `ConnectorError`."""
    is_block_first = pages.ndim >= 2 and len(pages) > 0 and pages[0].is_contiguous()
    if not is_block_first or pages.stride(0) < pages[0].numel():
        raise ConnectorError(
            f"pages of layer {layer} have shape {tuple(pages.shape)} and strides {pages.stride()},"
            " but records hold blocks as contiguous pages [K,V][token][kv head][head size] do: ask"
            " for the layout 'NHD'."
        )
    return pages.detach().view(torch.uint8).view(len(pages), -1)


def _check_records(records: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    shapes = {tuple(layer.shape) for layer in rows}
    if len(shapes) != 1 or len({layer.device for layer in rows}) != 1:
        raise ConnectorError(
            f"layers have pages of {sorted(shapes)} (blocks, bytes a block): records hold layers"
            " that are alike and on one device. Leave other layers out."
        )
    ((_, page_bytes),) = shapes
    wanted = (len(rows), page_bytes)
    is_right = records.ndim == 3 and tuple(records.shape[1:]) == wanted and len(records) > 0
    if not is_right or records.dtype != torch.uint8 or not records.is_contiguous():
        raise ConnectorError(
            f"records have shape {tuple(records.shape)} and type {records.dtype}; these pages need"
            f" contiguous torch.uint8 [records, {wanted[0]}, {wanted[1]}]: allocate them for this"
            " model."
        )
    if records.device.type != "cpu":
        raise ConnectorError(f"records lie on {records.device}: allocate them in host memory.")


def _widest(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As numbers of eight bytes, which the device moves as fast as one; as they are where one of
    them does not lie so."""
    for rows in layers:
        offset, pitch, width = rows.storage_offset(), rows.stride(0), rows.shape[1]
        if any(number % 8 for number in (offset, pitch, width, rows.data_ptr())):
            return list(layers)
    return [rows.view(torch.int64) for rows in layers]
