"""A step runner without a model that still finds every wrong KV.

Its "KV" of a token is a number that depends on all tokens before it, kept in pages and read back
through the block table. The next token is a function of that number, so one wrong, stale or
painted slot anywhere in a request's past changes its answer, and is reported at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.runner_state import RunnerRequest, RunnerState

PAINT = -1
VOCAB_SIZE = 50


def _mix(before: int, token_id: int) -> int:
    digest = hashlib.blake2b(f"{before},{token_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that a right engine gives after `prompt`."""
    state = 0
    for token_id in prompt:
        state = _mix(state, token_id)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(state % VOCAB_SIZE)
        state = _mix(state, tokens[-1])
    return tokens


class PagedOracleRunner:
    """The oracle as a `StepRunner`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pages: dict[tuple[int, int], int] = {}  # (block id, offset) -> KV
        self.state = RunnerState()
        self.closed = False

    def paint(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Overwrite whole blocks with what no right answer contains."""
        for block in blocks:
            for offset in range(self.block_size):
                self.pages[block.block_id, offset] = PAINT

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        requests = self.state.update(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        for source, target in scheduler_output.block_copies:
            for offset in range(self.block_size):
                self.pages[target, offset] = self.pages.get((source, offset), PAINT)
        # All writes of a step come before its reads, as in a layer of the real runner.
        for request in requests:
            assert counts[request.req_id] >= 1, "a step computes at least one token of a request"
            self._write(request, counts[request.req_id])
        sampled = {}
        for request in requests:
            end = request.num_computed_tokens + counts[request.req_id]
            value = self._read_checked(request, end)
            if request.req_id in scheduler_output.sampling_req_ids:
                token_id = value % VOCAB_SIZE
                request.tokens.append(token_id)
                sampled[request.req_id] = (token_id,)
        return ModelRunnerOutput(sampled)

    def close(self) -> None:
        self.closed = True

    def _slot(self, request: RunnerRequest, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return request.block_ids[block], offset

    def _write(self, request: RunnerRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        value = self._expected(request, start)
        for position in range(start, start + num_tokens):
            value = _mix(value, int(request.tokens.view(position, position + 1)[0]))
            self.pages[self._slot(request, position)] = value

    def _expected(self, request: RunnerRequest, end: int) -> int:
        value = 0
        for token_id in request.tokens.view(0, end).tolist():
            value = _mix(value, token_id)
        return value

    def _read_checked(self, request: RunnerRequest, end: int) -> int:
        value = 0
        for position, token_id in enumerate(request.tokens.view(0, end).tolist()):
            value = _mix(value, token_id)
            found = self.pages.get(self._slot(request, position))
            assert found == value, (
                f"{request.req_id}: wrong KV at position {position}, "
                f"block {self._slot(request, position)[0]}: "
                f"{'painted' if found == PAINT else 'foreign or stale'}"
            )
        return value


def paint_when_reused(scheduler: Scheduler, runner: PagedOracleRunner) -> None:
    """Paint every block at the moment in which it loses its content for a new owner.

    That is while older steps may still be in flight: if one of them writes to the block late,
    the new owner reads it, and the oracle sees it.
    """
    pool = scheduler.kv_cache.pool
    get_new_blocks = pool.get_new_blocks

    def painting(num_blocks: int) -> list[KVCacheBlock]:
        blocks = get_new_blocks(num_blocks)
        runner.paint(blocks)
        return blocks

    pool.get_new_blocks = painting  # type: ignore[method-assign]
