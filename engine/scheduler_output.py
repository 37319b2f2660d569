"""The one message from the scheduler to a step runner (vLLM's `SchedulerOutput`, frozen).

Block ids are a tuple with one list per KV-cache group; there is one group so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from interlace.engine.block_hash import TokenArray
from interlace.engine.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]


class BlockCopy(NamedTuple):
    """Copy a whole block, in every layer, before the step writes anything."""

    source_block_id: int
    target_block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the runner sees for the first time."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    """Resolved: the request's own, or the one that the engine picked."""
    block_ids: BlockIds
    """All blocks that the request holds, prefix hits included, in order of position."""
    num_computed_tokens: int
    """Tokens whose KV is in those blocks when the step starts."""
    prompt_array: TokenArray | None = dataclasses.field(default=None, compare=False, repr=False)
    """The prompt once more, where it exists as an array: a long one is not to be converted again.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Requests that the runner knows already, as parallel lists."""

    req_ids: list[str] = dataclasses.field(default_factory=list)
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    """Preempted before: their `new_block_ids` replace the old list."""
    new_block_ids: list[BlockIds | None] = dataclasses.field(default_factory=list)
    """Blocks added since the last step, or None."""
    all_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Request id -> prompt and output so far, for resumed requests."""
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    num_output_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens sampled before this step. The runner forgets any beyond: a step whose loaded KV was
    bad has sampled them."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: which tokens of which requests to compute."""

    step_id: int
    """Counts from 1; a step is applied in the order in which it was scheduled."""
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: Mapping[str, int]
    """Request id -> tokens to compute in this step, at least 1."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Requests that ended since the step before; the runner forgets them. Delivered once."""
    preempted_req_ids: frozenset[str]
    """Requests that lost their blocks since the step before, none of which is in this one."""
    sampling_req_ids: frozenset[str]
    """Requests whose last known token is computed in this step, so that one is sampled."""
    block_copies: tuple[BlockCopy, ...] = ()
    """All are done before anything else of the step. A source holds what it held before the step;
    no block is a target twice, or source and target."""
    zeroed_block_ids: tuple[int, ...] = ()
    """Zero these before the step's loads begin: a load fills them only in part."""
    loading_block_ids: frozenset[int] = frozenset()
    """Blocks that a connector fills within this step."""
    async_loading_req_ids: frozenset[str] = frozenset()
    """Requests whose asynchronous loads begin with this step."""
    kv_connector_metadata: Any = None
