"""Connectors over pages on a GPU: whole engines at both depths, eager and with graphs."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from connected_gpu import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PATIENCE_S,
    PROMPTS,
    an_engine,
    ask,
    ask_all,
    settle,
)
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace.connectors.kv_folders.pages import DevicePages, layer_pages
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.kv_copy import copy_kv_blocks, host_buffers
from interlace.layers.kv_memory import PageShape
from interlace.layers.kv_pages import KVPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LONG = 100_000_000
"""Cycles: about 50 ms."""

modes = pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
both_depths = pytest.mark.parametrize("depth", [1, 2])
ways = pytest.mark.parametrize("load_async", [False, True])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(dtype=torch.float32, head_dim=64, device="cuda")


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    plain = tiny_model(head_dim=64)
    return [plain_answer(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


def example(root: Path, **extra: Any) -> dict[str, Any]:
    return {"shared_storage_path": str(root), "refresh_s": 0.02, **extra}


def damage(root: Path) -> int:
    """Flip a bit in the last layer of each second folder; how many there were."""
    layers = sorted(root.rglob("layer_001.safetensors"))[::2]
    for path in layers:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    return len(layers)


# ---------------------------------------------------------------- ExampleConnector


@modes
@both_depths
@ways
async def test_saved_loaded_after_a_restart_and_computed_where_it_is_damaged(
    mode: str,
    depth: int,
    load_async: bool,
    tmp_path: Path,
    model: LoadedModel,
    answers: list[list[int]],
) -> None:
    extra = example(tmp_path, load_async=load_async)
    shape: dict[str, Any] = {"mode": mode, "depth": depth}
    async with an_engine(model, "ExampleConnector", extra, **shape) as engine:
        assert engine.config.cudagraph_mode in ("NONE", "PIECEWISE"), "it needs its layer hooks"
        for _ in range(2):
            await ask_all(engine, answers)
        await settle(engine)
        assert engine.snapshot().stats.num_external_cached_tokens == 0
    async with an_engine(model, "ExampleConnector", extra, **shape) as engine:
        done = await ask_all(engine, answers)
        await settle(engine)
        assert engine.snapshot().stats.num_invalid_blocks == 0
        reused = [
            one.usage.num_external_cached_tokens + one.usage.num_local_cached_tokens for one in done
        ]
        whole = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
        assert all(found >= most for found, most in zip(reused, whole, strict=True))
        assert sum(one.usage.num_external_cached_tokens for one in done) > 50
    assert damage(tmp_path) > 0
    async with an_engine(model, "ExampleConnector", extra, **shape) as engine:
        await ask_all(engine, answers)
        await settle(engine)
        assert engine.snapshot().stats.num_invalid_blocks > 0


@both_depths
async def test_preempted_requests_save_what_is_right(
    depth: int, tmp_path: Path, model: LoadedModel, answers: list[list[int]]
) -> None:
    """Blocks are handed on while their copies are under way."""
    shape: dict[str, Any] = {"mode": "NONE", "depth": depth, "num_gpu_blocks_override": 24}
    extra = example(tmp_path)
    async with an_engine(model, "ExampleConnector", extra, **shape) as engine:
        for _ in range(3):
            await ask_all(engine, answers)
            await settle(engine)
            assert engine.reset_prefix_cache()
        assert engine.snapshot().stats.num_preemptions > 0
    async with an_engine(model, "ExampleConnector", extra, **shape) as engine:
        await ask_all(engine, answers)
        await settle(engine)
        assert engine.snapshot().stats.num_external_cached_tokens > 0
        assert engine.snapshot().stats.num_invalid_blocks == 0


# ---------------------------------------------------------------- MultiConnector


@modes
@both_depths
async def test_two_directories_of_which_one_is_lost(
    mode: str, depth: int, tmp_path: Path, model: LoadedModel, answers: list[list[int]]
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    children = [
        {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": example(root, load_async=i == 1),
        }
        for i, root in enumerate(roots)
    ]
    extra, shape = {"connectors": children}, dict[str, Any](mode=mode, depth=depth)
    async with an_engine(model, "MultiConnector", extra, **shape) as engine:
        await ask_all(engine, answers)
        await settle(engine)
    for lost in (None, roots[0]):
        if lost is not None:
            shutil.rmtree(lost)
        async with an_engine(model, "MultiConnector", extra, **shape) as engine:
            await ask_all(engine, answers)
            await settle(engine)
            assert engine.snapshot().stats.num_external_cached_tokens > 50


# ---------------------------------------------------------------- ExampleHiddenStatesConnector


async def states_of(
    model: LoadedModel, root: Path, **shape: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Of each prompt: the answer, and the prompt's states."""
    from safetensors.torch import load_file

    extra = {"shared_storage_path": str(root)}
    options = {"hidden_state_layer_ids": (0, 1, 2), **shape}
    found = []
    async with an_engine(model, "ExampleHiddenStatesConnector", extra, **options) as engine:
        done = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
        for prompt, one in zip(PROMPTS, done, strict=True):
            assert one.kv_transfer_params is not None
            path = one.kv_transfer_params["hidden_states_path"]
            tensors = await asyncio.to_thread(load_file, path)
            assert tensors["token_ids"].tolist() == prompt
            found.append((list(one.token_ids), tensors["hidden_states"]))
    return found


@modes
@both_depths
async def test_hidden_states_are_those_of_a_cpu(
    mode: str, depth: int, tmp_path: Path, model: LoadedModel, answers: list[list[int]]
) -> None:
    found = await states_of(model, tmp_path / "gpu", mode=mode, depth=depth)
    plain = tiny_model(dtype=torch.float32, head_dim=64)
    expected = await states_of(plain, tmp_path / "cpu")
    assert [ids for ids, _ in found] == answers
    for (_, here), (_, there) in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- DecodeBenchConnector


@modes
@both_depths
@pytest.mark.parametrize("std", [0.0, 0.5])
async def test_decoding_over_invented_kv(
    mode: str, depth: int, std: float, model: LoadedModel
) -> None:
    """The same numbers as on a CPU, so the same answer, after one computed token."""
    prompt = [(7 * i) % VOCAB_SIZE for i in range(41)]
    extra = {"fill_mean": 0.015, "fill_std": std}
    plain = tiny_model(dtype=torch.float32, head_dim=64)
    async with an_engine(plain, "DecodeBenchConnector", extra) as engine:
        right = await ask(engine, prompt)
    async with an_engine(model, "DecodeBenchConnector", extra, mode=mode, depth=depth) as engine:
        assert engine.config.cudagraph_mode == mode, "it lives with full graphs"
        found = await ask(engine, prompt)
        more = await asyncio.gather(*(ask(engine, [i, *prompt]) for i in range(3)))
    assert found.usage.num_external_cached_tokens == len(prompt) - 1
    assert found.token_ids == right.token_ids
    assert all(len(one.token_ids) == NUM_TOKENS for one in more)


# ---------------------------------------------------------------- copies of blocks


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cross_layers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_go_to_the_host_and_back_byte_by_byte(
    layout: Any, cross_layers: bool, dtype: torch.dtype
) -> None:
    shape = PageShape(
        num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, cache_only=(2, 5)
    )
    pages = KVPages.of(
        shape,
        num_blocks=12,
        device=torch.device("cuda"),
        layout=layout,
        cross_layers=cross_layers,
    ).by_name()
    before = {}
    for number, (name, layer) in enumerate(pages.items()):
        random = torch.Generator().manual_seed(number)
        layer.copy_(torch.randn(layer.shape, generator=random).to(dtype))
        layer[5] = math.nan
        before[name] = layer.cpu()
    host = host_buffers(pages, 20)
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    for layer in pages.values():
        layer[7] = 2.5  # a kernel that has not ended when the copy is asked for
    copy_kv_blocks(pages, host, [5, 7, 1], [19, 0, 3], "d2h")
    for name, layer in host.items():
        assert same_bytes(layer[[19, 3]], before[name][[5, 1]])
        assert bool((layer[0] == 2.5).all())
        assert not layer[1].any()
    copy_kv_blocks(host, pages, [19, 3, 0], [2, 11, 10], "h2d")
    for name, layer in pages.items():
        found = layer.cpu()
        assert same_bytes(found[[2, 11]], before[name][[5, 1]])
        assert bool((found[10] == 2.5).all())
        kept = [0, 1, 3, 4, 5, 6, 8, 9]
        assert same_bytes(found[kept], before[name][kept])


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("block_shape", [(2, 4, 2, 8), (2, 1, 1, 1)])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_rows_of_files_move_in_the_order_of_the_stream(
    block_shape: tuple[int, ...], is_pinned: bool
) -> None:
    tensor = torch.zeros(10, *block_shape, dtype=torch.float16, device="cuda")
    pages = layer_pages("layer", tensor)
    assert isinstance(pages, DevicePages)
    num_bytes = 3 * pages.block_bytes
    memory = pages.staging(num_bytes) if is_pinned else np.empty(num_bytes, dtype=np.uint8)
    rows = memory.reshape(3, -1)
    rows[:] = 0
    stall_then_fill(tensor, 1.5)
    pages.read([4, 9, 2], rows)
    gate = pages.copied()
    tensor.fill_(-1.0)  # a later step hands the blocks on
    if is_pinned:
        assert not gate.query(), "the host did not wait"
    assert gate.wait(PATIENCE_S)
    assert np.all(rows.view(np.float16) == 1.5)
    numbers = np.arange(rows.size // 2, dtype=np.float16)
    rows[:] = numbers.view(np.uint8).reshape(3, -1)
    stall_then_fill(tensor, 0.0)
    pages.write([8, 1, 5], rows)
    rows[:] = 0  # they may change at once
    right = torch.zeros(10, *block_shape, dtype=torch.float16)
    right[[8, 1, 5]] = torch.from_numpy(numbers).view(3, *block_shape)
    assert torch.equal(tensor.cpu(), right)


def stall_then_fill(tensor: torch.Tensor, value: float) -> None:
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    tensor.fill_(value)


def test_many_reads_and_writes_at_random() -> None:
    """Against a copy on the host, with nothing waited for in between."""
    choose = np.random.default_rng(5)
    tensor = torch.randn(16, 2, 4, 2, 8, device="cuda")
    expected = tensor.cpu()
    pages = layer_pages("layer", tensor)
    found = []
    for _, number in itertools.product(range(20), (1, 5)):
        ids = choose.permutation(16)[:number].tolist()
        rows = pages.staging(number * pages.block_bytes).reshape(number, -1)
        pages.read(ids, rows)
        found.append((rows, expected[ids].clone()))
        targets = choose.permutation(16)[:number].tolist()
        new = choose.standard_normal((number, 2, 4, 2, 8), dtype=np.float32)
        pages.write(targets, new.view(np.uint8).reshape(number, -1))
        expected[targets] = torch.from_numpy(new)
    assert pages.copied().wait(PATIENCE_S)
    for rows, right in found:
        assert same_bytes(torch.from_numpy(rows), right.view(torch.uint8).reshape(len(rows), -1))
    assert torch.equal(tensor.cpu(), expected)
