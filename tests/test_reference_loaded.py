"""The same answers with KV that a connector loads: from files, and where some blocks fail."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from reference import CASES, GREEDY, all_together, check

from interlace import AsyncEngine, EngineConfig, KVTransferConfig
from interlace.connectors.conformance import Async, Rule, Script, Sync

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE = 16


@asynccontextmanager
async def _engine(
    model: LoadedModel,
    connector: str,
    extra: dict[str, Any],
    *,
    depth: int = 1,
    policy: Literal["fail", "recompute"] = "recompute",
) -> AsyncIterator[AsyncEngine]:
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )
    config = EngineConfig(
        max_inflight_steps=depth, block_size=BLOCK_SIZE, kv_transfer_config=transfer
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        yield engine


NOTHING = Rule(answers=((0, False),))


class Saved:
    """KV of all cases, prompts and answers: saved once, by the first test that needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = Script(default=NOTHING)
        self._in_files = self._in_memory = False

    async def in_files(self, model: LoadedModel) -> dict[str, Any]:
        extra = {"shared_storage_path": str(self.folder)}
        if not self._in_files:
            async with _engine(model, "ExampleConnector", extra) as engine:
                for answer in await all_together(engine):
                    assert answer.usage.num_external_cached_tokens == 0
        self._in_files = True
        return extra

    async def in_memory(self, model: LoadedModel, rule: Rule) -> dict[str, Any]:
        extra = {"script": self.script}
        self.script.default = NOTHING
        if not self._in_memory:
            async with _engine(model, "ScriptedConnector", extra) as engine:
                await all_together(engine)
        self._in_memory = True
        self.script.default = rule
        return extra


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize(("load_async", "depth"), [(False, 1), (True, 2)])
async def test_loaded_from_files(
    default_model: LoadedModel, saved: Saved, load_async: bool, depth: int
) -> None:
    extra = await saved.in_files(default_model) | {"load_async": load_async}
    async with _engine(default_model, "ExampleConnector", extra, depth=depth) as engine:
        for answer in await all_together(engine):
            usage = answer.usage
            reused = usage.num_external_cached_tokens + usage.num_local_cached_tokens
            assert reused >= (usage.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert engine.snapshot().stats.num_external_cached_tokens > 1000
        assert engine.snapshot().stats.num_invalid_blocks == 0


@pytest.mark.parametrize(("kind", "depth"), [(Sync, 2), (Async, 1)])
async def test_loaded_with_random_blocks_failing(
    default_model: LoadedModel, saved: Saved, kind: type[Sync] | type[Async], depth: int
) -> None:
    failing = frozenset(random.Random(depth).sample(range(70), 12))
    rule = Rule(answers=(kind(),), fail=failing, load_delay=depth, save=False)
    extra = await saved.in_memory(default_model, rule)
    async with _engine(default_model, "ScriptedConnector", extra, depth=depth) as engine:
        await all_together(engine)
        stats = engine.snapshot().stats
        assert stats.num_invalid_blocks > 0
        assert stats.num_external_cached_tokens > 0


async def test_under_fail_the_request_ends_and_nothing_of_it_is_hit_again(
    default_model: LoadedModel, saved: Saved
) -> None:
    case = next(case for case in CASES if case["n_prompt"] > 100)
    extra = await saved.in_memory(
        default_model, Rule(answers=(Sync(),), fail=frozenset({0}), save=False)
    )
    async with _engine(default_model, "ScriptedConnector", extra, policy="fail") as engine:
        broken = await engine.complete(case["prompt"], GREEDY)
        assert (broken.finish_reason, broken.token_ids) == ("error", ())
        saved.script.default = NOTHING
        again = await engine.complete(case["prompt"], GREEDY)
        check(case, again)
        assert again.usage.num_local_cached_tokens == 0
