"""Pages of one layer between pinned host records and the device, however they lie: one kernel.

A copy engine takes about 3 us for each run of neighbours, which is as long as 160 KiB take on the
link. A kernel reads host memory itself, page by page, for as many runs as there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from interlace.layers.kernels.host_copies import read_words
from interlace.layers.kernels.toolchain import (
    Pointer,
    Scalar,
    constexpr,
    jit,
    next_power_of_2,
    tl,
)
from interlace.layers.page_runs import expand_runs
from interlace.layers.record_space import RecordSpace


@dataclasses.dataclass(frozen=True, slots=True)
class GatherTiles:
    """How the copying is shared out."""

    programs: int
    """Each keeps a place on a multiprocessor, which matrix products then lack."""
    tile_bytes: int
    """That a program asks for at a time, a power of two."""
    num_warps: int


GATHER_TILES = GatherTiles(programs=8, tile_bytes=32 << 10, num_warps=8)
"""256 KiB under way, eight times 16 bytes a thread. 55 GB/s over a link whose answers take 2 us
need 110 KiB at all times, and a program asks for nothing while it reads where its next page lies.
"""


@jit("num_tiles")
def page_gather_kernel(
    records: Pointer,
    pages: Pointer,
    pairs: Pointer,
    num_tiles: Scalar,
    page_stride: constexpr,
    page_words: constexpr,
    tile: constexpr,
    grain: constexpr,
    loads: constexpr,
) -> None:
    """Pages of one layer become those of records, or the other way round. Grid: any number.

    Pairs say where a record lies, in words behind `records`, and which block is its.

    Programs take tiles in turn, so that all of them read neighbouring host memory. Strides are in
    words, and records lie multiples of `grain` words apart. What was read is not read again, so it
    goes from the caches first.
    """
    tiles_per_page: constexpr = (page_words + tile - 1) // tile
    lane = tl.arange(0, tile)
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        pair = pairs + 2 * (i // tiles_per_page)
        record = tl.multiple_of(tl.load(pair), grain)
        block = tl.load(pair + 1)
        word = (i % tiles_per_page) * tile + lane
        inside = word < page_words
        kept = records + record + word
        page = pages + block * page_stride + word
        if loads:
            words = tl.load(kept, mask=inside, eviction_policy="evict_first")
            tl.store(page, words, mask=inside)
        else:
            words = tl.load(page, mask=inside, eviction_policy="evict_first")
            tl.store(kept, words, mask=inside)


@jit("num_tiles", "tiles_per_layer", "first_layer")
def record_gather_kernel(
    records: Pointer,
    pages: Pointer,
    places: Pointer,
    pairs: Pointer,
    num_tiles: Scalar,
    tiles_per_layer: Scalar,
    first_layer: Scalar,
    page_stride: constexpr,
    page_words: constexpr,
    tile: constexpr,
    grain: constexpr,
    loads: constexpr,
) -> None:
    """As `page_gather_kernel`, over several layers: those of whole records. Grid: any number.

    The pages of layer i lie `places[i]` words behind `pages`.
    """
    tiles_per_page: constexpr = (page_words + tile - 1) // tile
    lane = tl.arange(0, tile)
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        layer = (first_layer + i // tiles_per_layer).to(tl.int64)
        of_layer = i % tiles_per_layer
        pair = pairs + 2 * (of_layer // tiles_per_page)
        record = tl.multiple_of(tl.load(pair), grain)
        block = tl.load(pair + 1)
        word = (of_layer % tiles_per_page) * tile + lane
        inside = word < page_words
        kept = records + record + layer * page_words + word
        page = pages + tl.multiple_of(tl.load(places + layer), 2) + block * page_stride + word
        if loads:
            words = tl.load(kept, mask=inside, eviction_policy="evict_first")
            tl.store(page, words, mask=inside)
        else:
            words = tl.load(page, mask=inside, eviction_policy="evict_first")
            tl.store(kept, words, mask=inside)


class Pairs:
    """Which record belongs to which block, on the device. To be kept while copies use it."""

    def __init__(
        self, numbers: np.ndarray[tuple[int, int], np.dtype[np.int64]], device: torch.device
    ) -> None:
        """`numbers`: int64 [pairs, (words behind the records, block)]. Queues their upload on the
        current stream."""
        self.count = len(numbers)
        self._host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host.numpy()[:] = numbers
        self.on_device = torch.empty(numbers.shape, dtype=torch.int64, device=device)
        words = self._host.view(torch.int32), self.on_device.view(torch.int32)
        read_words(*words, 2 * numbers.size)


class PageGather:
    """Copies between records and the pages of layers. Device thread; queued on the current stream.

    Made before the first step: it compiles what it needs, and loads it onto the device.
    """

    def __init__(
        self,
        records: Tensor | RecordSpace,
        layers: Sequence[Tensor],
        *,
        tiles: GatherTiles = GATHER_TILES,
    ) -> None:
        """`records`: uint8 [num_records, num_layers, page_bytes], contiguous, pinned for a GPU; or
        such records with others beside them.

        `layers`: uint8 [num_blocks, page_bytes] on one device, pages contiguous; `tiles` is for
        measuring. Pages and records whose addresses and strides are divisible by 8 are copied fast.
        """
        self._space = RecordSpace.over(records)
        host = self._space.host
        word = _word(host, layers)
        by_layer = host.view(word).unbind(1)
        self._layers = [
            (kept, rows.view(word), rows.stride(0) // word.itemsize)
            for kept, rows in zip(by_layer, layers, strict=True)
        ]
        self._device = layers[0].device
        self._page_words = by_layer[0].shape[1]
        self._tile = min(tiles.tile_bytes // word.itemsize, next_power_of_2(self._page_words))
        self._tiles_per_page = -(-self._page_words // self._tile)
        self._grid = (tiles.programs,)
        self._num_warps = tiles.num_warps
        self._records = host.view(word)
        self._word_bytes = word.itemsize
        # Of what is mapped all begins at a page of the system's.
        aligned = host.data_ptr() % 16 == 0 and host.stride(0) % 16 == 0
        self._grain = 16 // word.itemsize if aligned else 1
        self._places = _places(self._layers, self._device)
        self._warm_up()

    def _warm_up(self) -> None:
        """Copy nothing, of each layer: how its memory is aligned chooses the code."""
        nothing = Pairs(np.zeros((1, 2), np.int64), self._device)
        nothing.count = 0
        layers = range(len(self._layers))
        for layer in layers:
            self.load(layer, nothing)
            self.save(layer, nothing)
        for loads in (True, False):
            self.copy_layers(layers, nothing, loads=loads)
        if self._device.type == "cuda":  # before `nothing` is let go of
            torch.cuda.current_stream(self._device).synchronize()

    def pairs(self, runs: Sequence[tuple[int, int, int]]) -> Pairs:
        """Of runs (first record, first block, number of blocks), one at least; queues their upload.

        Nothing is checked here.
        """
        places = expand_runs(runs)
        at = self._space.addresses(places[:, 0].astype(np.uint64)).astype(np.int64)
        places[:, 0] = (at - self._records.data_ptr()) // self._word_bytes
        return Pairs(places, self._device)

    def load(self, layer: int, pairs: Pairs) -> None:
        """From records into the pages of `layer`. No block may be in two pairs."""
        self._copy(layer, pairs, loads=True)

    def save(self, layer: int, pairs: Pairs) -> None:
        """From the pages of `layer` into records. No record may be in two pairs."""
        self._copy(layer, pairs, loads=False)

    def copy_layers(self, layers: range, pairs: Pairs, *, loads: bool) -> None:
        """Of these layers, in one go where their pages lie alike: `load` or `save`."""
        if self._places is None:
            for layer in layers:
                (self.load if loads else self.save)(layer, pairs)
            return
        _, rows, row_stride = self._layers[0]
        tiles = pairs.count * self._tiles_per_page
        record_gather_kernel[self._grid](
            self._records, rows, self._places, pairs.on_device, len(layers) * tiles,
            max(1, tiles), layers.start, page_stride=row_stride, page_words=self._page_words,
            tile=self._tile, grain=self._grain, loads=loads, num_warps=self._num_warps,
        )  # fmt: skip

    def _copy(self, layer: int, pairs: Pairs, *, loads: bool) -> None:
        kept, rows, row_stride = self._layers[layer]
        page_gather_kernel[self._grid](
            kept, rows, pairs.on_device, pairs.count * self._tiles_per_page,
            page_stride=row_stride, page_words=self._page_words, tile=self._tile,
            grain=self._grain, loads=loads, num_warps=self._num_warps,
        )  # fmt: skip


def _places(layers: Sequence[tuple[Tensor, Tensor, int]], device: torch.device) -> Tensor | None:
    """int64 [layers]: where the pages of each begin, in words behind those of the first one; None
    if they lie differently."""
    _, first, stride = layers[0]
    places = [rows.data_ptr() - first.data_ptr() for _, rows, _ in layers]
    size = first.itemsize
    are_alike = all(row_stride == stride for *_, row_stride in layers)
    if not are_alike or any(place % (2 * size) for place in places):
        return None
    return torch.tensor([place // size for place in places], dtype=torch.int64, device=device)


def _word(records: Tensor, layers: Sequence[Tensor]) -> torch.dtype:
    """Eight bytes, two of which make a load of 16; single bytes where something does not lie so."""
    places = [records.data_ptr(), int(records.shape[-1])]
    for rows in layers:
        places += [rows.data_ptr(), int(rows.storage_offset()), rows.stride(0)]
    return torch.uint8 if any(place % 8 for place in places) else torch.int64
