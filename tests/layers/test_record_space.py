"""Records beside those in host memory: numbers, refusals, and copies out of them by each way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from host_memcpy import HostBatch, HostDriver, HostMemcpy, on_a_stream
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.engine.errors import ConnectorError
from interlace.layers import cuda_copies
from interlace.layers.page_copies import PageCopies, Run
from interlace.layers.record_space import RecordBytes, RecordSpace

NUM_LAYERS, PAGE_BYTES, NUM_HOST, NUM_BLOCKS = 3, 48, 5, 30


def filled(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def rows_of(count: int) -> RecordBytes:
    rows = filled(count, NUM_LAYERS, PAGE_BYTES).numpy()
    rows.flags.writeable = False  # as a mapping is
    return rows


def new_space() -> RecordSpace:
    return RecordSpace(filled(NUM_HOST, NUM_LAYERS, PAGE_BYTES))


def test_records_of_two_mappings_are_never_neighbours_and_numbers_are_not_used_again() -> None:
    space = new_space()
    first, second = space.map(rows_of(4)), space.map(rows_of(2))
    assert (first, second) == (NUM_HOST + 1, NUM_HOST + 6)
    assert space.holds(NUM_HOST - 1, 1)
    assert not space.holds(NUM_HOST - 1, 2)
    assert space.holds(first, 4)
    assert not space.holds(first, 5)
    assert not space.holds(first - 1, 1)
    assert not space.holds(first + 4, 1)
    assert not space.holds(-1, 1)
    space.unmap(first)
    assert not space.holds(first, 1)
    assert space.holds(second, 2)
    assert space.map(rows_of(1)) == second + 3


def test_other_records_are_not_mapped() -> None:
    space = new_space()
    for rows in (
        np.zeros((2, NUM_LAYERS, PAGE_BYTES + 1), np.uint8),
        np.zeros((0, NUM_LAYERS, PAGE_BYTES), np.uint8),
        np.zeros((4, NUM_LAYERS, PAGE_BYTES), np.uint8)[::2],
    ):
        with pytest.raises(ConnectorError, match="map files of this model alone"):
            space.map(rows)


def copies_of(kind: str, space: RecordSpace, layers: list[Tensor]) -> PageCopies:
    match kind:
        case "host":
            return PageCopies(space, layers)
        case "strided":
            return PageCopies(space, layers, memcpy=HostMemcpy(), most_strided_runs=1000)
        case "batch":
            return PageCopies(
                space, layers, memcpy=HostMemcpy(), batch=HostBatch(), most_strided_runs=0
            )
    driver: Any = HostDriver("cuMemcpy3DBatchAsync")
    batch = cuda_copies._CudaMemcpy2DBatch(driver, torch.device("cuda", 0))
    return PageCopies(space, layers, memcpy=HostMemcpy(), strided_batch=batch, strided_run_bytes=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["host", "strided", "batch", "one call"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    all_layers=st.booleans(),
)
def test_loads_come_from_wherever_a_record_lies(
    seed: int, kind: str, sizes: list[int], all_layers: bool
) -> None:
    rng, space = random.Random(seed), new_space()
    lies = {i: space.host[i].numpy() for i in range(NUM_HOST)}
    for rows in map(rows_of, sizes):
        first = space.map(rows)
        lies |= {first + i: row for i, row in enumerate(rows)}
    layers = list(filled(NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES))
    wanted = [pages.clone() for pages in layers]
    records = rng.sample(sorted(lies), rng.randint(1, len(lies)))
    runs: list[Run] = []
    for block, record in enumerate(records, 1):
        before = runs[-1] if runs else (-9, -9, 0)
        if record == before[0] + before[2]:
            runs[-1] = (*before[:2], before[2] + 1)
        else:
            runs.append((record, block, 1))
        for layer in range(NUM_LAYERS):
            wanted[layer][block] = torch.from_numpy(lies[record][layer].copy())
    copies = copies_of(kind, space, layers)
    with on_a_stream():
        if all_layers:
            list(copies.load_layers(range(NUM_LAYERS), copies.prepare(runs)))
        else:
            for layer in range(NUM_LAYERS):
                copies.load(layer, copies.prepare(runs))
    assert all(map(torch.equal, layers, wanted))


def test_a_copy_does_not_cross_from_one_mapping_into_another() -> None:
    space = new_space()
    first = space.map(rows_of(4))
    space.map(rows_of(4))
    copies = PageCopies(space, list(filled(NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES)))
    for run in ((first + 3, 1, 2), (NUM_HOST - 1, 1, 3), (first + 4, 1, 1), (first + 99, 1, 1)):
        with pytest.raises(ConnectorError, match="or what is mapped beside these"):
            copies.prepare([run])


def test_what_another_thread_unmaps_meanwhile_moves_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of others are made at that moment: from somewhere else, they would not even fail."""
    space = new_space()
    first, second = space.map(rows_of(4)), space.map(rows_of(2))
    records = np.array([0, second + 1], np.uint64)
    wanted = space.addresses(records)
    make_array = np.array

    def unmap_behind_it(*args: Any) -> Any:
        made = make_array(*args)
        space.unmap(first)
        return made

    monkeypatch.setattr(np, "array", unmap_behind_it)
    assert space.addresses(records).tolist() == wanted.tolist()
    assert not space.holds(first, 1)
