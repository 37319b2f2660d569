"""What comes out: of one step (to the scheduler) and of one request (to its caller).

Plain frozen records, no torch, and how consecutive deltas merge into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.step_timings import Timings

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the raw logits (natural log)."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, logprob), most likely first; as many as were asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. The `cached` ones are of its first scheduled prefill."""

    num_prompt_tokens: int
    num_local_cached_tokens: int
    """Prompt tokens whose KV the device already held."""
    num_external_cached_tokens: int
    """Prompt tokens whose KV a connector brought."""
    num_generated_tokens: int
    num_preemptions: int = 0

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that the first prefill had to compute."""
        return (
            self.num_prompt_tokens - self.num_local_cached_tokens - self.num_external_cached_tokens
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """One delta of one request: what is new since the delta before. The last one is finished."""

    request_id: str
    text_delta: str = ""
    token_ids: tuple[int, ...] = ()
    """The new token ids only."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token id, if they were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer; None for end of sequence."""
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""
    usage: Usage | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last delta."""
        return self.finish_reason is not None


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """One delta that says what all of these, consecutive and at least one, said."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = tuple(one for output in outputs for one in output.logprobs or ())
    return dataclasses.replace(
        outputs[-1],
        text_delta="".join(output.text_delta for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=logprobs,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `AsyncEngine.complete` returns it."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one executed step returns to the scheduler, from the device thread."""

    sampled_token_ids: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Request id -> new tokens; absent where a step ended inside a prompt."""
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = dataclasses.field(default_factory=dict)
    """Request id -> one record per sampled token, for requests that asked."""
    request_errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Request id -> why sampling with its parameters failed; that request alone ends."""
    kv_connector_output: KVConnectorOutput | None = None
    """What the KV connector reports with this step; None if it has nothing to say."""
    num_stray_reports: int = 0
    """Reports of single workers that counted for nothing."""
    timings: Timings | None = None
    """Of steps and transfers that have ended by now; None unless the runner records."""
