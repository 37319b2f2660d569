"""What a runner remembers of each request between steps: tokens and block table.

It follows the scheduler's messages and appends sampled tokens itself, so that a step can be
planned before the tokens of the step before it are known. Device thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from interlace.engine.block_hash import TokenArray
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput


class TokenBuffer:
    """A growing array of token ids."""

    def __init__(self, token_ids: Sequence[int] | TokenArray) -> None:
        self._ids: TokenArray = np.array(token_ids, dtype=np.int64)
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Add one token; amortised constant time."""
        if self._length == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids), [0]))
        self._ids[self._length] = token_id
        self._length += 1

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._length = min(self._length, length)

    def view(self, start: int, end: int | None = None) -> TokenArray:
        """Tokens [start, end) without a copy; valid until the next `append`."""
        return self._ids[start : self._length if end is None else end]


@dataclasses.dataclass(slots=True)
class RunnerRequest:
    """One request as the runner knows it."""

    req_id: str
    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    tokens: TokenBuffer
    block_ids: list[int]
    num_computed_tokens: int
    """When the step begins."""
    num_launched_tokens: int = 0
    """Of which KV will be there when the newest step that computes some of it has ended."""


class RunnerState:
    """All requests that the scheduler has named and not yet declared finished."""

    def __init__(self) -> None:
        self.requests: dict[str, RunnerRequest] = {}

    def update(self, output: SchedulerOutput) -> list[RunnerRequest]:
        """Follow one message; returns the step's requests in batch order."""
        # First the finished ones: a new request may have the id of one that just ended.
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._update_cached(output.scheduled_cached_reqs)
        requests = [self.requests[req_id] for req_id in output.num_scheduled_tokens]
        for request, num_new in zip(requests, output.num_scheduled_tokens.values(), strict=True):
            request.num_launched_tokens = request.num_computed_tokens + num_new
        return requests

    def _add(self, new: NewRequestData) -> None:
        self.requests[new.req_id] = RunnerRequest(
            req_id=new.req_id,
            sampling_params=new.sampling_params,
            seed=new.seed,
            num_prompt_tokens=len(new.prompt_token_ids),
            tokens=TokenBuffer(
                new.prompt_token_ids if new.prompt_array is None else new.prompt_array
            ),
            block_ids=list(new.block_ids[0]),
            num_computed_tokens=new.num_computed_tokens,
        )

    def _update_cached(self, cached: CachedRequestData) -> None:
        for req_id, added, num_computed, num_output in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            request = self.requests[req_id]
            request.num_computed_tokens = num_computed
            request.tokens.truncate(request.num_prompt_tokens + num_output)
            if req_id in cached.resumed_req_ids:
                request.block_ids = []
                request.tokens = TokenBuffer(cached.all_token_ids[req_id])
            elif num_computed < request.num_launched_tokens:
                # Set back. A void step may still be sampling: it shall not find these tokens.
                request.tokens = TokenBuffer(request.tokens.view(0))
            if added is not None:
                request.block_ids.extend(added[0])
