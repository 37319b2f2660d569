"""One request on its way through the scheduler: its tokens, its blocks, its state.

Plain data with a few derived numbers; the scheduler alone changes it. Knows nothing of text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlace.engine.block_hash import BlockHash, HashMemo, TokenArray, extend_hashes, root_hash
from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.outputs import FinishReason, Usage
from interlace.engine.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything after PREEMPTED is finished (vLLM's order)."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason that the caller sees, None while the request goes on."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """A request that was checked and may be scheduled.

    Token ranges, always 0 <= num_computed_tokens <= num_tokens_in_flight:

        [0, num_computed_tokens)        KV computed, or being computed by a step in flight, or
                                        being loaded (WAITING_FOR_REMOTE_KVS)
        [.., hole_end)                  to be computed, or being loaded from the back (RUNNING)
        [.., num_tokens)                tokens whose ids are known: prompt and output
        [.., num_tokens_in_flight)      and those that steps in flight will sample
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | TokenArray,
        sampling_params: SamplingParams,
        *,
        seed: int,
        arrival: int,
        block_size: int,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        hash_memo: HashMemo | None = None,
    ) -> None:
        """Hashes the prompt's full blocks, those that `hash_memo` does not know: build it off the
        event loop for a very long prompt.

        `arrival` counts requests in the order of their submission and breaks ties.
        `kv_transfer_params` is the KV connector's to read and change.
        """
        self.request_id = request_id
        self.prompt_array: TokenArray = np.asarray(prompt_token_ids, dtype=np.int64)
        """The prompt, for those who take all of it at once. Not to be changed."""
        self.prompt_token_ids: tuple[int, ...] = tuple(self.prompt_array.tolist())
        self.sampling_params = sampling_params
        self.seed = seed
        self.arrival = arrival
        self.priority = priority
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        self.status = RequestStatus.WAITING
        self.stop_reason: str | int | None = None
        self.error: str | None = None

        self.all_token_ids = list(self.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        """Tokens that steps in flight will sample."""
        self.blocks: list[KVCacheBlock] = []
        self.num_hashed_blocks = 0
        """Blocks at the front of `blocks` whose content was offered to the pool."""
        self.block_hashes: list[BlockHash] = []
        self.epoch = 0
        """Counts how often computed tokens were lost to bad KV: results of older steps are void."""
        self.num_failed_loads = 0
        """Of its own; a load of which several blocks fail counts once."""
        self._failed_load_step_id = 0
        self.load_step_id = 0
        """The step that began the latest load, asynchronously or within itself."""
        self.load_start = 0
        """Where the latest asynchronous load begins; all before it was cached on the device."""
        self.hole_end: int | None = None
        """While the request runs and a connector loads from here backwards; None otherwise. Between
        `num_computed_tokens` and it lies what neither has done, too."""
        self.hole_start: int | None = None
        """Up to where the request is computed before it goes on behind such a load; None while that
        may still change, since the load goes on."""
        self.load_end = 0
        """Where `hole_end` was when the load began; bad blocks bring `hole_end` down."""
        self.last_step_id = 0
        """The newest step that touches `blocks`."""
        self.num_preemptions = 0
        self.num_local_cached_tokens: int | None = None
        """Of the first scheduled prefill; None before it."""
        self.num_external_cached_tokens = 0
        self.response_kv_transfer_params: dict[str, Any] | None = None
        """What the KV connector has to say to the caller at the end."""

        self._root_hash = root_hash(cache_salt=cache_salt)
        self._block_size = block_size
        extend_hashes(self.block_hashes, self._root_hash, self.prompt_array, block_size, hash_memo)

    def note_failed_load(self, step_id: int) -> None:
        """Step `step_id` reported bad KV among this request's. Counts if the request loaded it."""
        if self._failed_load_step_id != self.load_step_id and (
            self.awaits_load or self.load_step_id == step_id
        ):
            self._failed_load_step_id = self.load_step_id
            self.num_failed_loads += 1

    def set_back(self, num_tokens: int) -> None:
        """Forget all KV from position `num_tokens` on, and whatever steps in flight compute.

        Its blocks stay; the caller has withdrawn their content.
        """
        assert num_tokens <= self.num_computed_tokens
        self.epoch += 1
        self.num_computed_tokens = num_tokens
        self.num_output_placeholders = 0
        self.num_hashed_blocks = min(self.num_hashed_blocks, num_tokens // self._block_size)
        if self.num_local_cached_tokens is not None and not self.num_output_tokens:
            # Still in the first prefill: what was lost is computed after all.
            self.num_local_cached_tokens = min(self.num_local_cached_tokens, num_tokens)
            self.num_external_cached_tokens = min(
                self.num_external_cached_tokens, num_tokens - self.num_local_cached_tokens
            )

    def append_output(self, token_id: int) -> None:
        """Take a sampled token whose placeholder was counted before."""
        self.all_token_ids.append(token_id)
        extend_hashes(self.block_hashes, self._root_hash, self.all_token_ids, self._block_size)

    @property
    def awaits_load(self) -> bool:
        """Whether KV is being brought beside the steps, or was and the request has not gone on."""
        return self.status is RequestStatus.WAITING_FOR_REMOTE_KVS or self.hole_end is not None

    def hash_before(self, index: int) -> BlockHash:
        """The hash of all that stands before block number `index`."""
        return self.block_hashes[index - 1] if index else self._root_hash

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_in_flight(self) -> int:
        """Known tokens and those that steps in flight will sample."""
        return len(self.all_token_ids) + self.num_output_placeholders

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, a copy."""
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.is_finished

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_local_cached_tokens=self.num_local_cached_tokens or 0,
            num_external_cached_tokens=self.num_external_cached_tokens,
            num_generated_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name} computed={self.num_computed_tokens}"
            f" known={self.num_tokens} in_flight={self.num_output_placeholders}"
            f" blocks={len(self.blocks)}>"
        )
