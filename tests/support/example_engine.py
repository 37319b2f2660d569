"""An engine of a few lines around ExampleConnector: the protocol's hooks in order, by hand.

Its "model" computes a token's KV from the KV of the token before it, as it lies in the pages, so
one wrong slot shows in all that follow. No sampling: tests say which tokens come.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from interlace.connectors.example_connector import ExampleConnector
from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig, ModelConfig
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.kv_output_aggregator import KVOutputAggregator
from interlace.engine.ports import Lanes
from interlace.engine.request import Request, RequestStatus
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.layers.forward_context import ForwardContext

BLOCK_SIZE = 4
PATIENCE_S = 20.0
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def token_kv(before: float, token: int, layer: int, rank: int = 0) -> float:
    """Exact in float32 and in bfloat16."""
    return float(zlib.crc32(f"{before} {token} {layer} {rank}".encode()) % 251 + 1)


def example_config(
    root: Path | str,
    *,
    role: KVRole = "kv_both",
    dtype: str = "float32",
    identity: str = "",
    num_workers: int = 1,
    lanes: Lanes | None = None,
    **options: Any,
) -> EngineConfig:
    """A resolved configuration; `options` are the connector's own."""
    extra = {"shared_storage_path": str(root), "refresh_s": 0.02, **options}
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={k: v for k, v in extra.items() if v is not None},
    )
    model = ModelConfig(
        model="toy",
        dtype=dtype,
        max_model_len=4096,
        vocab_size=1000,
        eos_token_ids=(0,),
        seed=0,
        model_identity=identity,
    )
    config = EngineConfig(
        block_size=BLOCK_SIZE, kv_transfer_config=transfer, tensor_parallel_size=num_workers
    )
    return config.resolved(model, lanes=lanes, num_gpu_blocks_override=256)


@dataclasses.dataclass
class Step:
    """A step that was planned, and what its execution reported."""

    message: SchedulerOutput
    output: KVConnectorOutput | None = None


class ExampleEngine:
    """Both sides of one ExampleConnector, pages, and the block tables of some requests.

    `worker` and `pages` are those of rank 0; each other rank has different KV for a token.
    """

    def __init__(self, config: EngineConfig, *, num_blocks: int = 256) -> None:
        dtype = getattr(torch, config.model_config.dtype if config.model_config else "float32")
        self.shape = (num_blocks, 2, BLOCK_SIZE, 1, 2)
        num_workers = config.parallel_config.world_size
        self.all_pages = [
            {name: torch.zeros(self.shape, dtype=dtype) for name in LAYERS}
            for _ in range(num_workers)
        ]
        self.pages = self.all_pages[0]
        spec = FullAttentionSpec(BLOCK_SIZE, 1, 2, dtype, BLOCK_SIZE * 4 * dtype.itemsize)
        cache = KVCacheConfig(num_blocks, (KVCacheGroupSpec(LAYERS, spec),))
        self.scheduler = ExampleConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.workers = [
            ExampleConnector(config.for_rank(rank), KVConnectorRole.WORKER, cache)
            for rank in range(num_workers)
        ]
        for worker, pages in zip(self.workers, self.all_pages, strict=True):
            worker.register_kv_caches(pages)
        self.worker = self.workers[0]
        self._aggregator = KVOutputAggregator(num_workers)
        self._loading: set[str] = set()
        self.free = list(range(1, num_blocks))
        self.held: dict[str, Request] = {}
        self.num_computed: dict[str, int] = {}
        self.sent: list[str] = []
        self.received: list[str] = []
        self.invalid: set[int] = set()
        self.stats: collections.Counter[str] = collections.Counter()
        self._seen: set[str] = set()
        self._new: list[Request] = []
        self._resumed: set[str] = set()
        self._finished: set[str] = set()
        self._count = 0

    def __enter__(self) -> ExampleEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    # ---------------------------------------------------------------- requests

    def request(self, tokens: Sequence[int], *, salt: str | None = None) -> Request:
        self._count += 1
        return Request(
            f"r{self._count}",
            tokens,
            SamplingParams(),
            seed=0,
            arrival=self._count,
            block_size=BLOCK_SIZE,
            cache_salt=salt,
        )

    def match(self, request: Request, num_local: int = 0) -> tuple[int, bool]:
        """The match query, asked until it answers."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local)
            if num_tokens is not None:
                return num_tokens, is_async
            time.sleep(0.002)
        raise AssertionError("the match query never answers")

    def match_at_last(self, request: Request, expected: int) -> None:
        """Wait until the index has caught up."""
        end = time.monotonic() + PATIENCE_S
        while (found := self.match(request)[0]) != expected:
            assert time.monotonic() < end, f"found {found}, not {expected}"
            time.sleep(0.005)

    def admit(self, request: Request, *, num_local: int = 0) -> int:
        """Ask, give blocks for all tokens, and say so. External tokens count as computed."""
        num_external, _ = self.match(request, num_local)
        self.give_blocks(request, num_local=num_local, num_external=num_external)
        return num_external

    def give_blocks(self, request: Request, *, num_local: int = 0, num_external: int = 0) -> None:
        num_blocks = -(-request.num_tokens // BLOCK_SIZE)
        request.blocks = [KVCacheBlock(self.free.pop(0)) for _ in range(num_blocks)]
        self.allocated(request, num_external)
        self.num_computed[request.request_id] = num_local + num_external
        self._new.append(request)

    def allocated(self, request: Request, num_external: int) -> None:
        blocks = KVCacheBlocks((request.blocks,))
        self.scheduler.update_state_after_alloc(request, blocks, num_external)
        if num_external and self.scheduler.options.load_async:
            self._loading.add(request.request_id)

    def preempt(self, request: Request) -> None:
        """Its blocks go; the next plan tells."""
        self.free += [block.block_id for block in request.blocks]
        request.blocks = []
        self.num_computed[request.request_id] = 0
        request.num_preemptions += 1
        self._resumed.add(request.request_id)

    def finish(
        self, request: Request, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> bool:
        """End a request; whether its blocks are held."""
        request.status = status
        request.num_computed_tokens = self.num_computed.get(request.request_id, 0)
        ids = [block.block_id for block in request.blocks]
        is_held, params = self.scheduler.request_finished(request, ids)
        assert params is None
        self._finished.add(request.request_id)
        if is_held:
            self.held[request.request_id] = request
        else:
            self.release(request)
        return is_held

    def release(self, request: Request) -> None:
        """Hand the blocks on, and paint them, so that late reads and writes show."""
        for block in request.blocks:
            for pages in self.all_pages:
                for layer in pages.values():
                    layer[block.block_id] = 255
            self.free.append(block.block_id)
        request.blocks = []

    # ---------------------------------------------------------------- steps

    def plan(
        self, work: Mapping[Request, int] | None = None, preempted: Iterable[Request] = ()
    ) -> Step:
        """Schedule `work`, request -> number of tokens."""
        work = work or {}
        new, cached = [], CachedRequestData()
        for request in work:
            before = self.num_computed[request.request_id]
            ids = [block.block_id for block in request.blocks]
            if request.request_id not in self._seen:
                self._seen.add(request.request_id)
                new.append(
                    NewRequestData(
                        request.request_id,
                        request.prompt_token_ids,
                        request.sampling_params,
                        0,
                        (ids,),
                        before,
                    )
                )
                continue
            resumed = request in self._new
            missing = -(-(before + work[request]) // BLOCK_SIZE) - len(ids)
            added = [self.free.pop(0) for _ in range(missing)]
            request.blocks += [KVCacheBlock(block_id) for block_id in added]
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(before)
            if resumed:
                cached.resumed_req_ids.add(request.request_id)
                added = [*ids, *added]
            cached.new_block_ids.append((added,) if added else None)
        message = SchedulerOutput(
            step_id=1,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={r.request_id: n for r, n in work.items()},
            total_num_scheduled_tokens=sum(work.values()),
            finished_req_ids=frozenset(self._finished),
            preempted_req_ids=frozenset(r.request_id for r in preempted),
            sampling_req_ids=frozenset(),
            async_loading_req_ids=frozenset(self._loading),
        )
        metadata = self.scheduler.build_connector_meta(message)
        self._finished.clear()
        self._loading.clear()
        self._new = [request for request in self._new if request not in work]
        for request, count in work.items():
            self.num_computed[request.request_id] += count
        self._work = {request: dict(work)[request] for request in work}
        message = dataclasses.replace(message, kv_connector_metadata=metadata)
        return Step(message)

    def execute(self, step: Step, tokens: Mapping[str, Sequence[int]] | None = None) -> None:
        """The device's part. `tokens`: all of a request's tokens, if not those it knows now."""
        self._aggregator.begin_step(step.message)
        outputs = [self._execute(step, rank, tokens) for rank in range(len(self.workers))]
        step.output = self._aggregator.aggregate(outputs) or KVConnectorOutput()

    def _execute(
        self, step: Step, rank: int, tokens: Mapping[str, Sequence[int]] | None
    ) -> KVConnectorOutput:
        worker, metadata = self.workers[rank], step.message.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        has_tokens = step.message.total_num_scheduled_tokens > 0
        context = ForwardContext({}, (lambda: cast("Any", None)) if has_tokens else None)
        worker.start_load_kv(context)
        if has_tokens:
            for layer, name in enumerate(LAYERS):
                worker.wait_for_layer_load(name)
                for request, count in self._work.items():
                    known = (tokens or {}).get(request.request_id, request.all_token_ids)
                    self._compute(request, count, layer, rank, known)
                worker.save_kv_layer(name, self.all_pages[rank][name], None)
            worker.wait_for_save()
        sending, receiving = worker.get_finished(set(step.message.finished_req_ids))
        output = KVConnectorOutput(
            finished_sending=sending,
            finished_recving=receiving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def _compute(
        self, request: Request, count: int, layer: int, rank: int, tokens: Sequence[int]
    ) -> None:
        end = self.num_computed[request.request_id]
        for position in range(end - count, end):
            before = self.kv(request, position - 1, layer, rank) if position else 0.0
            block = request.blocks[position // BLOCK_SIZE].block_id
            value = token_kv(before, tokens[position], layer, rank)
            self.all_pages[rank][LAYERS[layer]][block, :, position % BLOCK_SIZE] = value

    def kv(self, request: Request, position: int, layer: int, rank: int = 0) -> float:
        """What lies in the slot of a token."""
        block = request.blocks[position // BLOCK_SIZE].block_id
        slot = self.all_pages[rank][LAYERS[layer]][block, :, position % BLOCK_SIZE]
        assert (slot == slot.flatten()[0]).all()
        return float(slot.flatten()[0])

    def apply(self, step: Step) -> None:
        """The scheduler's part, afterwards."""
        output = step.output
        assert output is not None
        if output.is_empty():
            return
        self.invalid |= output.invalid_block_ids
        if output.kv_connector_stats is not None:
            self.stats.update(output.kv_connector_stats.data)
        for request in list(self._work):
            self._truncate(request, output.invalid_block_ids)
        self.scheduler.update_connector_output(output)
        self.received += sorted(output.finished_recving or ())
        for request_id in sorted(output.finished_sending or ()):
            self.sent.append(request_id)
            self.release(self.held.pop(request_id))

    def _truncate(self, request: Request, invalid: set[int]) -> None:
        for index, block in enumerate(request.blocks):
            if block.block_id in invalid:
                self.num_computed[request.request_id] = index * BLOCK_SIZE
                return

    def step(
        self, work: Mapping[Request, int] | None = None, preempted: Iterable[Request] = ()
    ) -> Step:
        """Plan, execute and apply."""
        step = self.plan(work, preempted)
        self.execute(step)
        self.apply(step)
        return step

    # ---------------------------------------------------------------- whole stories

    def prefill(self, request: Request, *, num_local: int = 0) -> int:
        """Admit and compute to the end; the number of external tokens."""
        num_external = self.admit(request, num_local=num_local)
        if num_external and self.scheduler.options.load_async:
            self.receive(request)
        while (rest := request.num_tokens - self.num_computed[request.request_id]) > 0:
            self.step({request: rest})
        return num_external

    def receive(self, request: Request) -> None:
        """Empty steps until its load has ended; then it goes on as an engine would let it."""
        self.until(lambda: request.request_id in self.received)
        self._truncate(request, self.invalid)
        self.allocated(request, 0)

    def run(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """A request from beginning to end, checked; the number of external tokens."""
        request = self.request(tokens, salt=salt)
        num_external = self.prefill(request)
        self.check(request)
        self.finish(request)
        self.settle()
        return num_external

    def settle(self) -> None:
        """Empty steps until nothing is held."""
        self.until(lambda: not self.held)

    def until(self, condition: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "the empty steps bring nothing"
            self.step()
            time.sleep(0.001)

    def check(self, request: Request, num_tokens: int | None = None) -> None:
        """All KV of the request is right: the oracle."""
        for rank in range(len(self.workers)):
            for layer in range(len(LAYERS)):
                value = 0.0
                for position, token in enumerate(request.all_token_ids[:num_tokens]):
                    value = token_kv(value, token, layer, rank)
                    found = self.kv(request, position, layer, rank)
                    assert found == value, (position, layer, rank)


def folders(root: Path) -> list[Path]:
    """All visible folders."""
    return sorted(path for path in root.glob("*/??/*") if len(path.name) == 64)


def store(root: Path, tokens: Sequence[int], **options: Any) -> None:
    """Save a prompt with an engine of its own."""
    with ExampleEngine(example_config(root, **options)) as engine:
        engine.run(tokens)
