"""Connectors beside the GPU's runner, without a GPU: its kernels under Triton's interpreter, and
copies that arrive steps after they were queued."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams, front_door
from interlace.connectors.example_messages import CopiedSave, ExampleMetadata, Save
from interlace.connectors.example_saves import WorkerSaves
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.pages import HostPages, LayerPages
from interlace.connectors.kv_folders.writer import FolderWriter, SaveEnd
from interlace.engine.outputs import Completion
from interlace.engine.ports import Gate
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.kernels import matvec
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.lanes import ThreadGate
from interlace.layers.virtual_lanes import VirtualLanes

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
PATIENCE_S = 60.0
MODEL = tiny_model(dtype=torch.float32)
PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 4, 4]
NUM_TOKENS = 3


# ---------------------------------------------------------------- a whole engine


class Late:
    """A gate that opens when it is asked for the fourth time, or waited for."""

    error = None

    def __init__(self) -> None:
        self._num_asked = 0

    def query(self) -> bool:
        self._num_asked += 1
        return self._num_asked > 3

    def wait(self, timeout_s: float | None = None) -> bool:
        self._num_asked = 4
        return True


def _gpu_runner(
    config: EngineConfig, loaded: Any, pages: Sequence[Any], workers: Sequence[Any], progress: Any
) -> GpuRunner:
    scheduler = config.scheduler_config
    (only,) = pages
    return GpuRunner(
        loaded.decoder,
        only,
        (),
        workers,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_sms=4,
    )


@pytest.fixture
def _on_the_gpus_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "_make_runner", _gpu_runner)
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)
    monkeypatch.setattr(HostPages, "copied", lambda _: Late())


async def _one_answer(root: Path, *, load_async: bool, depth: int) -> Completion:
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks_override=20,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_inflight_steps=depth,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "shared_storage_path": str(root),
                "load_async": load_async,
                "refresh_s": 0.02,
            },
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S), AsyncEngine.from_loaded(config, MODEL) as engine:
        return await engine.complete(PROMPT, params)


@pytest.mark.usefixtures("_on_the_gpus_runner")
@pytest.mark.parametrize(("load_async", "depth"), [(False, 2), (True, 1)])
async def test_saved_with_late_copies_and_loaded_again(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    right = plain_answer(MODEL, PROMPT, NUM_TOKENS)
    first = await _one_answer(tmp_path, load_async=False, depth=depth)
    assert list(first.token_ids) == right
    second = await _one_answer(tmp_path, load_async=load_async, depth=depth)
    assert list(second.token_ids) == right
    assert second.usage.num_external_cached_tokens == 8


# ---------------------------------------------------------------- saves whose copies are under way


class Pages(HostPages):
    """Whose copies arrive when the test says so."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__(pages)
        self.gates: list[ThreadGate] = []

    def copied(self) -> Gate:
        self.gates.append(ThreadGate())
        return self.gates[-1]


class Saving:
    def __init__(self, root: Path) -> None:
        self.folders = KVFolders(root, KVIdentity(model="ab" * 32, dtype="float32", block_size=4))
        self.folders.prepare()
        self.lanes, self.tally = VirtualLanes(0, "eager"), Tally()
        writer = FolderWriter(self.folders, self.tally, self.lanes, queue_bytes=1 << 20)
        self.saves = WorkerSaves(writer, rank=0, queue_bytes=1 << 20)
        self.first, self.second = (Pages(torch.ones(9, 2, 4, 1, 2)) for _ in range(2))
        layers: dict[str, LayerPages] = {"a": self.first, "b": self.second}
        self.saves.register(layers)

    def step(
        self,
        *save_ids: int,
        publish: frozenset[int] = frozenset(),
        discard: frozenset[int] = frozenset(),
    ) -> None:
        saves = tuple(
            Save(i, bytes(32), (i.to_bytes(32, "big"),), (i,), is_filled=False) for i in save_ids
        )
        self.saves.start(ExampleMetadata(saves=saves, publish=publish, discard=discard))
        for name in ("a", "b"):
            self.saves.copy_layer(name)
        self.saves.finish_step()

    def ends(self) -> list[tuple[int, SaveEnd]]:
        return [(ended.save_id, ended.end) for ended in self.saves.take_ended()]


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(tmp_path)


def test_a_save_is_reported_when_it_has_arrived_and_in_order(saving: Saving) -> None:
    saving.step(1, 2)
    saving.step(3)
    saving.step()
    one, three = saving.first.gates
    assert not saving.second.gates, "one gate for all layers and saves of a step"
    three.end(None)
    saving.saves.finish_step()
    assert saving.saves.take_copied() == ()
    one.end(None)
    saving.saves.finish_step()
    assert saving.saves.take_copied() == tuple(CopiedSave(i, 0) for i in (1, 2, 3))
    saving.step(publish=frozenset({1, 3}), discard=frozenset({2}))
    assert sorted(saving.ends()) == [
        (1, SaveEnd.PUBLISHED),
        (2, SaveEnd.DISCARDED),
        (3, SaveEnd.PUBLISHED),
    ]


def test_a_save_that_is_undone_while_it_arrives_ends(saving: Saving) -> None:
    """The verdict waits for the copy: the writer knows nothing of it before."""
    saving.step(1)
    (gate,) = saving.first.gates
    waits: list[float | None] = []

    def wait(timeout_s: float | None = None) -> bool:
        waits.append(timeout_s)
        gate.end(None)
        return True

    gate.wait = wait  # type: ignore[method-assign]
    saving.step(discard=frozenset({1}))
    assert waits == [None]
    assert saving.ends() == [(1, SaveEnd.DISCARDED)]


def test_closing_waits_for_memory_that_is_still_being_filled(saving: Saving) -> None:
    saving.step(1)
    (gate,) = saving.first.gates
    assert not gate.query()
    saving.saves.close(0.01)
    saving.saves.close(0.01)
    assert saving.saves.take_copied() == ()
