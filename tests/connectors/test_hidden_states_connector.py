"""ExampleHiddenStatesConnector: files equal transformers' hidden states, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import PATIENCE_S
from hidden_states_kit import (
    ALL_STATES,
    a_prompt,
    assert_equal_states,
    one_torch_thread,
    reference_model,
)
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_model import tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors import (
    ExampleHiddenStatesConnector,
    KVConnectorFactory,
    example_hidden_states_worker,
)
from interlace.connectors.example_hidden_states_files import StatesFile, path_of
from interlace.connectors.example_hidden_states_messages import (
    HiddenStatesMetadata,
    HiddenStatesReport,
    SaveOrder,
)
from interlace.connectors.example_hidden_states_scheduler import HiddenStatesScheduler
from interlace.connectors.example_hidden_states_worker import HiddenStatesWorker
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import KVConnectorOutput, KVConnectorRole
from interlace.engine.outputs import Completion
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.layers.virtual_lanes import VirtualLanes

BLOCK = 4
MODEL = reference_model()[0]
depths = pytest.mark.parametrize("depth", [1, 2])


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def a_config(
    root: Path,
    *,
    ids: tuple[int, ...] = (0, 3),
    depth: int = 1,
    num_workers: int = 1,
    num_blocks: int = 100,
    budget: int = 512,
    role: Any = "kv_producer",
    **options: Any,
) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=budget,
        max_inflight_steps=depth,
        tensor_parallel_size=num_workers,
        hidden_state_layer_ids=ids,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(root), **options},
        ),
    )


class StillClock:
    """Statistics are kept for some seconds: here for ever."""

    def monotonic(self) -> float:
        return 0.0


@asynccontextmanager
async def an_engine(root: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    config = a_config(root, **options)
    async with AsyncEngine.from_loaded(config, MODEL, clock=StillClock()) as engine:
        yield engine


async def ask(
    engine: AsyncEngine, prompt: list[int], *, max_tokens: int = 1, request_id: str | None = None
) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S):
        return await engine.complete(prompt, params, request_id=request_id)


def path_in(answer: Completion) -> Path:
    assert answer.kv_transfer_params is not None
    assert answer.kv_transfer_params.keys() == {"hidden_states_path"}
    return Path(answer.kv_transfer_params["hidden_states_path"])


async def check(answer: Completion, prompt: Sequence[int], ids: Sequence[int] = (0, 3)) -> None:
    """The file is there as soon as the answer is, and right."""
    await asyncio.to_thread(check_file, path_in(answer), prompt, ids)


def check_file(path: Path, prompt: Sequence[int], ids: Sequence[int]) -> None:
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"hidden_states", "token_ids"}
        assert file.get_tensor("token_ids").tolist() == list(prompt)
        assert file.metadata() == {"hidden_state_layer_ids": ",".join(map(str, ids))}
        assert_equal_states(file.get_tensor("hidden_states"), prompt, ids)


async def files_in(root: Path) -> list[str]:
    return await asyncio.to_thread(lambda: sorted(path.name for path in root.iterdir()))


# -------------------------------------------------------------------- right states


@depths
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("budget", [5, 512])
async def test_the_file_is_there_with_the_answer_and_equals_transformers(
    tmp_path: Path, depth: int, num_workers: int, budget: int
) -> None:
    async with an_engine(
        tmp_path, ids=ALL_STATES, depth=depth, num_workers=num_workers, budget=budget
    ) as engine:
        for length in (1, 4, 23):
            prompt = a_prompt(length, length)
            await check(await ask(engine, prompt, request_id=f"r{length}"), prompt, ALL_STATES)
        stats = engine.snapshot().kv_connector_stats
    assert await files_in(tmp_path) == [f"r{length}.safetensors" for length in (1, 23, 4)]
    assert stats["written"] == 3


@depths
async def test_prefix_hits_bring_the_states_of_those_who_computed_them(
    tmp_path: Path, depth: int
) -> None:
    first = a_prompt(1, 18)
    async with an_engine(tmp_path, depth=depth, budget=7) as engine:
        answer = await ask(engine, first, max_tokens=9)
        await check(answer, first, (0, 3))
        # The whole prompt again; a part that ends within a block; one with the answer in it.
        for prompt in (first, [*first[:11], *a_prompt(5, 6)], [*first, *answer.token_ids, 7]):
            again = await ask(engine, prompt)
            assert again.usage.num_local_cached_tokens >= 10
            await check(again, prompt)


@depths
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_preempted_and_crowded_requests_are_right(
    tmp_path: Path, depth: int, num_workers: int
) -> None:
    prefixes = [a_prompt(seed, 8) for seed in range(2)]
    prompts = [[*prefixes[i % 2], *a_prompt(9 + i, 4 + i)] for i in range(7)]
    async with an_engine(
        tmp_path, ids=(1, 2, 3), depth=depth, num_workers=num_workers, num_blocks=16, budget=9
    ) as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(engine, prompt, max_tokens=12)) for prompt in prompts]
        for prompt, task in zip(prompts, tasks, strict=True):
            await check(task.result(), prompt, (1, 2, 3))
        stats = engine.snapshot().stats
        assert stats.num_preemptions > 0
        assert stats.num_stray_reports == 0
    assert len(await files_in(tmp_path)) == len(prompts)


async def test_a_prompt_is_saved_once_though_it_is_preempted_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = StatesFile.write

    def noting(self: StatesFile, *args: Any) -> None:
        written.append(self._path.name)
        write(self, *args)

    monkeypatch.setattr(StatesFile, "write", noting)
    prompts = [a_prompt(i, 9) for i in range(3)]
    async with an_engine(tmp_path, num_blocks=16) as engine:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(ask(engine, prompt, max_tokens=25))
        assert engine.snapshot().stats.num_preemptions > 0
    assert len(written) == len(set(written)) == 3


async def test_bfloat16_is_stored_as_it_is(tmp_path: Path) -> None:
    config = a_config(tmp_path, ids=(1,))
    async with AsyncEngine.from_loaded(config, tiny_model(dtype=torch.bfloat16)) as engine:
        path = path_in(await ask(engine, [3, 1, 4, 1, 5]))
    with safe_open(path, "pt") as file:
        states = file.get_tensor("hidden_states")
    assert (states.dtype, tuple(states.shape)) == (torch.bfloat16, (5, 1, 32))
    assert states.isfinite().all()


# -------------------------------------------------------------------- files and names


async def test_files_are_for_their_owner_and_replaced_in_one_go(tmp_path: Path) -> None:
    root = tmp_path / "made" / "here"
    async with an_engine(root) as engine:
        path = path_in(await ask(engine, a_prompt(1, 5), request_id="same"))
        before = await asyncio.to_thread(path.stat)
        assert stat.S_IMODE(before.st_mode) == 0o600
        assert stat.S_IMODE((await asyncio.to_thread(root.stat)).st_mode) == 0o700
        prompt = a_prompt(2, 9)
        await check(await ask(engine, prompt, request_id="same"), prompt)
        after = await asyncio.to_thread(path.stat)
        assert after.st_ino != before.st_ino, "another file, renamed into place"
        assert await files_in(root) == ["same.safetensors"]


HOSTILE = [
    "../x",
    "a/b",
    "/etc/passwd",
    "..",
    ".hidden",
    "nul\0l",
    "é☃",
    "\ud800",
    "new\nline",
    "x" * 5000,
    "sha256-" + "0" * 64,
]


async def test_no_request_id_leaves_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "inside"
    async with an_engine(root) as engine:
        paths = set()
        for i, request_id in enumerate(HOSTILE):
            prompt = a_prompt(i, 5)
            answer = await ask(engine, prompt, request_id=request_id)
            await check(answer, prompt)
            paths.add(path_in(answer))
    assert len(paths) == len(HOSTILE)
    assert {path.parent for path in paths} == {root}
    assert sorted(path.name for path in paths) == await files_in(root)
    assert await files_in(tmp_path) == ["inside"]


@given(st.text(), st.text())
@example("", ".")
@example("a", "A")
@example("sha256-", "sha256-x")
@example("a.safetensors", "a")
def test_paths_are_names_in_the_folder_and_tell_ids_apart(one: str, other: str) -> None:
    root = Path("/states")
    path = path_of(root, one)
    assert path.parent == root
    assert not path.name.startswith(".")
    assert "\0" not in str(path)
    assert len(path.name.encode()) < 255
    assert (path == path_of(root, other)) == (one == other)


# -------------------------------------------------------------------- bad ends


@depths
async def test_who_is_aborted_leaves_no_file(tmp_path: Path, depth: int) -> None:
    async with an_engine(tmp_path, depth=depth, budget=4) as engine:
        stream = engine.generate(
            a_prompt(1, 9), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        )
        async for _ in stream:
            break  # the prompt is complete, its file written
        await stream.aclose()
        early = engine.generate(a_prompt(2, 40), SamplingParams(temperature=0))
        await asyncio.sleep(0)
        await early.aclose()
        # Both ends were told to the worker with the step of this one.
        prompt = a_prompt(3, 9)
        await check(await ask(engine, prompt), prompt)
    assert len(await files_in(tmp_path)) == 1


async def test_an_id_that_was_aborted_can_be_used_at_once(tmp_path: Path) -> None:
    prompt = a_prompt(2, 7)
    async with an_engine(tmp_path) as engine:
        for _ in range(5):
            params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
            async for _ in (stream := engine.generate(a_prompt(1, 9), params, request_id="x")):
                break
            await stream.aclose()
            await check(await ask(engine, prompt, request_id="x"), prompt)
    assert await files_in(tmp_path) == ["x.safetensors"]


@depths
@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_a_full_disk_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, max_tokens: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    prompt = a_prompt(1, 9)
    async with an_engine(tmp_path, depth=depth) as engine:
        right = await ask(engine, prompt, max_tokens=max_tokens, request_id="before")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", full)
            for _ in range(2):
                answer = await ask(engine, prompt, max_tokens=max_tokens)
                assert answer.kv_transfer_params == {
                    "hidden_states_error": "No space left on device"
                }
                assert answer.token_ids == right.token_ids
        await check(await ask(engine, prompt, request_id="after"), prompt)
        stats = engine.snapshot().kv_connector_stats
    assert (stats["failed"], stats["written"]) == (2, 2)
    assert await files_in(tmp_path) == ["after.safetensors", "before.safetensors"]


async def test_bad_news_reach_the_answer_through_multi_connector_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    child = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    config = dataclasses.replace(
        a_config(tmp_path),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"connectors": [child]},
        ),
    )
    prompt = a_prompt(1, 9)
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        await check(await ask(engine, prompt), prompt)
        monkeypatch.setattr(StatesFile, "write", full)
        answer = await ask(engine, prompt)
    assert answer.kv_transfer_params == {"hidden_states_error": "No space left on device"}


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until the event is set."""
    event = threading.Event()
    write = StatesFile.write

    def waiting(self: StatesFile, *args: Any) -> None:
        assert event.wait(PATIENCE_S)
        write(self, *args)

    monkeypatch.setattr(StatesFile, "write", waiting)
    yield event
    event.set()


async def test_a_disk_that_hangs_is_waited_for_once(
    tmp_path: Path, hanging_disk: threading.Event
) -> None:
    async with an_engine(tmp_path, deadline_s=0.05) as engine:
        for _ in range(4):
            answer = await ask(engine, a_prompt(1, 9), max_tokens=3)
            assert answer.kv_transfer_params is not None
            assert "0.05 s" in answer.kv_transfer_params["hidden_states_error"]
        hanging_disk.set()
        prompt = a_prompt(2, 9)
        async with asyncio.timeout(PATIENCE_S):
            answer = await ask(engine, prompt, request_id="good")
            while "hidden_states_error" in (answer.kv_transfer_params or {}):
                answer = await ask(engine, prompt, request_id="good")
        await check(answer, prompt)
    assert await files_in(tmp_path) == ["good.safetensors"], "what came too late is not there"


# -------------------------------------------------------------------- bad blocks


class Messages:
    """The scheduler side alone, told of one request's steps."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.side = HiddenStatesScheduler(Path("/states"), block_size=BLOCK)
        self.request = Request("r", prompt, SamplingParams(), seed=0, arrival=0, block_size=BLOCK)
        self.blocks = [3, 5, 7]
        self.is_known = False

    def step(self, start: int, num_tokens: int, *, resumed: bool = False) -> HiddenStatesMetadata:
        new, cached = [], CachedRequestData()
        if not self.is_known:
            prompt, params = self.request.prompt_token_ids, self.request.sampling_params
            new = [NewRequestData("r", prompt, params, 0, (list(self.blocks),), start)]
            self.is_known = True
        else:
            added = (list(self.blocks),) if resumed else None
            cached = CachedRequestData(["r"], {"r"} if resumed else set(), [added], {}, [start])
        message = SchedulerOutput(
            1, new, cached, {"r": num_tokens}, num_tokens, frozenset(), frozenset(), frozenset()
        )
        return self.side.build_connector_meta(message)

    def empty_step(self) -> HiddenStatesMetadata:
        nobody: frozenset[str] = frozenset()
        message = SchedulerOutput(1, [], CachedRequestData(), {}, 0, nobody, nobody, nobody)
        return self.side.build_connector_meta(message)

    def apply(self, report: HiddenStatesReport | None, invalid: set[int] | None = None) -> None:
        self.side.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=report, invalid_block_ids=invalid or set())
        )

    def end(self, status: RequestStatus) -> dict[str, Any] | None:
        self.request.status = status
        self.request.response_kv_transfer_params = self.side.request_finished(self.request)
        return self.request.response_kv_transfer_params


def test_what_was_saved_from_bad_blocks_is_withdrawn_and_saved_again() -> None:
    it = Messages(a_prompt(1, 10))
    assert it.step(0, 9).saves == ()
    (first,) = it.step(9, 1).saves
    assert first.block_ids == (3, 5, 7)
    it.apply(HiddenStatesReport(frozenset({first.save_id})), {5})
    it.blocks = [3, 6, 8]
    again = it.step(4, 6, resumed=True)
    assert again.withdrawn == {first.save_id}
    (second,) = again.saves
    assert second.block_ids == (3, 6, 8)
    it.apply(HiddenStatesReport(frozenset({second.save_id})))
    assert it.end(RequestStatus.FINISHED_STOPPED) == {"hidden_states_path": "/states/r.safetensors"}
    last = it.empty_step()
    assert last == HiddenStatesMetadata(settled=frozenset({second.save_id}))
    assert it.empty_step() == HiddenStatesMetadata()


def test_a_save_of_a_step_behind_the_bad_one_is_withdrawn_before_its_report() -> None:
    it = Messages(a_prompt(1, 10))
    it.step(0, 9)
    (order,) = it.step(9, 1).saves
    it.apply(None, {3})  # of the step before
    it.apply(HiddenStatesReport(frozenset({order.save_id})))
    (second,) = (again := it.step(0, 10)).saves
    assert again.withdrawn == {order.save_id}
    it.apply(HiddenStatesReport(frozenset({second.save_id})))
    assert it.end(RequestStatus.FINISHED_LENGTH_CAPPED) is not None


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("is_reported", [True, False])
def test_who_ends_badly_is_told_no_path_and_its_file_goes(
    status: RequestStatus, is_reported: bool
) -> None:
    it = Messages(a_prompt(1, 10))
    (order,) = it.step(0, 10).saves
    report = HiddenStatesReport(frozenset({order.save_id}))
    if is_reported:
        it.apply(report)
    assert it.end(status) is None
    if not is_reported:
        it.apply(report)
    assert it.empty_step() == HiddenStatesMetadata(withdrawn=frozenset({order.save_id}))


def test_bad_news_of_the_very_step_that_ends_a_request_reach_its_answer() -> None:
    it = Messages(a_prompt(1, 10))
    (order,) = it.step(0, 10).saves
    params = it.end(RequestStatus.FINISHED_LENGTH_CAPPED)
    assert params == {"hidden_states_path": "/states/r.safetensors"}
    it.apply(HiddenStatesReport(failed={order.save_id: "disk full"}))
    assert it.request.response_kv_transfer_params == {"hidden_states_error": "disk full"}


# -------------------------------------------------------------------- the lane


@pytest.mark.parametrize("policy", ["eager", "lazy", "seed"])
@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_the_step_ends_when_its_files_are_written_in_any_order_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, most_bytes: int
) -> None:
    monkeypatch.setattr(example_hidden_states_worker, "_MOST_BYTES", most_bytes)
    lane = VirtualLanes(3, policy).lane("store")
    worker = HiddenStatesWorker(tmp_path, lane, layer_ids=(1,), deadline_s=1.0)
    pages = torch.arange(8 * BLOCK * 2, dtype=torch.float64).view(8, BLOCK, 1, 2)
    worker.register({"model.layers.0.self_attn.attn": pages, "cache_only_layers.0": pages})
    orders = [SaveOrder(i, f"r{i}", (9,) * (4 + i), (5, 2)) for i in range(3)]
    worker.start(HiddenStatesMetadata(tuple(orders)))
    worker.copy("model.layers.0.self_attn.attn")
    worker.copy("cache_only_layers.0")
    pages[:] = -1  # the copies are made: nobody reads the pages any more
    assert worker.finish_step() == HiddenStatesReport(frozenset({0, 1, 2}))
    for i in range(3):
        with safe_open(tmp_path / f"r{i}.safetensors", "pt") as file:
            states = file.get_tensor("hidden_states")
        assert states.flatten().tolist() == [*range(40, 48), *range(16, 24)][: 2 * (4 + i)]
    worker.start(HiddenStatesMetadata(withdrawn=frozenset({1}), settled=frozenset({0})))
    assert worker.finish_step() is None
    worker.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r0.safetensors", "r2.safetensors"]


# -------------------------------------------------------------------- configuration


async def test_without_the_engine_option_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="hidden_state_layer_ids"):
        async with an_engine(tmp_path, ids=()):
            pass


def test_two_cache_only_layers_are_refused(tmp_path: Path) -> None:
    config = a_config(tmp_path).resolved(num_gpu_blocks_override=8)
    worker = KVConnectorFactory().create_connector(config, KVConnectorRole.WORKER)
    pages = torch.zeros(8, BLOCK, 2, 32)
    with pytest.raises(ConnectorError, match="exactly one"):
        worker.register_kv_caches({"cache_only_layers.0": pages, "cache_only_layers.1": pages})
    worker.shutdown()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_storage_path": ""}, "shared_storage_path"),
        ({"shared_storage_path": "a\0b"}, "shared_storage_path"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"path": "x"}, "path"),
        ({"role": "kv_consumer"}, "kv_producer"),
    ],
)
async def test_bad_options_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with an_engine(tmp_path, **changes):
            pass


async def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "file").write_text, "")
    with pytest.raises(ConfigError, match="shared_storage_path"):
        async with an_engine(tmp_path / "file"):
            pass


def test_what_the_class_says_of_itself(tmp_path: Path) -> None:
    cls = ExampleHiddenStatesConnector
    assert cls.get_required_kvcache_layout(a_config(tmp_path)) == "NHD"
    assert cls.requires_piecewise_for_cudagraph({})
    setup = cls.check_setup(tmp_path)
    assert setup.extra_config == {"shared_storage_path": str(tmp_path)}
    assert setup.engine_options == {"hidden_state_layer_ids": (0, 2)}
