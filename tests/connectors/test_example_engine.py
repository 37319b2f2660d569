"""ExampleConnector under the whole engine: right answers, whatever becomes of the files."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_kit import until
from example_engine import folders
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.engine.outputs import Completion

MODEL = tiny_model()
NUM_TOKENS = 9
modes = pytest.mark.parametrize(
    ("load_async", "depth"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)


@asynccontextmanager
async def an_engine(
    root: Path,
    *,
    load_async: bool = False,
    depth: int = 1,
    num_blocks: int = 40,
    policy: str = "recompute",
) -> AsyncIterator[AsyncEngine]:
    """With room for a few requests, so that many preempt each other."""
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=24,
        max_inflight_steps=depth,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_load_failure_policy="fail" if policy == "fail" else "recompute",
            kv_connector_extra_config={
                "shared_storage_path": str(root),
                "load_async": load_async,
                "refresh_s": 0.02,
            },
        ),
    )
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        yield engine


async def ask(engine: AsyncEngine, prompt: list[int]) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return await engine.complete(prompt, params)


async def settled(engine: AsyncEngine) -> None:
    """Until every save has ended."""
    await until(lambda: engine.snapshot().idle and not engine.snapshot().num_held_requests)


def a_prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def damage_some(root: Path, source: random.Random) -> None:
    """One bit of a random layer of about half of the folders."""
    for folder in folders(root):
        if source.random() < 0.5:
            path = folder / f"layer_{source.randrange(2):03d}.safetensors"
            with contextlib.suppress(FileNotFoundError):  # removed by the engine just now
                data = bytearray(path.read_bytes())
                data[source.randrange(len(data))] ^= 1
                path.write_bytes(data)


@modes
async def test_the_next_day_a_conversation_starts_from_files(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    turn = a_prompt(1, 33)
    async with an_engine(tmp_path, depth=depth) as engine:
        first = await ask(engine, turn)
    assert list(first.token_ids) == plain_answer(MODEL, turn, NUM_TOKENS)
    turn = [*turn, *first.token_ids, *a_prompt(2, 6)]
    async with an_engine(tmp_path, load_async=load_async, depth=depth) as engine:
        second = await ask(engine, turn)
        await settled(engine)
    assert list(second.token_ids) == plain_answer(MODEL, turn, NUM_TOKENS)
    assert second.usage.num_external_cached_tokens == 40, "the answer's blocks too"


@modes
async def test_b01_to_b66_random_traffic_over_random_damage(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    """Shared prefixes, preemption, aborts and bad files at once: every answer is right."""
    source = random.Random(depth * 2 + load_async)
    prefixes = [a_prompt(seed, 16) for seed in range(3)]
    prompts = [[*source.choice(prefixes), *a_prompt(9 + i % 4, 5 + i % 3)] for i in range(10)]
    right = [plain_answer(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
    for _ in range(3):
        async with an_engine(tmp_path, load_async=load_async, depth=depth, num_blocks=20) as engine:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(engine, prompt)) for prompt in prompts]
                group.create_task(_ask_and_leave(engine, prompts[0]))
                await asyncio.sleep(0.02)
                await asyncio.to_thread(damage_some, tmp_path, source)
            assert [list(task.result().token_ids) for task in tasks] == right
            await settled(engine)
            assert engine.snapshot().stats.num_stray_reports == 0
        await asyncio.to_thread(damage_some, tmp_path, source)


@modes
async def test_b21_b27_sharers_of_bad_blocks_answer_right(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    """One load fails beneath several requests, which compute it again in different steps."""
    prefix = a_prompt(0, 16)
    prompts = [[*prefix, *a_prompt(9 + i, 5 + i % 3)] for i in range(6)]
    async with an_engine(tmp_path) as engine:
        await ask(engine, prompts[0])
    for folder in folders(tmp_path):
        path = folder / "layer_001.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    async with an_engine(tmp_path, load_async=load_async, depth=depth, num_blocks=200) as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(engine, prompt)) for prompt in prompts]
        for prompt, task in zip(prompts, tasks, strict=True):
            assert list(task.result().token_ids) == plain_answer(MODEL, prompt, NUM_TOKENS)


async def _ask_and_leave(engine: AsyncEngine, prompt: list[int]) -> None:
    stream = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=30))
    async for _ in stream:
        break
    await stream.aclose()


@pytest.mark.parametrize("load_async", [False, True])
async def test_under_fail_the_request_ends_and_nothing_bad_is_hit_again(
    tmp_path: Path, load_async: bool
) -> None:
    prompt = a_prompt(4, 30)
    async with an_engine(tmp_path) as engine:
        await ask(engine, prompt)
    async with an_engine(tmp_path, load_async=load_async, policy="fail") as engine:
        good = await ask(engine, prompt[:17])
        assert good.usage.num_external_cached_tokens == 16
        await settled(engine)
        for folder in folders(tmp_path):
            path = folder / "layer_001.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        assert engine.reset_prefix_cache()
        failed = await ask(engine, prompt)
        assert failed.finish_reason == "error"
        for _ in range(2):
            again = await ask(engine, prompt)
            assert list(again.token_ids) == plain_answer(MODEL, prompt, NUM_TOKENS)
        await settled(engine)


async def test_an_engine_that_closes_at_once_keeps_what_its_answer_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `chat -p` does: the last token, and out."""
    write, slow = KVFolders.write, threading.Event()

    def slower(*arguments: object) -> object:
        slow.wait(0.1)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(KVFolders, "write", slower)
    prompt = a_prompt(5, 30)
    async with an_engine(tmp_path) as engine:
        await ask(engine, prompt)
    async with an_engine(tmp_path) as engine:
        assert (await ask(engine, prompt)).usage.num_external_cached_tokens == 28


@modes
async def test_b06_sessions_that_come_back_from_the_disk_get_their_own_kv(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    """Eight conversations, driven off the device by other traffic, all come back at once."""
    sessions = [[*a_prompt(50, 12), *a_prompt(51 + i, 9)] for i in range(8)]
    turns = [
        [*turn, *plain_answer(MODEL, turn, NUM_TOKENS), *a_prompt(80 + i, 3)]
        for i, turn in enumerate(sessions)
    ]
    right = [plain_answer(MODEL, turn, NUM_TOKENS) for turn in turns]
    async with an_engine(tmp_path, load_async=load_async, depth=depth, num_blocks=30) as engine:
        for turn in sessions:
            await ask(engine, turn)
        for seed in range(4):
            await ask(engine, a_prompt(200 + seed, 60))
        await settled(engine)
        before = engine.snapshot().stats.num_external_cached_tokens
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(engine, turn)) for turn in turns]
        assert [list(task.result().token_ids) for task in tasks] == right
        assert engine.snapshot().stats.num_external_cached_tokens > before
