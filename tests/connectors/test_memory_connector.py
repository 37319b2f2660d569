"""`MemoryConnector` is right in every situation: what broken connectors are made of must be."""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

import pytest
from connected import prompt_of
from memory_connector import MemoryConnector
from memory_store import FAULTS, MemoryStore
from paged_oracle import LAYER, answer, paint_after_fences
from scheduling import Stepper, make_scheduler

from interlace.engine.config import EngineConfig, KVTransferConfig, ModelConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)
from interlace.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from interlace.engine.request import Request, RequestStatus
from interlace.layers.virtual_lanes import VirtualLanes

BLOCK_SIZE = 4
every_way = pytest.mark.parametrize(
    ("load_async", "save_async", "depth"),
    list(itertools.product([False, True], [False, True], [1, 2])),
)


def make_sides(seed: int = 0, **options: Any) -> tuple[MemoryConnector, MemoryConnector]:
    """(scheduler side, worker side) whose lanes the seed drives."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MemoryConnector", kv_role="kv_both", kv_connector_extra_config=options
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        lanes=VirtualLanes(seed),
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=65,
        max_inflight_steps=1,
    )
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, None, 8 * BLOCK_SIZE)
    cache = KVCacheConfig(65, (KVCacheGroupSpec((LAYER,), spec),))
    worker = MemoryConnector(config, KVConnectorRole.WORKER, cache)
    return MemoryConnector(config, KVConnectorRole.SCHEDULER, cache), worker


class World:
    """A stepper over a `MemoryConnector`."""

    def __init__(
        self,
        store: MemoryStore,
        *,
        load_async: bool = False,
        save_async: bool = False,
        seed: int = 0,
        policy: Literal["fail", "recompute"] = "recompute",
        **scheduler: Any,
    ) -> None:
        self.scheduler_side, self.worker_side = make_sides(
            seed, store=store, load_async=load_async, save_async=save_async
        )
        self.stepper = Stepper(
            make_scheduler(connector=self.scheduler_side, failure_policy=policy, **scheduler),
            self.worker_side,
        )
        if save_async:
            paint_after_fences(self.stepper.runner)

    def run(self, *requests: Request) -> None:
        """To the end, where nothing is left and all answers are right."""
        self.stepper.run()
        self.assert_idle()
        for request in requests:
            tokens = self.stepper.outputs[request.request_id]
            assert tokens == answer(request.prompt_token_ids, len(tokens))
            assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED

    def assert_idle(self) -> None:
        self.stepper.assert_idle()
        assert self.scheduler_side.what_is_left() == []
        assert self.worker_side.what_is_left() == []
        assert self.stepper.scheduler.stats.num_stray_reports == 0


def fill(store: MemoryStore, num_tokens: int, **options: Any) -> None:
    """Store the blocks of `prompt_of(num_tokens)`."""
    world = World(store, max_num_batched_tokens=400, **options)
    world.run(world.stepper.add(prompt_of(num_tokens), max_tokens=1))
    assert len(store) >= num_tokens // BLOCK_SIZE


@every_way
def test_hits_at_all_offsets(load_async: bool, save_async: bool, depth: int) -> None:
    for num_stored, more in itertools.product(range(0, 25, 4), (1, 4, 7)):
        store = MemoryStore()
        fill(store, num_stored, save_async=save_async) if num_stored else None
        world = World(store, load_async=load_async, save_async=save_async, depth=depth)
        request = world.stepper.add(prompt_of(num_stored + more), max_tokens=9)
        world.run(request)
        assert request.num_external_cached_tokens == num_stored
        assert len(store) == (num_stored + more + 8) // 4 - (depth == 2 and (more % 4 == 0))


@every_way
def test_full_hits(load_async: bool, save_async: bool, depth: int) -> None:
    store = MemoryStore()
    fill(store, 16)
    world = World(store, load_async=load_async, save_async=save_async, depth=depth)
    request = world.stepper.add(prompt_of(16), max_tokens=6)
    world.run(request)
    assert request.num_external_cached_tokens == 15


@every_way
def test_random_traffic(load_async: bool, save_async: bool, depth: int) -> None:
    """Tiny pools, chunks, shared prefixes, aborts at any moment, stores that fail."""
    for seed in range(4):
        store = MemoryStore()
        for again in range(3):
            _traffic(store, random.Random(f"{seed} {again}"), seed, load_async, save_async, depth)


def _traffic(
    store: MemoryStore,
    draw: random.Random,
    seed: int,
    load_async: bool,
    save_async: bool,
    depth: int,
) -> None:
    world = World(
        store,
        load_async=load_async,
        save_async=save_async,
        depth=depth,
        seed=seed,
        num_blocks=draw.choice([9, 12, 20]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
    )
    requests: list[Request] = []
    for _ in range(10):
        prompt = prompt_of(draw.choice([3, 8, 13, 16, 20]))
        if draw.random() < 0.4:
            prompt[draw.randrange(len(prompt)) :] = [1, 2, 3]
        salt = draw.choice([None, None, "salt"])
        requests.append(
            world.stepper.add(prompt, max_tokens=draw.randrange(1, 12), cache_salt=salt)
        )
        for _ in range(draw.randrange(6)):
            world.stepper.launch()
            if world.stepper.inflight and draw.random() < 0.7:
                world.stepper.apply()
            if draw.random() < 0.15:
                victim = draw.choice(requests)
                world.stepper.scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)
            if draw.random() < 0.3 and store._records:
                key = draw.choice(list(store._records))
                world.worker_side.inject_store_fault(draw.choice(list(FAULTS)), key)
    world.run(*(r for r in requests if r.status is not RequestStatus.FINISHED_ABORTED))


@every_way
@pytest.mark.parametrize("kind", list(FAULTS))
def test_failures_are_reported_exactly(
    kind: str, load_async: bool, save_async: bool, depth: int
) -> None:
    for damaged in range(5):
        store = MemoryStore()
        fill(store, 20)
        world = World(store, load_async=load_async, save_async=save_async, depth=depth)
        request = world.stepper.add(prompt_of(21), max_tokens=6)
        key = request.block_hashes[damaged]
        assert world.worker_side.inject_store_fault(kind, key) == [key]
        world.run(request)
        assert world.stepper.scheduler.stats.num_invalid_blocks == 1
        assert len(store) == 6
        assert store.get(key, 0).read(0).any()


@pytest.mark.parametrize("load_async", [False, True])
def test_a_failing_request_publishes_nothing_on_bad_ground(load_async: bool) -> None:
    store = MemoryStore()
    fill(store, 12)
    world = World(store, load_async=load_async, policy="fail")
    request = world.stepper.add(prompt_of(25), max_tokens=4)
    world.worker_side.inject_store_fault("flipped", request.block_hashes[1])
    world.stepper.run()
    world.assert_idle()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert len(store) == 2


def test_events_tell_of_what_is_stored_removed_and_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    fill(store, 12)
    world = World(store)
    request = world.stepper.add(prompt_of(17), max_tokens=2)
    hashes = request.block_hashes
    world.worker_side.inject_store_fault("missing", hashes[2])
    events: list[object] = []
    take_events = world.scheduler_side.take_events

    def noted() -> list[KVCacheEvent]:
        taken = list(take_events())
        events.extend(taken)
        return taken

    monkeypatch.setattr(world.scheduler_side, "take_events", noted)
    world.stepper.run()
    assert events == [
        BlockRemoved([hashes[2]], "CPU"),
        *(BlockStored([hashes[i]], hashes[i - 1], [], 0, medium="CPU") for i in (2, 3)),
    ]
    assert world.scheduler_side.reset_cache()
    assert len(store) == 0
    assert list(take_events()) == [AllBlocksCleared()]


@pytest.mark.parametrize("options", [{}, {"store": {}}, {"store": MemoryStore(), "lod_async": 1}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="MemoryStore"):
        make_sides(**options)
