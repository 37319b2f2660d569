"""What copies one group of layers: over all its parts, in as few calls as can be, and no more once
it is given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hooked_copies import HookedCopies
from host_memcpy import HostDriver, HostMemcpy, on_a_stream
from torch import Tensor

from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.worker_loads import PipelinedLoad
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.errors import ConnectorError
from interlace.layers import cuda_copies
from interlace.layers.page_copies import PageCopies, Run, Runs

NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES = 40, 50, 8, 64
GROUPS = LayerGroups(NUM_LAYERS, 3)
GROUP = 2
"""Of three layers, of which the second one is in the middle."""
LAYERS = GROUPS.ranges[GROUP]
MANY: tuple[Run, ...] = tuple((3 * i, 40 - 3 * i, 2) for i in range(6))
FEW: tuple[Run, ...] = ((20, 42, 3),)
OTHER: tuple[Run, ...] = ((30, 46, 1), (33, 3, 2))


class Memory:
    """Records and pages, and what the pages held at first."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.records = self._filled(random, NUM_RECORDS, NUM_LAYERS, PAGE_BYTES)
        self.pages = [self._filled(random, NUM_BLOCKS, PAGE_BYTES) for _ in range(NUM_LAYERS)]
        self.was = [pages.clone() for pages in self.pages]

    def _filled(self, random: torch.Generator, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    def loaded(self, part: tuple[Run, ...]) -> list[int]:
        """Layers that hold the part; those that do not are as they were."""
        found = []
        for layer, (pages, was) in enumerate(zip(self.pages, self.was, strict=True)):
            right, before = was.clone(), was.clone()
            for record, block, count in part:
                right[block : block + count] = self.records[record : record + count, layer]
            blocks = [block + i for _, block, count in part for i in range(count)]
            if torch.equal(pages[blocks], right[blocks]):
                found.append(layer)
            else:
                assert torch.equal(pages[blocks], before[blocks]), layer
        return found

    def in_batches(self, driver: HostDriver, memcpy: HostMemcpy | None = None) -> PageCopies:
        """Strided copies as a GPU's: many in one call of this stand-in for the driver."""
        stand_in: Any = driver
        return PageCopies(
            self.records,
            self.pages,
            memcpy=memcpy or HostMemcpy(),
            strided_batch=cuda_copies._CudaMemcpy2DBatch(stand_in, torch.device("cuda", 0)),
            strided_run_bytes=0,
        )


def a_load(copies: PageCopies, *parts: tuple[Run, ...]) -> PipelinedLoad:
    return PipelinedLoad(copies, parts, GROUPS, ClockStopwatch(lambda: 0.0))


def test_a_group_has_several_layers() -> None:
    assert [*LAYERS] == [3, 4, 5]


def test_each_part_of_a_group_is_one_call() -> None:
    memory, memcpy = Memory(), HostMemcpy()
    driver = HostDriver("cuMemcpy3DBatchAsync_v2")
    load = a_load(memory.in_batches(driver, memcpy), MANY, FEW, MANY)
    with on_a_stream():
        load.copy_group(GROUP)
    assert driver.calls == [6 * 3, 6 * 3]
    assert memcpy.num_copies == 3, "what few copies there are of a part come one by one"
    assert memory.loaded(MANY) == memory.loaded(FEW) == [*LAYERS]


def test_a_call_for_many_comes_to_what_single_copies_do() -> None:
    memory, single = Memory(), Memory()
    driver = HostDriver("cuMemcpy3DBatchAsync_v2")
    loads = [
        a_load(copies, MANY, FEW)
        for copies in (
            memory.in_batches(driver),
            PageCopies(single.records, single.pages, memcpy=HostMemcpy(), strided_run_bytes=0),
            HookedCopies(single.records, single.pages),
        )
    ]
    for load in loads:
        with on_a_stream():
            for group in range(load.num_groups):
                load.copy_group(group)
        assert load.stats == loads[0].stats
        assert load.stats.num_bytes == NUM_LAYERS * (6 * 2 + 3) * PAGE_BYTES
        assert load.stats.num_copies == NUM_LAYERS * (6 + 1)
    assert driver.calls == [6 * 2, 6 * 3], "a layer alone has few"
    assert all(map(torch.equal, memory.pages, single.pages))


def test_a_call_that_is_refused_fails_its_part_alone() -> None:
    memory = Memory()
    load = a_load(memory.in_batches(HostDriver("cuMemcpy3DBatchAsync_v2", code=1)), MANY, FEW)
    with on_a_stream():
        load.copy_group(GROUP)
    assert "error 1" in str(load.errors[0])
    assert load.errors[1] is None
    assert memory.loaded(MANY) == []
    assert memory.loaded(FEW) == [*LAYERS]
    assert load.stats.num_bytes == 3 * 3 * PAGE_BYTES


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("layer", LAYERS)
def test_a_part_that_fails_within_a_group_fails_alone(layer: int, bad: int) -> None:
    memory, parts = Memory(), (MANY, FEW, OTHER)
    begun: list[tuple[int, int]] = []

    def before(at: int, runs: Runs) -> None:
        part = parts.index(tuple(runs.runs))
        begun.append((part, at))
        if (part, at) == (bad, layer):
            raise OSError("the memory is gone")

    load = a_load(HookedCopies(memory.records, memory.pages, before), *parts)
    load.copy_group(GROUP)
    load.copy_group(GROUP + 1)
    assert [error is not None for error in load.errors] == [part == bad for part in range(3)]
    behind = [*LAYERS, *GROUPS.ranges[GROUP + 1]]
    for number, part in enumerate(parts):
        fails = number == bad
        assert memory.loaded(part) == [at for at in behind if not fails or at < layer]
        assert [at for one, at in begun if one == number] == [
            at for at in behind if not fails or at <= layer
        ]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_load_that_is_given_up_within_a_group_begins_no_other_copy(layer: int) -> None:
    memory = Memory()
    begun: list[int] = []

    def before(at: int, runs: Runs) -> None:
        begun.append(at)
        if at == layer:
            assert not load.give_up(ConnectorError("too late"), 0.0), "this one is under way"

    load = a_load(HookedCopies(memory.records, memory.pages, before), FEW, OTHER)
    load.copy_group(GROUP)
    load.copy_group(GROUP + 1)
    assert begun == [at for at in LAYERS if at <= layer]
    assert memory.loaded(FEW) == begun
    assert memory.loaded(OTHER) == []
    assert [str(error) == "too late" for error in load.errors] == [True, True]
    assert load.stats.num_copies == len(begun)
