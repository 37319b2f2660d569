"""A store of files on a GPU: slabs that are copied from directly, and others that are read."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import connected_gpu
import numpy as np
import pytest
import torch
from connected_gpu import BLOCK_SIZE, NUM_TOKENS, PROMPTS, ask, ask_all, settle
from pipeline_files_kit import counts_of, num_external, scheduler_of
from slab_kit import flip
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine
from interlace.connectors.pipeline import worker_maps
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.slab_store import slab as slabs
from interlace.connectors.slab_store.checksum import COLUMNS, checksum, factors
from interlace.connectors.slab_store.mapping import MappedSlab
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.cuda_host_memory import CudaHostMemory
from interlace.layers.page_copies import PageCopies
from interlace.layers.page_sums import PageSums
from interlace.layers.record_space import RecordSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
RECORD_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 64 * 4
"""Layers, K and V, tokens, heads, head size, float32."""

ways = pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid"])
places = pytest.mark.parametrize("registered_bytes", [0, 1 << 30])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(dtype=torch.float32, head_dim=64, device="cuda")


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    plain = tiny_model(head_dim=64)
    return [plain_answer(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


@asynccontextmanager
async def an_engine(
    model: LoadedModel,
    folder: Path,
    load_mode: str,
    *,
    graphs: str = "NONE",
    depth: int = 1,
    **own: Any,
) -> AsyncIterator[AsyncEngine]:
    extra = {
        "store": "file",
        "path": str(folder),
        "slab_bytes": 2 * 8192 + 20 * RECORD_BYTES,
        "min_free_bytes": 0,
        "load_mode": load_mode,
        "group_size": 1,
        "host_bytes": 400 * RECORD_BYTES,
        **own,
    }
    async with connected_gpu.an_engine(
        model, "PipelineConnector", extra, mode=graphs, depth=depth
    ) as engine:
        yield engine


async def forget_on_device(engine: AsyncEngine) -> None:
    await settle(engine)
    assert engine.reset_prefix_cache()


async def store(model: LoadedModel, folder: Path, answers: list[list[int]]) -> None:
    async with an_engine(model, folder, "bulk") as engine:
        await ask_all(engine, answers)
        await forget_on_device(engine)


@places
@ways
@pytest.mark.parametrize(
    ("graphs", "depth"), [("NONE", 2), ("FULL_AND_PIECEWISE", 1), ("FULL_AND_PIECEWISE", 2)]
)
async def test_a_restarted_engine_answers_from_files(
    load_mode: str,
    graphs: str,
    depth: int,
    registered_bytes: int,
    tmp_path: Path,
    model: LoadedModel,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    await store(model, folder, answers)
    counts.clear()
    async with an_engine(
        model, folder, load_mode, graphs=graphs, depth=depth, registered_bytes=registered_bytes
    ) as engine:
        files = scheduler_of(engine)._tier
        assert isinstance(files, FileTier)
        assert bool(files._mapped) == (registered_bytes > 0)
        for _ in range(4):
            done = await ask_all(engine, answers)
            assert sum(map(num_external, done)) >= 20
            await forget_on_device(engine)
            await ask(engine, [1, 2], 1)
        assert engine.snapshot().stats.num_invalid_blocks == 0
    wanted = "blocks_loaded_from_files" if registered_bytes else "blocks_fetched"
    assert counts[wanted] > 5


def damage(folder: Path, draw: random.Random) -> None:
    """One bit in each record."""
    for path in folder.glob("*/*.slab"):
        with slabs.Slab.open(path) as slab:
            places = [slab.header.shape.record_at(entry.record) for entry in slab.look()]
        for place in places:
            flip(path, place + draw.randrange(RECORD_BYTES), draw.randrange(8))


@places
@ways
@pytest.mark.parametrize("graphs", ["NONE", "FULL_AND_PIECEWISE"])
async def test_what_is_damaged_is_found_and_computed(
    load_mode: str,
    graphs: str,
    registered_bytes: int,
    tmp_path: Path,
    model: LoadedModel,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    await store(model, folder, answers)
    damage(folder, random.Random(1))
    counts.clear()
    async with an_engine(
        model, folder, load_mode, graphs=graphs, depth=2, registered_bytes=registered_bytes
    ) as engine:
        for _ in range(3):
            await ask_all(engine, answers)
            await forget_on_device(engine)
            await ask(engine, [1, 2], 1)
        if load_mode != "hybrid":
            assert engine.snapshot().stats.num_invalid_blocks > 0
    assert counts["blocks_failed_to_load"] > 0


async def test_a_removed_file_is_let_go_of_while_nobody_asks(
    tmp_path: Path, model: LoadedModel, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_maps, "LOOK_S", 0.02)
    monkeypatch.setattr(worker_maps, "_QUIET_S", 0.05)
    folder = tmp_path / "kv"
    await store(model, folder, answers)
    unregistered = collections.Counter[str]()
    inner = CudaHostMemory.unregister

    def noted(memory: CudaHostMemory, address: int) -> int:
        code = inner(memory, address)
        unregistered[str(code)] += 1
        return code

    monkeypatch.setattr(CudaHostMemory, "unregister", noted)
    async with an_engine(model, folder, "layerwise", graphs="FULL_AND_PIECEWISE") as engine:
        await ask_all(engine, answers)
        await forget_on_device(engine)
        paths = list(folder.glob("*/*.slab"))
        for path in paths:
            path.unlink()
        for _ in range(500):
            if unregistered["0"] >= len(paths) - 1:
                break
            await asyncio.sleep(0.01)
        await ask_all(engine, answers)
    assert unregistered.keys() == {"0"}


@pytest.mark.parametrize("seed", range(3))
async def test_slabs_come_and_go_under_traffic(
    seed: int,
    tmp_path: Path,
    model: LoadedModel,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_maps, "LOOK_S", 0.002)
    monkeypatch.setattr(worker_maps, "_BUSY_PAUSE_S", 0.0)
    folder, draw, counts = tmp_path / "kv", random.Random(seed), counts_of(monkeypatch)
    slab_bytes = 2 * 8192 + 8 * RECORD_BYTES
    async with an_engine(
        model,
        folder,
        draw.choice(["layerwise", "bulk", "hybrid", "auto"]),
        graphs="FULL_AND_PIECEWISE",
        depth=2,
        host_bytes=30 * RECORD_BYTES,
        slab_bytes=slab_bytes,
        registered_bytes=draw.choice([20, 40]) * RECORD_BYTES,
        capacity_bytes=6 * slab_bytes,
    ) as engine:
        for _ in range(25):
            await ask_all(engine, answers)
            await asyncio.sleep(0.005)
            await forget_on_device(engine)
    assert counts["blocks_loaded_from_files"] > 0


def test_the_link_reads_registered_files_at_its_speed(tmp_path: Path) -> None:
    """Copies out of a mapping, by each way, are right, and sums of pages are the store's."""
    num_layers, page_bytes, num_records, num_blocks = 4, 65536, 40, 64
    rng = np.random.default_rng(5)
    content = rng.integers(0, 256, (num_records, num_layers, page_bytes), np.uint8)
    path = tmp_path / "a"
    path.write_bytes(b"\0" * 8192 + content.tobytes())
    mapped = MappedSlab.open(
        path, first_byte=8192, num_records=num_records, record_bytes=num_layers * page_bytes
    )
    assert mapped.is_resident
    memory = CudaHostMemory(torch.device("cuda"))
    assert memory.register(mapped.address, mapped.num_bytes, read_only=True) == 0
    host = torch.zeros(3, num_layers, page_bytes, dtype=torch.uint8).pin_memory()
    space = RecordSpace(host)
    first = space.map(mapped.rows.reshape(num_records, num_layers, page_bytes))
    layers = [
        torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device="cuda")
        for _ in range(num_layers)
    ]
    sums = PageSums(layers, *factors(num_layers * page_bytes // (4 * COLUMNS) + 1))
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    single = [(first + i, num_blocks - 1 - i, 1) for i in range(num_records)]
    whole = [(first, 1, num_records)]
    for make in (PageCopies.within_steps, PageCopies.beside_compute):
        copies = make(space, layers)
        for runs in (single, whole):
            for pages in layers:
                pages.fill_(0xEE)
            torch.cuda.synchronize()
            blocks = [block + i for _, block, count in runs for i in range(count)]
            with torch.cuda.stream(stream):
                list(copies.load_layers(range(num_layers), copies.prepare(runs)))
                found = sums.of(blocks)
            stream.synchronize()
            assert found.values().tolist() == [checksum(record) for record in content]
            for layer, pages in enumerate(layers):
                assert np.array_equal(pages.cpu().numpy()[blocks], content[:, layer])
    assert memory.unregister(mapped.address) == 0
    assert memory.unregister(mapped.address) != 0, "and nothing later hears of that"
    torch.zeros(1, device="cuda").cpu()
    mapped.close()
