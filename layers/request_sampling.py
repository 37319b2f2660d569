"""The next token of each request of a step, by the plain sampler. Device thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from interlace.engine.outputs import ModelRunnerOutput
from interlace.layers.runner_state import RunnerRequest
from interlace.layers.sampler import SamplingRow, sample


def sample_requests(
    logits: Tensor, requests: Sequence[RunnerRequest], eos_token_ids: Collection[int]
) -> ModelRunnerOutput:
    """Sample from `logits` [len(requests), vocabulary]; each request gets its token appended."""
    sampled = sample(logits, [_row(request, eos_token_ids) for request in requests])
    tokens, logprobs = {}, {}
    for request, token_id, chosen in zip(
        requests, sampled.token_ids, sampled.logprobs, strict=True
    ):
        # A request that failed still gets a token here: a later step may be planned already.
        request.tokens.append(max(token_id, 0))
        if request.req_id in sampled.errors:
            continue
        tokens[request.req_id] = (token_id,)
        if chosen is not None:
            logprobs[request.req_id] = (chosen,)
    return ModelRunnerOutput(tokens, logprobs, sampled.errors)


def _row(request: RunnerRequest, eos_token_ids: Collection[int]) -> SamplingRow:
    params = request.sampling_params
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops.update(eos_token_ids)
    return SamplingRow(
        req_id=request.req_id,
        params=params,
        seed=request.seed,
        prompt_token_ids=request.tokens.view(0, request.num_prompt_tokens),
        output_token_ids=request.tokens.view(request.num_prompt_tokens),
        stop_token_ids=stops,
    )
