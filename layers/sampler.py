"""From logits to tokens: one batched argmax for plain greedy rows, the others one by one.

Knows nothing of requests' lives, of stopping or of text. This is the plain form: a faster
sampler must give the same tokens. The order of the rules is the one in `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from interlace.engine.outputs import TokenLogprobs
from interlace.engine.sampling_params import SamplingParams
from interlace.layers import logits_rules as rules
from interlace.layers.random_draws import uniform

NO_TOKEN = -1
"""Stands where a row could not be sampled."""
NOT_FINITE = (
    "the model produced no finite logits (the largest is {}); "
    "use dtype='float32', and check the weights if that does not help."
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """Who a row of logits belongs to, and what sampling it depends on."""

    req_id: str
    params: SamplingParams
    seed: int
    """In [0, 2**64)."""
    prompt_token_ids: rules.IdArray
    """Shape [prompt tokens]; only read."""
    output_token_ids: rules.IdArray
    """Shape [tokens generated so far]; its length is the position of the draw. Only read."""
    stop_token_ids: Collection[int] = ()
    """Ids that would end the answer: impossible before `params.min_tokens` tokens."""

    @property
    def masks_stops(self) -> bool:
        """Whether `min_tokens` still forbids the stop ids."""
        return len(self.output_token_ids) < self.params.min_tokens and len(self.stop_token_ids) > 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the answer is the largest raw logit."""
        p = self.params
        return p.greedy and not (p.logit_bias or p.needs_history or self.masks_stops)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """The outcome of one `sample` call; the lists are parallel to its rows."""

    token_ids: list[int]
    """`NO_TOKEN` for a row in `errors`."""
    logprobs: list[TokenLogprobs | None]
    """None for a row that did not ask or is in `errors`."""
    errors: dict[str, str]
    """Request id -> why its row could not be sampled."""


class _NoChoiceError(Exception):
    """A row leaves nothing to choose from; the message says why."""


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
    """Choose one token for each row. Never changes `logits`. Device thread.

    `logits` has shape [len(rows), vocabulary], raw from the model. A row's result depends on
    its own logits and `SamplingRow` alone. Whatever goes wrong while one row is sampled with
    its parameters is reported in `errors` for its request, and the others are sampled.
    """
    assert logits.dim() == 2, "logits are [rows, vocabulary]"
    assert logits.shape[0] == len(rows), "one row of logits per request"
    result = SampledRows([], [], {})
    if not rows:
        return result
    # The first of equal logits wins, and a NaN beats everything: so `best` also shows bad rows.
    best_ids = logits.argmax(dim=-1)
    best = logits.gather(1, best_ids.unsqueeze(1)).squeeze(1)
    for i, (row, best_id, value) in enumerate(
        zip(rows, best_ids.tolist(), best.tolist(), strict=True)
    ):
        token_id, logprobs = NO_TOKEN, None
        try:
            token_id = _sample_row(logits[i], row, best_id, value)
            if row.params.logprobs is not None:
                logprobs = token_logprobs(logits[i], token_id, row.params.logprobs)
        except _NoChoiceError as error:
            result.errors[row.req_id] = str(error)
        except Exception as error:  # noqa: BLE001 - one request's parameters; the rest go on
            token_id = NO_TOKEN
            result.errors[row.req_id] = f"sampling failed: {type(error).__name__}: {error}"
        result.token_ids.append(token_id)
        result.logprobs.append(logprobs)
    return result


def _sample_row(logits: Tensor, row: SamplingRow, best_id: int, best: float) -> int:
    """The token of one row, whose largest raw logit is `best` at `best_id`."""
    if not math.isfinite(best):
        raise _NoChoiceError(NOT_FINITE.format(best))
    if row.plain_greedy:
        return best_id
    adjusted = adjusted_logits(logits, row)
    if not math.isfinite(float(adjusted.max())):
        raise _NoChoiceError(
            "the sampling parameters leave no token to choose; "
            "relax min_tokens, logit_bias or repetition_penalty."
        )
    if row.params.greedy:
        return int(adjusted.argmax())
    return _draw(adjusted, row)


def adjusted_logits(logits: Tensor, row: SamplingRow) -> Tensor:
    """A float64 copy of one row of raw logits [vocabulary] after bias, mask and penalties."""
    p = row.params
    adjusted = logits.to(torch.float64, copy=True)
    if p.logit_bias:
        rules.add_bias_(adjusted, p.logit_bias)
    if row.masks_stops:
        rules.mask_(adjusted, row.stop_token_ids)
    if p.repetition_penalty != 1.0:
        rules.penalise_repetition_(
            adjusted, row.prompt_token_ids, row.output_token_ids, p.repetition_penalty
        )
    if p.presence_penalty or p.frequency_penalty:
        rules.penalise_output_(
            adjusted, row.output_token_ids, p.presence_penalty, p.frequency_penalty
        )
    return adjusted


def _draw(adjusted: Tensor, row: SamplingRow) -> int:
    """Draw by the inverse of the cumulated probabilities, in the order of the token ids."""
    p = row.params
    weights = rules.relative_weights(adjusted, p.temperature)
    kept = rules.kept_tokens(weights, p.min_p, p.top_k, p.top_p)
    reached = weights[kept].cumsum(0)
    total = reached[-1]
    target = total * uniform(row.seed, len(row.output_token_ids))
    chosen = torch.searchsorted(reached, target, right=True)
    # Rounding may lift the target to the total: then the first token that reaches it is meant.
    return int(kept[torch.minimum(chosen, torch.searchsorted(reached, total))])


def token_logprobs(logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities (natural log) of one row of raw logits [vocabulary].

    Holds those of `token_id`, its rank, and the `top` most likely ones (all, if the vocabulary
    is smaller). Of equally likely tokens the lower id ranks first. Device thread.
    """
    logprobs = torch.log_softmax(logits.to(torch.float64), dim=-1)
    ahead = int((logits > logits[token_id]).sum()) + int(
        (logits[:token_id] == logits[token_id]).sum()
    )
    ids = rules.top_ids(logits, top) if top else logits.new_empty(0, dtype=torch.int64)
    ids = ids[rules.ranked(logits[ids])]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=ahead + 1,
        top=tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True)),
    )
