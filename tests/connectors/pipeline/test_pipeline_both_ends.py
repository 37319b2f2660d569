"""PipelineConnector's two sides together, on prompts that are computed from the front while they
are loaded from the back: rates that are wrong tenfold, copies in every order, failing copies, small
pools. The oracle finds every wrong KV."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from paged_oracle import LAYER, answer, paint_after_fences
from scheduling import Stepper, make_scheduler

from interlace.connectors.pipeline.messages import (
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    StepSample,
)
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.rates import SAMPLES_OF_A_SIZE, LoadRate
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline.worker_bulk import BulkLoad
from interlace.connectors.pipeline.worker_feeder import Copies, Visit
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.config import EngineConfig, KVTransferConfig, ModelConfig
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)
from interlace.engine.request import Request, RequestStatus
from interlace.layers.page_copies import Copied, Runs
from interlace.layers.virtual_lanes import Policy, VirtualLanes

BLOCK_SIZE = 4
RECORD_BYTES = BLOCK_SIZE * 8


class PacedWorker(PipelineConnector):
    """The worker side, with small slices, a load rate that is told and not measured, and step times
    as a test says them. Blocks in `bad_blocks` cannot be copied to."""

    def __init__(self, config: EngineConfig, cache: KVCacheConfig, lanes: VirtualLanes) -> None:
        super().__init__(config, KVConnectorRole.WORKER, cache)
        self._worker_side = PipelineWorker(self.options, lanes, window_bytes=4 * RECORD_BYTES)
        self.bad_blocks: set[int] = set()
        self.bytes_per_s = 1e6
        self.token_s: float | None = 0.001
        """What the next report says that a token takes; None: nothing."""
        self.metadata: list[PipelineMetadata] = []
        self.is_stuck = False
        """Whether no slice of a load begins."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        opened = self._worker._opened
        assert opened is not None
        feeder = opened.pipeline._bulk
        for copies in (feeder.copies, opened.pipeline._copies):
            self._let_fail(copies)
        vars(feeder)["_copy_layers"] = feeder.copies.load_layers
        poll = feeder.poll

        def poll_unless_stuck(*, may_feed: bool, visit: Visit) -> None:
            poll(may_feed=may_feed and not self.is_stuck, visit=visit)

        vars(feeder)["poll"] = poll_unless_stuck

    def _let_fail(self, copies: Copies) -> None:
        copy = copies.load

        def load(layer: int, runs: Runs) -> Copied:
            blocks = {block + i for _, block, count in runs.runs for i in range(count)}
            if blocks & self.bad_blocks:
                raise OSError("broken")
            return copy(layer, runs)

        vars(copies)["load"] = load

    def get_handshake_metadata(self) -> PipelineHandshake:
        told = dataclasses.replace(
            super().get_handshake_metadata(), load_bytes_per_s=self.bytes_per_s
        )
        vars(self._worker)["_hurried_bytes"] = lambda step_s=0.0: 4 * RECORD_BYTES
        return told

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.metadata.append(self._metadata)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> PipelineReport:
        report = super().build_connector_worker_meta() or PipelineReport()
        assert isinstance(report, PipelineReport)
        samples: list[StepSample] = []
        if self.token_s is not None:
            samples = [StepSample(n, 0, self.token_s * n) for n in (1, 9, 30)] * SAMPLES_OF_A_SIZE
            self.token_s = None
        return dataclasses.replace(report, steps=tuple(samples))


@dataclasses.dataclass
class Both:
    """A stepper over both sides of the connector."""

    stepper: Stepper
    connector: PipelineConnector
    worker: PacedWorker
    load_modes: dict[str, LoadMode] = dataclasses.field(default_factory=dict)
    """By request id, in place of the world's."""

    def __post_init__(self) -> None:
        ask = self.connector.get_num_new_matched_tokens

        def ask_as_told(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            chooser = self.connector._scheduler.chooser
            plain = chooser.load_mode
            chooser.load_mode = self.load_modes.get(request.request_id, plain)
            try:
                return ask(request, num_computed_tokens)
            finally:
                chooser.load_mode = plain

        vars(self.connector)["get_num_new_matched_tokens"] = ask_as_told

    def save(self, prompt: list[int]) -> None:
        self.stepper.add(prompt, max_tokens=1)
        self.stepper.run()
        assert self.stepper.scheduler.reset_prefix_cache()

    def run(self, *requests: Request) -> None:
        self.stepper.run()
        self.assert_idle()
        for request in requests:
            tokens = self.stepper.outputs[request.request_id]
            assert tokens == answer(request.prompt_token_ids, len(tokens))
            assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED

    def assert_idle(self) -> None:
        self.stepper.assert_idle()
        assert self.stepper.scheduler.stats.num_stray_reports == 0
        for _ in range(40):
            if self.connector._scheduler.is_idle:
                break
            self.stepper.add([49], max_tokens=1)
            self.stepper.run()
        side, index = self.connector._scheduler, self.connector._scheduler.index
        assert side.is_idle, side
        assert not self.worker._worker._bulk_loads
        assert not self.worker._worker._unfetched
        assert index.num_free + index.num_stored == index.num_records

    @property
    def told(self) -> Iterator[PipelineMetadata]:
        """What the worker side was told."""
        return iter(self.worker.metadata)


def make_both(
    *,
    seed: int = 0,
    policy: Policy = "eager",
    load_mode: str = "hybrid",
    num_records: int = 256,
    failure_policy: Literal["fail", "recompute"] = "recompute",
    bytes_per_s: float = 1e6,
    token_s: float = 0.001,
    **scheduler: Any,
) -> Both:
    """`scheduler` are options of `make_scheduler`. A block takes 32 us to load, and 4 ms to compute
    unless told otherwise."""
    lanes = VirtualLanes(seed, policy)
    depth = scheduler.get("depth", 1)
    num_blocks = scheduler.setdefault("num_blocks", 128)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "load_mode": load_mode,
                "group_size": 1,
                "host_bytes": num_records * RECORD_BYTES,
            },
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        max_model_len=1000,
        max_num_batched_tokens=scheduler.setdefault("max_num_batched_tokens", 64),
        num_gpu_blocks_override=num_blocks + 1,
        max_inflight_steps=depth,
    )
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, None, 8 * BLOCK_SIZE)
    cache = KVCacheConfig(num_blocks + 1, (KVCacheGroupSpec((LAYER,), spec),))
    worker = PacedWorker(config, cache, lanes)
    worker.bytes_per_s, worker.token_s = bytes_per_s, token_s
    connector = PipelineConnector(config, KVConnectorRole.SCHEDULER, cache)
    stepper = Stepper(
        make_scheduler(
            connector=connector, failure_policy=failure_policy, max_model_len=400, **scheduler
        ),
        worker,
    )
    paint_after_fences(stepper.runner)
    return Both(stepper, connector, worker)


def prompt_of(num_blocks: int) -> list[int]:
    """Tokens of so many blocks, and two more."""
    return [(7 * i * i + i) % 49 for i in range(BLOCK_SIZE * num_blocks + 2)]


# -------------------------------------------------------------------- the end of a load is heard


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_blocks", "fails"), [(40, True), *((n, False) for n in (38, 39, 40))])
def test_a_load_that_has_ended_takes_over_nothing_more(
    num_blocks: int, depth: int, *, fails: bool
) -> None:
    """It said how far it was, then ended without coming further; then computing turns out slow."""
    both = make_both(depth=depth, max_num_batched_tokens=8, token_s=0.0001, bytes_per_s=8e4)
    both.save(prompt_of(num_blocks))
    both.worker.is_stuck = True
    request = both.stepper.add(prompt_of(num_blocks), max_tokens=3)
    both.stepper.step()
    assert request.hole_end == BLOCK_SIZE * num_blocks
    if fails:
        both.worker.bad_blocks = {request.blocks[num_blocks - 1].block_id}
    both.worker.is_stuck = False
    while both.stepper.scheduler._transfers.is_loading(request):
        assert both.stepper.step()
    assert request.num_computed_tokens < 60
    both.worker.token_s = 1.0
    both.run(request)
    assert (request.num_external_cached_tokens == 0) is fails


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [38, 39, 40])
def test_nor_does_one_whose_reads_go_on(
    num_blocks: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended, but something is still read from files for what was in no share of it: so its
    records are kept for longer. Who takes it for under way serves blocks that nobody filled."""
    go_on = True
    monkeypatch.setattr(BulkLoad, "is_settled", property(lambda one: one.is_done and not go_on))
    both = make_both(depth=depth, max_num_batched_tokens=8, token_s=0.0001, bytes_per_s=8e4)
    go_on = False
    both.save(prompt_of(num_blocks))
    go_on = True
    both.worker.is_stuck = True
    request = both.stepper.add(prompt_of(num_blocks), max_tokens=3)
    both.stepper.step()
    both.worker.is_stuck = False
    while both.stepper.scheduler._transfers.is_loading(request):
        assert both.stepper.step()
    assert request.num_computed_tokens < 60
    both.worker.token_s = 1.0
    both.stepper.run()
    go_on = False
    both.run(request)
    assert request.num_external_cached_tokens > 0


# -------------------------------------------------------------------- the steps of a front


@pytest.mark.parametrize(("has_others", "first_step"), [(False, 356), (True, 256)])
def test_a_front_is_computed_in_shorter_steps_where_others_run(
    first_step: int, *, has_others: bool
) -> None:
    """A token takes 0.3 ms, and so the whole front 107; others are to wait for 20 at a time."""
    both = make_both(max_num_batched_tokens=512, token_s=0.0003, bytes_per_s=1e3)
    both.save(prompt_of(92))
    requests = [both.stepper.add([3, 1, 4], max_tokens=40)] if has_others else []
    if has_others:
        both.stepper.step()
    requests.append(both.stepper.add(prompt_of(92), max_tokens=3))
    output = both.stepper.launch()
    assert output is not None
    assert output.num_scheduled_tokens[requests[-1].request_id] == first_step
    both.run(*requests)


# -------------------------------------------------------------------- preemptions


def a_victim(both: Both) -> Request:
    """A request whose load from the back is under way, and that was preempted when a step was
    applied: it shares a block that another one was to load in that step."""
    both.save(prompt_of(40))
    both.load_modes = {"loader": "layerwise", "victim": "hybrid"}
    loader = both.stepper.add(prompt_of(3), request_id="loader", max_tokens=4)
    victim = both.stepper.add(prompt_of(40), request_id="victim", max_tokens=4)
    both.worker.is_stuck = True
    assert both.stepper.launch() is not None
    assert victim.hole_end == 160
    assert victim.num_local_cached_tokens == 12
    both.worker.bad_blocks = {loader.blocks[1].block_id}
    both.stepper.apply()
    both.worker.bad_blocks = set()
    assert victim.status is RequestStatus.PREEMPTED
    return victim


@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_block_of_the_front_preempts_one_of_those_who_share_it(depth: int) -> None:
    both = make_both(depth=depth)
    victim = a_victim(both)
    both.stepper.step()
    assert [metadata.lost_loads for metadata in both.told][-1]
    both.worker.is_stuck = False
    both.run(victim)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_right_after_a_preemption_ends_the_load_too(depth: int) -> None:
    """Its blocks are free at once: the load must not write to them when they are handed on."""
    both = make_both(depth=depth)
    victim = a_victim(both)
    both.stepper.scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)
    again = both.stepper.add(prompt_of(40), request_id="victim", max_tokens=4)
    both.stepper.step()
    assert [metadata.lost_loads for metadata in both.told][-1]
    both.worker.is_stuck = False
    both.run(again)


# -------------------------------------------------------------------- anything goes


class Traffic:
    """Random requests over a stored prompt of 60 blocks; `seen` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.both = make_both(
            seed=seed,
            policy=draw.choice(["seed", "seed", "eager", "lazy"]),
            depth=draw.choice([1, 2]),
            num_records=draw.choice([70, 100, 256]),
            num_blocks=draw.choice([62, 70, 90, 128]),
            max_num_batched_tokens=draw.choice([5, 16, 32, 64]),
            failure_policy=draw.choice(["recompute", "recompute", "fail"]),
            prefix_caching=draw.random() < 0.4,
            bytes_per_s=draw.choice([1e3, 1e4, 1e5]),
        )
        self.seen = collections.Counter[str]()
        self.requests: list[Request] = []
        self.fault_rate = draw.choice([0.0, 0.05, 0.3])
        self.both.save(prompt_of(60))
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        scheduler = self.both.stepper.scheduler
        preempt = scheduler._preempt

        def counted(request: Request) -> None:
            self.seen["preempted"] += request.hole_end is not None
            preempt(request)

        vars(scheduler)["_preempt"] = counted

    def add(self, number: int) -> None:
        draw, both = self.draw, self.both
        num_tokens = draw.choice([6, 20, 35, 50, 60]) * BLOCK_SIZE + draw.randrange(-2, 2)
        prompt = prompt_of(60)[:num_tokens]
        if draw.random() < 0.2:
            prompt[draw.randrange(len(prompt)) :] = [1, 2, 3]
        request_id = f"r{draw.randrange(30)}"  # ids come again
        if both.stepper.scheduler.knows(request_id):
            request_id = f"new{number}"
        both.load_modes[request_id] = draw.choice(
            ["hybrid", "hybrid", "hybrid", "layerwise", "bulk", "auto"]
        )
        request = both.stepper.add(
            prompt, max_tokens=draw.choice([1, 3, 8, 40]), request_id=request_id
        )
        self.requests.append(request)

    def step(self) -> None:
        draw, worker, stepper = self.draw, self.both.worker, self.both.stepper
        if draw.random() < 0.2:
            worker.token_s = draw.choice([1e-5, 1e-4, 1e-3, 1e-2])
        if draw.random() < 0.2:
            self.both.connector._scheduler.chooser.load_rate = LoadRate(
                draw.choice([1e3, 1e4, 1e5])
            )
        worker.is_stuck = draw.random() < 0.6
        is_bad = draw.random() < self.fault_rate
        worker.bad_blocks = set(draw.sample(range(1, 62), 6)) if is_bad else set()
        stepper.launch()
        if stepper.inflight and draw.random() < 0.7:
            stepper.apply()
        if draw.random() < 0.06:
            self.abort(draw.choice(self.requests))

    def abort(self, victim: Request) -> None:
        self.seen["aborted"] += not victim.is_finished and victim.hole_end is not None
        self.both.stepper.scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)

    def finish(self) -> None:
        """All ends well, whoever was not aborted and did not fail has the right answer."""
        self.both.worker.is_stuck, self.both.worker.bad_blocks = False, set()
        self.both.run()
        for request in self.requests:
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                tokens = request.output_token_ids
                assert tokens == answer(request.prompt_token_ids, len(tokens))
                assert request.num_local_cached_tokens is not None
                num_cached = request.num_local_cached_tokens + request.num_external_cached_tokens
                assert 0 <= num_cached < request.num_prompt_tokens
        self._count_shares()
        self.seen["bad blocks"] += self.both.stepper.scheduler.stats.num_invalid_blocks

    def _count_shares(self) -> None:
        shares: dict[int, int] = {}
        for metadata in self.both.told:
            shares |= {one.load_id: one.share for one in metadata.loads if one.share is not None}
            for share in metadata.shares:
                before, shares[share.load_id] = shares[share.load_id], share.num_blocks
                self.seen["taken from computing"] += share.num_blocks > before
                self.seen["taken from loading"] += 0 < share.num_blocks < before
            self.seen["lost"] += len(metadata.lost_loads)


def test_random_traffic_over_prompts_that_come_from_both_ends() -> None:
    seen = collections.Counter[str]()
    for seed in range(48):
        traffic = Traffic(seed)
        for number in range(12):
            traffic.add(number)
            for _ in range(traffic.draw.choice([0, 0, 1, 5, 25])):
                traffic.step()
            if traffic.draw.random() < 0.3:
                forgets = traffic.draw.random() < 0.05
                traffic.both.stepper.scheduler.reset_prefix_cache(reset_connector=forgets)
        traffic.finish()
        seen += traffic.seen
    assert seen.keys() == {
        "aborted",
        "bad blocks",
        "lost",
        "preempted",
        "taken from computing",
        "taken from loading",
    }, seen
