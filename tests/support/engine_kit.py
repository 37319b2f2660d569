"""The real `AsyncEngine` over the oracle runner: a toy tokenizer, gates, and checks for leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import tokenizers
from paged_oracle import VOCAB_SIZE, PagedOracleRunner, answer
from tokenizers import models

from interlace.engine.async_engine import AsyncEngine
from interlace.engine.config import EngineConfig, KVTransferConfig, ModelConfig, SchedulingPolicy
from interlace.engine.connector_metrics import ConnectorMetrics  # noqa: F401 - not on the loop
from interlace.engine.outputs import ModelRunnerOutput, RequestOutput
from interlace.engine.ports import SchedulerConnector, WorkerConnector
from interlace.engine.request_stream import RequestStream
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.tokenizer import Tokenizer
from interlace.engine.tokenizer_parts import TokenizerParts

BLOCK_SIZE = 4
EOS = 7
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"[:VOCAB_SIZE]
PATIENCE_S = 20
"""How long a test waits for what must happen; never how long something takes."""


def toy_tokenizer() -> Tokenizer:
    """One token per letter of `ALPHABET`; other characters vanish."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[])
    )
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            table=[letter.encode() for letter in ALPHABET],
            eos_token_ids=(EOS,),
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        )
    )


def greedy(max_tokens: int | None = 8) -> SamplingParams:
    """No stop but the length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def right_text(prompt: Sequence[int], num_tokens: int) -> str:
    """What the oracle's answer reads like."""
    return "".join(ALPHABET[i] for i in answer(prompt, num_tokens))


class GatedRunner(PagedOracleRunner):
    """Announces each step, and executes it only once the test allows."""

    def __init__(
        self,
        num_blocks: int = 33,
        *,
        is_open: bool = False,
        connector: WorkerConnector | None = None,
    ) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, connector)
        self.executed: list[SchedulerOutput] = []
        self.error: BaseException | None = None
        """Raised by the next step that is let through, in place of a result."""
        self.request_errors: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._entered: asyncio.Queue[SchedulerOutput] = asyncio.Queue()
        self._permits = threading.Semaphore(0)
        self._open = is_open

    async def next_step(self) -> SchedulerOutput:
        """The next step that has reached the device thread, in order, whether it may run or not."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._entered.get()

    def allow(self, num_steps: int = 1) -> None:
        """Let that many steps through."""
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        """Hold no step back any more."""
        self._open = True
        self._permits.release()

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._loop.call_soon_threadsafe(self._entered.put_nowait, scheduler_output)
        if not self._open:
            assert self._permits.acquire(timeout=PATIENCE_S), "the test never let this step run"
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.executed.append(scheduler_output)
        output = super().execute(scheduler_output)
        hit = {i: e for i, e in self.request_errors.items() if i in output.sampled_token_ids}
        tokens = {i: t for i, t in output.sampled_token_ids.items() if i not in hit}
        return ModelRunnerOutput(tokens, {}, hit, output.kv_connector_output)


@dataclasses.dataclass
class OpenEngine:
    """An engine in its `async with`, and the runner that it drives."""

    engine: AsyncEngine
    runner: GatedRunner
    kept: list[RequestStream] = dataclasses.field(default_factory=list)
    """Streams that nobody reads: dropping one would abort its request."""

    def generate(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int | None = 8,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        return self.engine.generate(
            prompt, greedy(max_tokens), request_id=request_id, priority=priority
        )

    async def assert_works(self) -> None:
        """A new request gets its right answer, then nothing is left of anything."""
        self.runner.open()
        async with asyncio.timeout(PATIENCE_S):
            done = await self.engine.complete([3, 1, 4, 1, 5], greedy(6))
        assert list(done.token_ids) == answer([3, 1, 4, 1, 5], 6)
        await self.assert_nothing_left()

    async def assert_nothing_left(self) -> None:
        """Idle, and no map remembers anything."""
        engine, scheduler = self.engine, self.engine._scheduler
        # The runner is told of the last end by a step without tokens.
        await until(lambda: engine.snapshot().idle and not scheduler._finished_req_ids)
        assert not self.runner.state.requests
        snapshot = engine.snapshot()
        assert snapshot.num_fenced_blocks == 0
        assert not scheduler.requests
        assert not scheduler.kv_cache._pending
        assert not engine._preparing
        assert len(engine._outputs) == 0
        assert all(block.ref_cnt == 0 for block in scheduler.kv_cache.pool.blocks)
        assert all(block.pending_step is None for block in scheduler.kv_cache.pool.blocks)


def build_engine(
    runner: GatedRunner,
    *,
    depth: int = 1,
    num_blocks: int = 32,
    max_model_len: int = 100,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting_requests: int = 100,
    policy: SchedulingPolicy = "fcfs",
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    connector: SchedulerConnector | None = None,
    failure_policy: Literal["fail", "recompute"] = "fail",
) -> AsyncEngine:
    """Not opened yet. `num_blocks` counts the usable ones."""
    config = EngineConfig(
        model="toy",
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks + 1,
        max_inflight_steps=depth,
        max_waiting_requests=max_waiting_requests,
        scheduling_policy=policy,
        kv_transfer_config=KVTransferConfig(kv_load_failure_policy=failure_policy),
        seed=seed,
    )
    model = ModelConfig("toy", "float32", max_model_len, VOCAB_SIZE, (EOS,), seed)
    return AsyncEngine(config, model, runner, tokenizer, connector=connector)


@asynccontextmanager
async def open_engine(
    *,
    is_open: bool = False,
    depth: int = 1,
    num_blocks: int = 32,
    max_model_len: int = 100,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting_requests: int = 100,
    policy: SchedulingPolicy = "fcfs",
    with_tokenizer: bool = True,
    seed: int = 0,
    connector: tuple[SchedulerConnector, WorkerConnector] | None = None,
    failure_policy: Literal["fail", "recompute"] = "recompute",
) -> AsyncIterator[OpenEngine]:
    """An engine whose steps wait for the test, unless `is_open`. Opens the gates at the end."""
    scheduler_side, worker_side = connector or (None, None)
    runner = GatedRunner(num_blocks + 1, is_open=is_open, connector=worker_side)
    engine = build_engine(
        runner,
        depth=depth,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_requests=max_waiting_requests,
        policy=policy,
        tokenizer=toy_tokenizer() if with_tokenizer else None,
        seed=seed,
        connector=scheduler_side,
        failure_policy=failure_policy,
    )
    async with asyncio.timeout(2 * PATIENCE_S), engine:
        try:
            yield OpenEngine(engine, runner)
        finally:
            runner.open()
    assert runner.closed


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the loop has brought `condition` about."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of any state, also where no event tells
            await asyncio.sleep(0.001)


async def read_all(stream: RequestStream) -> list[RequestOutput]:
    """Every delta until the end."""
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in stream]


def tokens_of(deltas: Sequence[RequestOutput]) -> list[int]:
    """All token ids of an answer."""
    return [token_id for delta in deltas for token_id in delta.token_ids]
