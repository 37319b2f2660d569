"""Copies between host records and the pages of one layer, by runs of neighbours.

A record is one block over all layers, `[layer][K,V][token][kv head][head size]`. So one strided
copy takes a layer out of a run of neighbouring records and puts it into a run of neighbouring
blocks: at the link's speed, and without a kernel. A driver may take many such copies in one call.
Where runs are many and short, one kernel copies them all, or the driver does in one call, block by
block: that takes longer to queue, and leaves the multiprocessors alone.

On a CPU numpy copies at once, on any thread. On a GPU copies are queued on the current stream;
device thread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.engine.errors import ConnectorError
from interlace.layers.cuda_copies import (
    Addresses,
    Memcpy2D,
    Memcpy2DBatch,
    MemcpyBatch,
    Operations,
    StridedRows,
    cuda_memcpy_2d,
    cuda_memcpy_2d_batch,
    cuda_memcpy_batch,
)
from interlace.layers.page_runs import expand_runs
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    from interlace.layers.kernels.page_gather import PageGather, Pairs

MOST_STRIDED_RUNS = 4
"""So few are copied strided, however short they are: the host is no longer at it."""
STRIDED_RUN_BYTES = 1 << 20
"""Runs of so much of a layer, or more, on average, are copied strided too, and shorter ones by the
kernel: for those it is faster, and takes the host less time. The kernel slows down what computes
beside it (matrix products by a quarter), which copies do not."""

Run: TypeAlias = tuple[int, int, int]
"""(first record, first block, number of blocks): neighbours on both sides."""
BATCHED_RUN_BLOCKS = 10
"""Runs of so many blocks, on average, had better be copied strided than block by block in a batch:
one strided copy takes the host as long as eight to ten of a batch."""
STRIDED_BATCH_RUN_BLOCKS = 6
"""The same where strided copies come in a batch too: one takes the host as long as three of the
other batch. Where runs are shorter, those are faster: they come to 39 to 52 GB/s, and strided ones
to 34 with runs of 4 blocks of 64 KiB, and 42 with 8 (an NVIDIA H200)."""
LEAST_STRIDED_BATCH = 10
"""So many strided copies, or more, are queued in one call. That takes the host 30 to 60 us, as long
as about ten single ones, and where they are very many less than 2 us for each (an NVIDIA H200)."""
BATCHED_PAGE_BYTES = 32 << 10
"""Smaller pages are copied by the kernel: a batch would copy them far below the link's speed."""


class CopyWay(enum.Enum):
    """How a layer was copied."""

    STRIDED = enum.auto()
    """One two-dimensional copy for each run; many may be queued in one call."""
    GATHER = enum.auto()
    """One kernel for all runs."""
    BATCH = enum.auto()
    """One call for all blocks, which copy engines copy one by one."""


class Copied(NamedTuple):
    """What one call copied."""

    way: CopyWay
    num_copies: int
    """That were queued: a kernel counts as one."""
    num_bytes: int


class Runs:
    """Runs that fit the records and the pages, for use with any layer: see `PageCopies.prepare`.

    Kept until what was queued with it has ended.
    """

    def __init__(self, runs: Sequence[Run], num_blocks: int, way: CopyWay) -> None:
        self.runs = runs
        self.num_blocks = num_blocks
        self.way = way
        """How each layer is copied."""
        self.copied: Copied | None = None
        """What a copy of one layer comes to, since the first one."""
        self.pairs: Pairs | None = None
        """On the device, since the first copy by the kernel."""
        self.places: NDArray[np.uint64] | None = None
        """[(record, block), blocks], since the first copy in a batch."""
        self.operations: dict[bool, Operations] = {}
        """Whether to pages -> [layers, runs], since the first strided batch in that direction."""


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
        records: torch.Tensor | RecordSpace,
        layers: Sequence[torch.Tensor],
        *,
        memcpy: Memcpy2D | None = None,
        batch: MemcpyBatch | None = None,
        strided_batch: Memcpy2DBatch | None = None,
        most_strided_runs: int = MOST_STRIDED_RUNS,
        strided_run_bytes: int = STRIDED_RUN_BYTES,
    ) -> None:
        """`records`: uint8 [num_records, num_layers, page_bytes], contiguous, pinned for a GPU; or
        such records with others beside them, that are only loaded from.

        `layers`: pages [num_blocks, ...] in order of depth, each block's contiguous; blocks may lie
        further apart. `memcpy` is for pages on a GPU, or for tests: None takes the driver's
        copies if they can be had. More runs than `most_strided_runs` are copied by the kernel
        if they are shorter, on average, than `strided_run_bytes` of a layer.
        It is compiled here, which may wait for the device. With `batch` they are copied by that in
        place of the kernel. With `strided_batch` many strided copies are one call. Who gives a
        batch copies on a stream that is not the default one.

        Raises: `ConnectorError` for pages or records of another layout, and for a GPU for which
        neither the driver's copies nor kernels can be had.
        """
        self._rows = [_page_rows(i, pages) for i, pages in enumerate(layers)]
        space = self._space = RecordSpace.over(records)
        _check_records(space.host, self._rows)
        self._num_blocks, self._page_bytes = (int(n) for n in self._rows[0].shape)
        self._most_strided_runs = most_strided_runs
        self._strided_run_bytes = strided_run_bytes
        device = self._rows[0].device
        self._is_host = device.type == "cpu" and memcpy is None
        self._strided_batch = None if self._is_host else strided_batch
        if self._is_host:
            self._host_rows = [rows.numpy() for rows in self._rows]
            return
        self._memcpy = memcpy or cuda_memcpy_2d(device)
        self._batch = batch
        # Asked once: a tensor takes longer to tell than a copy to queue.
        self._record_pitch = space.host.stride(0)
        self._layer_rows = [_Rows.of(rows) for rows in self._rows]
        self._layers_at, self._layer_pitches = np.array(self._layer_rows, np.uint64).T
        self._gather = _page_gather(space, self._rows)
        if self._memcpy is None and self._gather is None:
            raise ConnectorError(
                f"nothing here copies KV between host memory and {device}: install cuda-bindings,"
                " or Triton."
            )

    @classmethod
    def within_steps(
        cls, records: torch.Tensor | RecordSpace, layers: Sequence[torch.Tensor]
    ) -> Self:
        """For what a step waits for: by the kernel where that is faster. On a stream that is not
        the default one.

        See the constructor. Waits for the device.
        """
        return cls(records, layers, strided_batch=_strided_batch(layers))

    @classmethod
    def beside_compute(
        cls, records: torch.Tensor | RecordSpace, layers: Sequence[torch.Tensor]
    ) -> Self:
        """For what goes on while others compute: by copy engines, if the driver can do it. On a
        stream that is not the default one.

        See the constructor. Waits for the device.
        """
        page_bytes = RecordSpace.over(records).host.shape[-1]
        strided_batch, batch = _strided_batch(layers), None
        if _are_on_cuda(layers) and page_bytes >= BATCHED_PAGE_BYTES:
            batch = cuda_memcpy_batch(layers[0].device)
        if batch is None:
            return cls(records, layers, strided_batch=strided_batch, most_strided_runs=0)
        run_blocks = BATCHED_RUN_BLOCKS if strided_batch is None else STRIDED_BATCH_RUN_BLOCKS
        return cls(
            records,
            layers,
            batch=batch,
            strided_batch=strided_batch,
            most_strided_runs=0,
            strided_run_bytes=run_blocks * page_bytes,
        )

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
        num_blocks = 0
        for record, block, count in runs:
            fits_records = self._space.holds(record, count)
            if count < 1 or not fits_records or block < 1 or block + count > self._num_blocks:
                raise ConnectorError(
                    f"a copy of {count} blocks between record {record} and block {block} does not"
                    f" fit {self._space.num_host_records} records and blocks 1 to"
                    f" {self._num_blocks - 1}, or what is mapped beside these:"
                    " mend the connector's scheduler side."
                )
            num_blocks += count
        return Runs(runs, num_blocks, self._way_of(len(runs), num_blocks))

    def _way_of(self, num_runs: int, num_blocks: int) -> CopyWay:
        if self._is_host or (self._gather is None and self._batch is None):
            return CopyWay.STRIDED
        is_few = num_runs <= self._most_strided_runs
        are_long = num_blocks * self._page_bytes >= num_runs * self._strided_run_bytes
        if self._memcpy is not None and (is_few or are_long):
            return CopyWay.STRIDED
        return CopyWay.GATHER if self._batch is None else CopyWay.BATCH

    def load(self, layer: int, runs: Runs) -> Copied:
        """From records into the pages of `layer`. Raises: `ConnectorError` if CUDA refuses."""
        return self._copy(layer, runs, to_pages=True)

    def save(self, layer: int, runs: Runs) -> Copied:
        """From the pages of `layer` into records. Raises: as `load`."""
        return self._copy(layer, runs, to_pages=False)

    def load_layers(self, layers: range, runs: Runs) -> Iterator[Copied]:
        """From records into the pages of these layers, one after the other; by one kernel, or in
        one batch, where that is the way. Of several layers, each copy is queued as it is asked for.
        Raises: as `load`.
        """
        if len(layers) == 1:
            return iter((self.load(layers[0], runs),))
        if self._are_single(len(layers), runs):
            return (self.load(layer, runs) for layer in layers)
        return self._copy_layers(layers, runs, to_pages=True)

    def save_layers(self, layers: range, runs: Runs) -> Iterator[Copied]:
        """From the pages of these layers into records, likewise."""
        if self._are_single(len(layers), runs):
            return (self.save(layer, runs) for layer in layers)
        return self._copy_layers(layers, runs, to_pages=False)

    def _are_single(self, num_layers: int, runs: Runs) -> bool:
        """Whether copies of so many layers are queued one by one."""
        if runs.way is not CopyWay.STRIDED:
            return False
        return self._strided_batch is None or num_layers * len(runs.runs) < LEAST_STRIDED_BATCH

    def _copy_layers(self, layers: range, runs: Runs, *, to_pages: bool) -> Iterator[Copied]:
        if runs.way is CopyWay.STRIDED:
            self._copy_in_strided_batch(layers, runs, to_pages=to_pages)
        elif runs.way is CopyWay.BATCH:
            self._copy_in_batch(layers, runs, to_pages=to_pages)
        elif runs.runs:
            gather, pairs = self._prepared(runs)
            gather.copy_layers(layers, pairs, loads=to_pages)
        yield self._copied(runs, len(layers))

    def _copy_in_batch(self, layers: range, runs: Runs, *, to_pages: bool) -> None:
        assert self._batch is not None, "this way is not chosen without it"
        if not runs.runs:
            return
        if runs.places is None:
            runs.places = expand_runs(runs.runs).astype(np.uint64).T
        targets, sources = self._sides(layers, *runs.places, to_pages=to_pages)
        self._batch.copy(targets.addresses.ravel(), sources.addresses.ravel(), self._page_bytes)

    def _copy_in_strided_batch(self, layers: range, runs: Runs, *, to_pages: bool) -> None:
        assert self._strided_batch is not None, "this is not chosen without it"
        operations = runs.operations.get(to_pages)
        if operations is None:  # of all layers: a group at a time would take the host longer
            records, blocks, counts = np.array(runs.runs, np.uint64).T
            sides = self._sides(range(self.num_layers), records, blocks, to_pages=to_pages)
            operations = self._strided_batch.prepare(*sides, self._page_bytes, counts)
            runs.operations[to_pages] = operations
        self._strided_batch.queue(operations[layers.start : layers.stop])

    def _sides(
        self, layers: range, records: Addresses, blocks: Addresses, *, to_pages: bool
    ) -> tuple[StridedRows, StridedRows]:
        """(targets, sources) of copies that begin at these records and blocks: [layers, copies]."""
        chosen = np.arange(layers.start, layers.stop, dtype=np.uint64)[:, None]
        host = self._space.addresses(records) + chosen * np.uint64(self._page_bytes)
        pages_at, pitches = (
            numbers[layers.start : layers.stop, None]
            for numbers in (self._layers_at, self._layer_pitches)
        )
        kept = StridedRows(host, self._record_pitch)
        pages = StridedRows(pages_at + blocks * pitches, pitches)
        return (pages, kept) if to_pages else (kept, pages)

    def _copy(self, layer: int, runs: Runs, *, to_pages: bool) -> Copied:
        if self._is_host:
            self._copy_on_host(layer, runs, to_pages=to_pages)
        elif runs.way is CopyWay.GATHER:
            self._copy_by_kernel(layer, runs, to_pages=to_pages)
        elif runs.way is CopyWay.BATCH:
            self._copy_in_batch(range(layer, layer + 1), runs, to_pages=to_pages)
        elif self._are_single(1, runs):
            self._copy_strided(layer, runs.runs, to_pages=to_pages)
        else:
            self._copy_in_strided_batch(range(layer, layer + 1), runs, to_pages=to_pages)
        if runs.copied is None:
            runs.copied = self._copied(runs, 1)
        return runs.copied

    def _copied(self, runs: Runs, num_layers: int) -> Copied:
        """What one call for so many layers comes to."""
        num_copies = {
            CopyWay.STRIDED: num_layers * len(runs.runs),
            CopyWay.GATHER: 1,
            CopyWay.BATCH: num_layers * runs.num_blocks,
        }[runs.way]
        return Copied(runs.way, num_copies, num_layers * runs.num_blocks * self._page_bytes)

    def _copy_on_host(self, layer: int, runs: Runs, *, to_pages: bool) -> None:
        pages = self._host_rows[layer]
        for record, block, count in runs.runs:
            kept = self._space.rows(record, count)[:, layer]
            page = pages[block : block + count]
            if to_pages:
                page[:] = kept
            else:
                kept[:] = page

    def _copy_by_kernel(self, layer: int, runs: Runs, *, to_pages: bool) -> None:
        if not runs.runs:
            return
        gather, pairs = self._prepared(runs)
        if to_pages:
            gather.load(layer, pairs)
        else:
            gather.save(layer, pairs)

    def _prepared(self, runs: Runs) -> tuple[PageGather, Pairs]:
        """The kernel, and the pairs of the runs, whose upload is queued by the first copy."""
        assert self._gather is not None, "this way is not chosen without it"
        if runs.pairs is None:
            runs.pairs = self._gather.pairs(runs.runs)
        return self._gather, runs.pairs

    def _copy_strided(self, layer: int, runs: Sequence[Run], *, to_pages: bool) -> None:
        memcpy, width = self._memcpy, self._page_bytes
        assert memcpy is not None, "this way is not chosen without it"
        pitch, behind = self._record_pitch, layer * width
        pages_at, page_pitch = self._layer_rows[layer]
        stream = memcpy.current_stream()
        for record, block, count in runs:
            host = self._space.address(record) + behind
            device = pages_at + block * page_pitch
            if to_pages:
                memcpy.copy(device, page_pitch, host, pitch, width, count, stream, to_device=True)
            else:
                memcpy.copy(host, pitch, device, page_pitch, width, count, stream, to_device=False)


def _are_on_cuda(layers: Sequence[torch.Tensor]) -> bool:
    return bool(layers) and layers[0].device.type == "cuda"


def _strided_batch(layers: Sequence[torch.Tensor]) -> Memcpy2DBatch | None:
    return cuda_memcpy_2d_batch(layers[0].device) if _are_on_cuda(layers) else None


def _page_gather(records: RecordSpace, rows: Sequence[torch.Tensor]) -> PageGather | None:
    """The kernel, if one can run where the pages lie. A process without a GPU imports none."""
    from interlace.layers.kernels import toolchain

    device = rows[0].device
    if not toolchain.runs_on(device):
        return None
    if device.type == "cuda" and not records.host.is_pinned():
        raise ConnectorError(
            f"records lie in memory that {device} cannot read: pin it, or register it with CUDA."
        )
    from interlace.layers.kernels.page_gather import PageGather

    return PageGather(records, rows)


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
