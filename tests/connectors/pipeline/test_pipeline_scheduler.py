"""PipelineConnector's scheduler side in a whole scheduler, over a worker side that copies as late
as it may, in any order, and fails at random. The oracle finds every wrong KV."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, Literal, NamedTuple

import pytest
import torch
from connected import prompt_of
from paged_oracle import LAYER, answer, paint_after_fences
from scheduling import Stepper, make_scheduler

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.pipeline.messages import (
    Load,
    LoadSample,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    RecordRun,
    Share,
    ShareReport,
    StepSample,
)
from interlace.connectors.pipeline.sched_samples import TimedSteps
from interlace.connectors.pipeline.sched_stats import BYTES_OF, LEVELS, PipelineStats
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig, ModelConfig
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorMetadata,
    KVConnectorRole,
)
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.request import Request, RequestStatus
from interlace.engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
RECORD_BYTES = 1000
every_way = pytest.mark.parametrize(
    ("load_mode", "depth"), list(itertools.product(["layerwise", "bulk", "hybrid", "auto"], [1, 2]))
)


class _Saving(NamedTuple):
    runs: tuple[RecordRun, ...]
    order: int


def pairs(runs: tuple[RecordRun, ...]) -> list[tuple[int, int]]:
    """(record, block) of each block."""
    return [(run.record + i, run.block_id + i) for run in runs for i in range(run.num_blocks)]


class LateWorker(KVConnectorBase_V1):
    """Does what `messages.py` says of the worker side, with delays that a test or chance decides.

    It fails the test if it is told to use a record in two ways at once.
    """

    def __init__(self, config: EngineConfig, cache: KVCacheConfig, num_records: int) -> None:
        super().__init__(config, KVConnectorRole.WORKER, cache)
        self.records = torch.full((num_records, BLOCK_SIZE), -2)
        self.draw: random.Random | None = None
        """None: everything ends at once, unless `is_stuck`."""
        self.is_stuck = False
        """No save and no asynchronous load ends by itself."""
        self.fault_rate = 0.0
        self.bad_records: set[int] = set()
        """Their loads fail."""
        self.bad_saves = False
        """All saves fail."""
        self.rate = 0.0
        self.samples: list[StepSample] = []
        self.load_samples: list[LoadSample] = []
        self.metadata: list[PipelineMetadata] = []
        """Of all steps."""
        self.saving: dict[int, _Saving] = {}
        self.loading: list[Load] = []
        self._in_step: list[Load] = []
        self._copied: set[int] = set()
        self._failed: set[int] = set()
        self._loaded: set[int] = set()
        self._shares: dict[int, Share] = {}
        """Of loads from the back, as they were told last."""
        self._num_loaded: dict[int, int] = {}
        self._reports: list[ShareReport] = []
        self._invalid: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = kv_caches[LAYER]

    def get_handshake_metadata(self) -> PipelineHandshake:
        return PipelineHandshake(len(self.records), RECORD_BYTES, self.rate)

    def _says_yes(self, rate: float) -> bool:
        return self.draw is not None and self.draw.random() < rate

    def _ends(self) -> bool:
        return not self.is_stuck and (self.draw is None or self._says_yes(0.4))

    # ---------------------------------------------------------------- a step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, PipelineMetadata)
        for save_id in kv_connector_metadata.fences & self.saving.keys():
            self._end_save(save_id)
        for load in list(self.loading):
            if load.load_id in kv_connector_metadata.lost_loads:
                self.loading.remove(load)
                self._loaded.add(load.load_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PipelineMetadata)
        self.metadata.append(metadata)
        for load in metadata.loads:
            assert not self._written & {record for record, _ in pairs(load.runs)}
            (self.loading if load.is_async else self._in_step).append(load)
            if load.share is not None:
                self._shares[load.load_id] = Share(load.load_id, 0, load.share)
                self._num_loaded[load.load_id] = 0
        under_way = {load.load_id for load in self.loading}
        for share in metadata.shares:
            if share.load_id in under_way:
                least = self._num_loaded[share.load_id]
                num_blocks = max(least, share.num_blocks)
                self._shares[share.load_id] = share._replace(num_blocks=num_blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for load in self._in_step:
            self._copy(load)
        self._in_step = []

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PipelineMetadata)
        for save in metadata.saves:
            written = {record for record, _ in pairs(save.runs)}
            assert not written & (self._written | self._read)
            assert save.save_id not in self.saving
            self.saving[save.save_id] = _Saving(save.runs, len(self.saving))
        for save_id in list(self.saving):
            if self._ends():
                self._end_save(save_id)
        ended = [load for load in self.loading if self._ends() and self._is_copied(load)]
        for load in ended:
            self.loading.remove(load)
        self._reports += self._share_reports(self.loading)
        self._reports += self._share_reports(ended, has_ended=True)
        return set(metadata.release) or None, {load.request_id for load in ended} or None

    def _is_copied(self, load: Load) -> bool:
        """Copies it; one from the back a block at a time, if chance delays things."""
        if load.share is None:
            self._copy(load)
            return True
        share = self._shares[load.load_id].num_blocks
        blocks = pairs(load.runs)
        begun = self._num_loaded[load.load_id]
        end = share if self.draw is None else min(begun + 1, share)
        for record, block_id in reversed(blocks[len(blocks) - end : len(blocks) - begun]):
            self._copy_block(record, block_id)
        self._num_loaded[load.load_id] = end
        if end == share:
            self._loaded.add(load.load_id)
        return end == share

    def _share_reports(self, loads: list[Load], *, has_ended: bool = False) -> list[ShareReport]:
        return [
            ShareReport(*self._shares[load.load_id], self._num_loaded[load.load_id], has_ended)
            for load in loads
            if load.share is not None
        ]

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> PipelineReport | None:
        report = PipelineReport(
            frozenset(self._copied),
            frozenset(self._failed),
            frozenset(self._loaded),
            tuple(self._reports),
            tuple(self.samples),
            tuple(self.load_samples),
        )
        self._copied, self._failed, self._loaded = set(), set(), set()
        self.samples, self.load_samples, self._reports = [], [], []
        return None if report == PipelineReport() else report

    # ---------------------------------------------------------------- copies

    @property
    def _written(self) -> set[int]:
        return {record for saving in self.saving.values() for record, _ in pairs(saving.runs)}

    @property
    def _read(self) -> set[int]:
        return {record for load in self.loading for record, _ in pairs(load.runs)}

    def _end_save(self, save_id: int) -> None:
        saving = self.saving.pop(save_id)
        if self.bad_saves or self._says_yes(self.fault_rate):
            self._failed.add(save_id)
            return
        for record, block_id in pairs(saving.runs):
            self.records[record] = self.pages[block_id]
        self._copied.add(save_id)

    def _copy(self, load: Load) -> None:
        self._loaded.add(load.load_id)
        for record, block_id in pairs(load.runs):
            self._copy_block(record, block_id)

    def _copy_block(self, record: int, block_id: int) -> None:
        if record in self.bad_records or self._says_yes(self.fault_rate / 4):
            self._invalid.add(block_id)
        else:
            self.pages[block_id] = self.records[record]

    # ---------------------------------------------------------------- not this side's

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        raise NotImplementedError

    def update_state_after_alloc(self, *args: Any) -> None:
        raise NotImplementedError

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
        raise NotImplementedError


@dataclasses.dataclass
class World:
    """A stepper over the connector's scheduler side and a `LateWorker`."""

    stepper: Stepper
    connector: PipelineConnector
    worker: LateWorker

    def save(self, prompt: list[int], **options: Any) -> None:
        """Compute a prompt once, and forget it on the device."""
        self.stepper.add(prompt, max_tokens=1, **options)
        self.stepper.run()
        assert self.stepper.scheduler.reset_prefix_cache()

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
        assert self.stepper.scheduler.stats.num_stray_reports == 0
        scheduler, index = self.connector._scheduler, self.connector._scheduler.index
        assert not self.worker.loading
        if self.worker.saving:  # of requests that were aborted without blocks
            self.worker.draw, self.worker.is_stuck = None, False
            self.step_without_work()
        assert scheduler.is_idle, scheduler
        assert index.num_free + index.num_stored == index.num_records

    def step_without_work(self) -> None:
        """Saves that were fenced end with some later step: let one come."""
        self.stepper.add([49], max_tokens=1)
        self.stepper.run()

    def __post_init__(self) -> None:
        self.stats = PipelineStats()
        take = self.connector.get_kv_connector_stats

        def noted() -> KVConnectorStats | None:
            taken = take()
            if taken is not None:
                self.stats.aggregate(taken)
            return taken

        vars(self.connector)["get_kv_connector_stats"] = noted

    def counts(self) -> dict[str, int]:
        """What was counted since the last call, but for what follows from how many blocks there
        are, and how things stand."""
        self.connector.get_kv_connector_stats()
        left_out = LEVELS | set(BYTES_OF.values())
        counts = {name: n for name, n in self.stats.data.items() if name not in left_out}
        self.stats.reset()
        return counts

    def num_promised(self, num_tokens: int) -> int:
        """Tokens of `prompt_of` that a request which is not in the engine would be promised."""
        params = SamplingParams(max_tokens=1)
        asking = Request(
            "asks", prompt_of(num_tokens), params, seed=0, arrival=0, block_size=BLOCK_SIZE
        )
        num_promised, _ = self.connector.get_num_new_matched_tokens(asking, 0)
        assert num_promised is not None
        assert self.connector.request_finished(asking, []) == (False, None)
        return num_promised

    def step_until(self, status: RequestStatus, request: Request) -> None:
        for _ in range(50):
            if request.status is status:
                return
            assert self.stepper.step()
        raise AssertionError(request)


def make_world(
    *,
    num_records: int = 64,
    load_mode: str = "layerwise",
    max_load_stall_ms: float = 20.0,
    role: KVRole = "kv_both",
    policy: Literal["fail", "recompute"] = "recompute",
    rate: float = 0.0,
    **scheduler: Any,
) -> World:
    """`scheduler` are options of `make_scheduler`."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role=role,
            kv_connector_extra_config={
                "load_mode": load_mode,
                "group_size": 1,
                "max_load_stall_ms": max_load_stall_ms,
            },
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=65,
        max_inflight_steps=1,
    )
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, None, 8 * BLOCK_SIZE)
    cache = KVCacheConfig(65, (KVCacheGroupSpec((LAYER,), spec),))
    worker = LateWorker(config, cache, num_records)
    worker.rate = rate
    connector = PipelineConnector(config, KVConnectorRole.SCHEDULER, cache)
    stepper = Stepper(
        make_scheduler(connector=connector, failure_policy=policy, **scheduler), worker
    )
    paint_after_fences(stepper.runner)
    return World(stepper, connector, worker)


# -------------------------------------------------------------------- hits


@every_way
def test_hits_at_all_lengths(load_mode: str, depth: int) -> None:
    for num_stored, more in itertools.product(range(0, 25, 4), (1, 4, 7)):
        world = make_world(load_mode=load_mode, depth=depth)
        if num_stored:
            world.save([*prompt_of(num_stored)])
        request = world.stepper.add(prompt_of(num_stored + more), max_tokens=9)
        world.run(request)
        assert request.num_external_cached_tokens == num_loaded(load_mode, num_stored)


def num_loaded(load_mode: str, num_stored: int) -> int:
    """Without known rates a prompt is split in the middle, unless it is a block."""
    num_blocks = num_stored // BLOCK_SIZE
    return (num_blocks - num_blocks // 2) * BLOCK_SIZE if load_mode == "hybrid" else num_stored


@every_way
def test_a_full_hit_leaves_a_token_to_compute(load_mode: str, depth: int) -> None:
    world = make_world(load_mode=load_mode, depth=depth)
    world.save(prompt_of(16))
    request = world.stepper.add(prompt_of(16), max_tokens=6)
    world.run(request)
    assert request.num_external_cached_tokens == num_loaded(load_mode, 12)


@every_way
def test_answers_are_stored_too(load_mode: str, depth: int) -> None:
    world = make_world(load_mode=load_mode, depth=depth)
    first = world.stepper.add(prompt_of(6), max_tokens=15)
    world.run(first)
    assert world.stepper.scheduler.reset_prefix_cache()
    said = world.stepper.outputs[first.request_id]
    second = world.stepper.add([*prompt_of(6), *said, 3], max_tokens=3)
    world.run(second)
    assert second.num_external_cached_tokens == num_loaded(load_mode, 20)


def test_behind_what_is_cached_on_the_device() -> None:
    world = make_world(num_blocks=8)
    world.save(prompt_of(20))
    world.run(world.stepper.add(prompt_of(8), max_tokens=1))
    request = world.stepper.add(prompt_of(21), max_tokens=2)
    world.run(request)
    assert request.num_local_cached_tokens == 8
    assert request.num_external_cached_tokens == 12


def test_recompute_loads_nothing_and_saves() -> None:
    world = make_world(load_mode="recompute")
    world.save(prompt_of(16))
    world.counts()
    request = world.stepper.add(prompt_of(21), max_tokens=2)
    world.run(request)
    assert request.num_external_cached_tokens == 0
    assert world.counts() == {"chose_recompute": 1, "blocks_saved": 1}


@pytest.mark.parametrize(
    ("role", "saved", "loaded"), [("kv_producer", 5, 0), ("kv_consumer", 0, 0)]
)
def test_roles(role: KVRole, saved: int, loaded: int) -> None:
    world = make_world(role=role)
    world.save(prompt_of(20))
    request = world.stepper.add(prompt_of(20), max_tokens=1)
    world.run(request)
    assert world.connector._scheduler.index.num_stored == saved
    assert request.num_external_cached_tokens == loaded


# -------------------------------------------------------------------- saves


def test_nothing_is_promised_before_its_save_was_reported() -> None:
    world = make_world()
    world.worker.is_stuck = True
    first = world.stepper.add(prompt_of(16), max_tokens=1)
    for _ in range(3):
        world.stepper.step()
    assert first.is_finished
    assert world.stepper.scheduler.num_held_requests == 1
    assert world.num_promised(17) == 0
    world.worker.is_stuck = False
    world.run(first)
    assert world.num_promised(17) == 16


def test_a_prefix_has_neighbouring_records_however_it_was_computed() -> None:
    world = make_world(num_records=512, max_num_batched_tokens=10)
    both = [world.stepper.add(prompt, max_tokens=30) for prompt in (prompt_of(41), [1] * 41)]
    world.run(*both)
    index = world.connector._scheduler.index
    for request in both:
        found = [index.find(block_hash) for block_hash in request.block_hashes[:17]]
        assert found[0] is not None
        assert found == list(range(found[0], found[0] + 17))


def test_what_is_stored_or_being_saved_is_not_saved_again() -> None:
    world = make_world()
    world.worker.is_stuck = True
    for _ in range(2):
        world.stepper.add(prompt_of(17), max_tokens=3)
        world.stepper.step()
    world.worker.is_stuck = False
    world.run()
    world.run(world.stepper.add(prompt_of(17), max_tokens=2))
    assert world.counts() == {"blocks_saved": 4}


def test_failed_saves_free_their_records() -> None:
    world = make_world()
    world.worker.bad_saves = True
    world.save(prompt_of(16))
    world.assert_idle()
    assert world.connector._scheduler.index.num_free == 64
    assert world.counts() == {"blocks_not_saved": 4}


def test_without_room_saves_are_dropped_and_counted() -> None:
    world = make_world(num_records=8)
    world.worker.is_stuck = True
    one = world.stepper.add(prompt_of(24), max_tokens=4)
    world.stepper.step()
    other = world.stepper.add([5] * 24, max_tokens=1)
    world.stepper.step()
    world.worker.is_stuck = False
    world.run(one, other)
    assert world.counts()["blocks_dropped"] == 4


def test_a_prompt_longer_than_the_memory_keeps_its_beginning() -> None:
    world = make_world(num_records=8, max_num_batched_tokens=16)
    world.save(prompt_of(64))
    request = world.stepper.add(prompt_of(64), max_tokens=1)
    world.run(request)
    assert request.num_external_cached_tokens == 32


def test_old_records_make_room_for_new_ones() -> None:
    world = make_world(num_records=8)
    world.save(prompt_of(24))
    world.save([5] * 24)
    request = world.stepper.add([5] * 25, max_tokens=1)
    world.run(request)
    assert request.num_external_cached_tokens == 24
    assert world.counts()["records_evicted"] >= 4


def test_a_preemption_fences_saves() -> None:
    world = make_world(num_blocks=8, load_mode="recompute")
    world.worker.is_stuck = True
    both = [world.stepper.add(prompt, max_tokens=10) for prompt in (prompt_of(12), [1] * 13)]
    while not world.stepper.scheduler.stats.num_preemptions:
        assert world.stepper.step()
    fences = {i for metadata in world.worker.metadata for i in metadata.fences}
    assert fences
    assert not fences & world.worker.saving.keys()
    world.worker.is_stuck = False
    world.run(*both)


def test_a_request_that_is_aborted_after_its_preemption_is_not_held() -> None:
    """Its blocks may go on with the next step, and its saves must not see it."""
    world = make_world(num_blocks=8, load_mode="recompute")
    world.worker.is_stuck = True
    both = [world.stepper.add(prompt, max_tokens=10) for prompt in (prompt_of(12), [1] * 13)]
    scheduler = world.stepper.scheduler
    while world.stepper.launch() is not None:
        if scheduler.stats.num_preemptions:
            break
        world.stepper.apply()
    victim = next(r for r in both if r.status is RequestStatus.PREEMPTED)
    scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)
    assert not scheduler.num_held_requests
    world.worker.is_stuck = False
    world.run(*(r for r in both if r is not victim))


# -------------------------------------------------------------------- loads that fail


@every_way
def test_what_failed_to_load_is_not_promised_again(load_mode: str, depth: int) -> None:
    world = make_world(load_mode=load_mode, depth=depth)
    world.save(prompt_of(20))
    request = world.stepper.add(prompt_of(21), max_tokens=6)
    index = world.connector._scheduler.index
    record = index.find(request.block_hashes[2])
    assert record is not None
    world.worker.bad_records = {record}
    world.run(request)
    assert world.stepper.scheduler.stats.num_invalid_blocks == 1
    counts = world.counts()
    assert counts["blocks_failed_to_load"] == 1
    assert counts["blocks_loaded"] == num_loaded(load_mode, 20) // BLOCK_SIZE - 1
    assert index.find(request.block_hashes[2]) is not None  # computed, and saved again


@pytest.mark.parametrize("load_mode", ["layerwise", "bulk"])
def test_a_failing_request_stores_nothing_on_bad_ground(load_mode: str) -> None:
    world = make_world(load_mode=load_mode, policy="fail")
    world.save(prompt_of(12))
    request = world.stepper.add(prompt_of(25), max_tokens=4)
    index = world.connector._scheduler.index
    bad = index.find(request.block_hashes[1])
    assert bad is not None
    world.worker.bad_records = {bad}
    world.stepper.run()
    world.assert_idle()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert [h in index for h in request.block_hashes] == [True, False, True, False, False, False]


def test_who_lost_a_load_is_offered_nothing_more() -> None:
    world = make_world(load_mode="bulk")
    world.save(prompt_of(20))
    request = world.stepper.add(prompt_of(21), max_tokens=6)
    bad = world.connector._scheduler.index.find(request.block_hashes[0])
    assert bad is not None
    world.worker.bad_records = {bad}
    world.run(request)
    assert world.counts()["chose_bulk"] == 1


# -------------------------------------------------------------------- pins, aborts, resets


def test_an_aborted_load_keeps_its_records_until_it_has_ended() -> None:
    world = make_world(load_mode="bulk", num_records=8)
    world.save(prompt_of(24))
    request = world.stepper.add(prompt_of(25), max_tokens=2, request_id="again")
    world.worker.is_stuck = True
    world.step_until(RequestStatus.WAITING_FOR_REMOTE_KVS, request)
    world.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    other = world.stepper.add([5] * 20, max_tokens=1)  # needs more records than are free
    for _ in range(3):
        world.stepper.step()
    assert all(h in world.connector._scheduler.index for h in request.block_hashes)
    world.worker.is_stuck = False
    world.run(other)
    again = world.stepper.add(prompt_of(25), max_tokens=2, request_id="again")
    world.run(again)


def test_reset_cache_forgets_everything() -> None:
    world = make_world()
    world.save(prompt_of(20))
    assert world.stepper.scheduler.reset_prefix_cache(reset_connector=True)
    world.assert_idle()
    index = world.connector._scheduler.index
    assert index.num_free == index.num_records
    request = world.stepper.add(prompt_of(20), max_tokens=1)
    world.run(request)
    assert request.num_external_cached_tokens == 0


def test_reset_cache_stops_saves_from_becoming_visible() -> None:
    world = make_world()
    world.worker.is_stuck = True
    request = world.stepper.add(prompt_of(20), max_tokens=4)
    world.stepper.step()
    world.connector.reset_cache()
    world.worker.is_stuck = False
    world.run(request)
    assert world.counts() == {"blocks_not_saved": 5}


# -------------------------------------------------------------------- from both ends


def open_hole(world: World, **options: Any) -> Request:
    """A request that computes its first half, and whose other half does not arrive."""
    world.save(prompt_of(32))
    world.counts()
    world.worker.is_stuck = True
    request = world.stepper.add(prompt_of(34), max_tokens=5, **options)
    for _ in range(4):
        world.stepper.step()
    assert request.hole_end == 32
    assert request.num_computed_tokens == 16
    return request


def test_a_request_goes_on_behind_its_load_when_the_two_have_met() -> None:
    world = make_world(load_mode="hybrid")
    request = open_hole(world)
    assert not request.output_token_ids
    world.worker.is_stuck = False
    world.run(request)
    assert (request.num_local_cached_tokens, request.num_external_cached_tokens) == (0, 16)
    assert world.counts() == {"chose_hybrid": 1, "blocks_loaded": 4, "blocks_saved": 1}


def test_what_was_loaded_is_shared_when_the_two_have_met_and_not_before() -> None:
    world = make_world(load_mode="hybrid")
    request = open_hole(world)
    early = world.stepper.add(prompt_of(34), max_tokens=2)
    world.stepper.step()
    assert early.num_local_cached_tokens == 16
    world.worker.is_stuck = False
    world.run(request, early)
    late = world.stepper.add(prompt_of(34), max_tokens=2)
    world.run(late)
    assert late.num_local_cached_tokens == 33


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_with_the_hole_open_keeps_the_blocks_until_nothing_is_written(depth: int) -> None:
    world = make_world(load_mode="hybrid", depth=depth)
    request = open_hole(world)
    scheduler = world.stepper.scheduler
    free = scheduler.kv_cache.pool.num_free_blocks
    scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    assert scheduler.num_held_requests == 1
    assert scheduler.kv_cache.pool.num_free_blocks == free
    world.worker.is_stuck = False
    world.run()
    told = [share for metadata in world.worker.metadata for share in metadata.shares]
    assert [share.num_blocks for share in told] == [0]
    assert world.counts().get("blocks_loaded", 0) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_with_the_hole_open_ends_the_load(depth: int) -> None:
    world = make_world(load_mode="hybrid", depth=depth, num_blocks=17)
    world.save(prompt_of(32))
    running = world.stepper.add([9] * 14, max_tokens=25)
    world.stepper.step()
    world.worker.is_stuck = True
    victim = world.stepper.add(prompt_of(34), max_tokens=3)
    while not victim.num_preemptions:
        assert world.stepper.step()
    lost = {load_id for metadata in world.worker.metadata for load_id in metadata.lost_loads}
    assert len(lost) == 1
    assert "blocks_loaded" not in world.counts()
    world.worker.is_stuck = False
    world.run(running, victim)


@pytest.mark.parametrize("bad", [3, 4, 6, 7])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_bad_block_with_the_hole_open(bad: int, policy: Literal["fail", "recompute"]) -> None:
    """It and all behind it are computed; what nobody needed to load does not matter."""
    world = make_world(load_mode="hybrid", policy=policy)
    request = open_hole(world)
    record = world.connector._scheduler.index.find(request.block_hashes[bad])
    assert record is not None
    world.worker.bad_records = {record}
    world.worker.is_stuck = False
    if policy == "recompute" or bad < 4:
        world.run(request)
        assert request.num_external_cached_tokens == 4 * max(0, bad - 4) if bad >= 4 else 16
        return
    world.stepper.run()
    world.assert_idle()
    assert request.status is RequestStatus.FINISHED_ERROR


def test_who_is_ahead_takes_over_what_the_other_has_left() -> None:
    """By the rates the load is fast. It is not: steps compute more than they were to."""
    world = make_world(load_mode="hybrid", rate=1e6)
    world.worker.samples = [StepSample(n, 0, 0.001 * n) for n in (1, 8, 30)]
    world.save(prompt_of(96))
    world.worker.is_stuck = True
    request = world.stepper.add(prompt_of(98), max_tokens=5)
    for _ in range(3):
        world.stepper.step()
    first = request.num_computed_tokens
    assert 0 < first < 40
    for _ in range(30):
        world.stepper.step()
    assert request.num_computed_tokens > first + 20
    world.worker.is_stuck = False
    world.run(request)
    told = [share for metadata in world.worker.metadata for share in metadata.shares]
    assert request.num_external_cached_tokens == 4 * told[-1].num_blocks


# -------------------------------------------------------------------- the choice


def step_s(num_tokens: int) -> StepSample:
    return StepSample(num_tokens, 0, 0.010 + 0.001 * num_tokens)


@pytest.mark.parametrize(
    ("rate", "running", "stall_ms", "chosen"),
    [
        (1e6, 0, 20, "layerwise"),  # 5 ms to load, 20 to compute
        (1e6, 2, 20, "layerwise"),
        (0.3e6, 2, 0, "hybrid"),  # 17 ms to load: it would stall others. Or 13, beside a step of 14
        (0.3e6, 0, 0, "layerwise"),
        (0.1e6, 0, 20, "recompute"),  # 50 ms
        (0.1e6, 2, 20, "recompute"),
    ],
)
def test_rates_decide(rate: float, running: int, stall_ms: float, chosen: str) -> None:
    world = make_world(load_mode="auto", rate=rate, max_load_stall_ms=stall_ms)
    world.worker.samples = [step_s(n) for n in (1, 2, 8, 30)]
    world.save(prompt_of(20))
    others = [world.stepper.add([9, i, 4], max_tokens=30) for i in range(running)]
    if others:
        world.stepper.step()
    world.counts()
    request = world.stepper.add(prompt_of(22), max_tokens=2)
    world.stepper.step()
    assert world.counts().get(f"chose_{chosen}") == 1
    world.run(request, *others)


# -------------------------------------------------------------------- anything goes


@every_way
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(load_mode: str, depth: int, seed: int) -> None:
    """Tiny pools, chunks, shared prefixes, aborts at any moment, copies that fail or are late."""
    draw = random.Random(f"{load_mode} {depth} {seed}")
    world = make_world(
        load_mode=load_mode,
        depth=depth,
        num_records=draw.choice([1, 6, 20, 64]),
        num_blocks=draw.choice([9, 12, 20]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
        policy="recompute",
        rate=draw.choice([0.0, 5e5, 5e6]),
    )
    world.worker.draw = draw
    world.worker.samples = [StepSample(n, 0, 0.0005 * n) for n in (1, 9, 30)]
    world.worker.fault_rate = draw.choice([0.0, 0.2])
    requests: list[Request] = []
    for _ in range(25):
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
        if draw.random() < 0.2:
            world.stepper.scheduler.reset_prefix_cache(reset_connector=draw.random() < 0.3)
    world.run(*(r for r in requests if r.status is not RequestStatus.FINISHED_ABORTED))


# -------------------------------------------------------------------- idle steps


def test_the_first_steps_of_a_size_are_timed_and_then_one_of_sixteen() -> None:
    timed = TimedSteps(max_inflight_steps=1)
    chosen = [i for i in range(64) if timed.choose(2 + i % 2)]
    assert chosen == [*range(8), 16, 32, 48]
    assert timed.choose(4), "the first one of that size"
    assert not timed.choose(0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_report_on_a_timed_step_is_expected_for_as_long_as_steps_are_in_flight(
    depth: int,
) -> None:
    timed = TimedSteps(depth)
    expected = [timed.expects_report]
    for num_tokens in (1, 0, 0, 0, 0):
        timed.choose(num_tokens)
        expected.append(timed.expects_report)
    assert expected == [False, *[True] * (depth + 1), *[False] * (4 - depth)]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_without_orders_are_idle_unless_they_are_timed(depth: int) -> None:
    world = make_world(load_mode="layerwise", role="kv_consumer", depth=depth)
    request = world.stepper.add(prompt_of(9), max_tokens=60)
    world.run(request)
    told = world.worker.metadata
    timed = [one for one in told if one.timed_pairs is not None]
    assert 8 <= len(timed) <= 16
    assert len(told) <= 10 + (depth + 2) * 4, "of the first ones, and of every sixteenth"
    assert [one.timed_pairs for one in timed[:4]] == [9 * 9 / 2, 9.5, 10.5, 11.5]


def test_pairs_of_a_batch_are_those_of_each_request() -> None:
    """Not of all its tokens with all its contexts: a prompt beside decodes would look dear, and by
    that all attention cheap."""
    world = make_world(load_mode="layerwise", role="kv_consumer", max_num_batched_tokens=64)
    world.stepper.add(prompt_of(9), max_tokens=20)
    world.stepper.step()
    world.stepper.add(prompt_of(30), max_tokens=20)
    world.worker.metadata.clear()
    world.stepper.step()
    (told,) = world.worker.metadata
    assert told.num_tokens == 22 + 1, "the two share 8 tokens"
    assert told.timed_pairs == 22 * (8 + 22 / 2) + 9.5
    world.stepper.run()


def test_no_step_is_idle_while_a_save_is_open() -> None:
    world = make_world()
    world.worker.is_stuck = True
    world.stepper.add(prompt_of(9), max_tokens=40)
    for _ in range(40):
        world.stepper.step()
    assert len(world.worker.metadata) == 40
    world.worker.is_stuck = False


# -------------------------------------------------------------------- how long a step will take


def test_a_step_that_computes_towards_a_load_tells_how_long_it_will_take() -> None:
    world = make_world(load_mode="hybrid", rate=1e6)
    world.save(prompt_of(40))
    world.worker.samples = [StepSample(n, 0, 0.001 * n) for n in (1, 8, 30)]
    world.run(world.stepper.add(prompt_of(3), max_tokens=1))
    world.worker.metadata.clear()
    world.worker.is_stuck = True
    world.stepper.add(prompt_of(41), max_tokens=2)
    world.stepper.step()
    (metadata,) = world.worker.metadata
    assert metadata.expected_s == pytest.approx(0.001 * metadata.num_tokens, rel=0.2)
    world.worker.is_stuck = False
    world.stepper.run()
    assert world.worker.metadata[-1].expected_s == 0


def test_steps_that_load_within_themselves_are_not_counted_as_timed() -> None:
    world = make_world(load_mode="layerwise", prefix_caching=False)
    world.save(prompt_of(16))
    world.worker.metadata.clear()
    for _ in range(12):
        world.run(world.stepper.add(prompt_of(17), max_tokens=1))
    loading = [one for one in world.worker.metadata if one.loads]
    assert len(loading) == 12
    assert all(one.timed_pairs is None for one in loading)
    world.worker.metadata.clear()
    world.run(world.stepper.add([7], max_tokens=1))
    assert world.worker.metadata[0].timed_pairs == 0.5, "the first one of that size"
