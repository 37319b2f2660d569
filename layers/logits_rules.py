"""What a request's sampling parameters do to one row of logits, one rule a function.

Knows nothing of batches or random numbers. All rows are 1-D float64 tensors over the
vocabulary, and the functions that end in an underscore change theirs in place. Token ids that
the vocabulary does not have are ignored. Device thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IdArray = npt.NDArray[np.int64]


def _index(ids: IdArray, row: Tensor) -> Tensor:
    """`ids` as an index into `row`, on its device."""
    return torch.from_numpy(ids).to(row.device)


def _known(ids: IdArray, row: Tensor) -> npt.NDArray[np.bool_]:
    """Which of `ids` the vocabulary has."""
    return (ids >= 0) & (ids < row.shape[0])


def add_bias_(row: Tensor, bias: Mapping[int, float]) -> None:
    """Add `bias[id]` to the logit of each token id."""
    ids = np.fromiter(bias.keys(), np.int64, len(bias))
    values = np.fromiter(bias.values(), np.float64, len(bias))
    known = _known(ids, row)
    row[_index(ids[known], row)] += torch.from_numpy(values[known]).to(row)


def mask_(row: Tensor, token_ids: Collection[int]) -> None:
    """Make the given token ids impossible."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    row[_index(ids[_known(ids, row)], row)] = -torch.inf


def penalise_repetition_(
    row: Tensor, prompt_ids: IdArray, output_ids: IdArray, penalty: float
) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output."""
    ids = np.unique(np.concatenate((prompt_ids, output_ids)))
    index = _index(ids[_known(ids, row)], row)
    seen = row[index]
    row[index] = torch.where(seen > 0, seen / penalty, seen * penalty)


def penalise_output_(
    row: Tensor, output_ids: IdArray, presence_penalty: float, frequency_penalty: float
) -> None:
    """Subtract `presence_penalty` once, and `frequency_penalty` per occurrence in the output."""
    ids, counts = np.unique(output_ids, return_counts=True)
    known = _known(ids, row)
    cost = presence_penalty + frequency_penalty * counts[known].astype(np.float64)
    row[_index(ids[known], row)] -= torch.from_numpy(cost).to(row)


def relative_weights(row: Tensor, temperature: float) -> Tensor:
    """exp((row - max) / temperature): the probabilities, scaled so that the largest is 1.

    Subtracting first keeps every exponent at or below 0, so that no temperature above 0
    overflows to NaN. At least one entry of `row` must be finite, and none NaN or +inf.
    """
    shifted = row - row.max()
    weights = torch.exp(shifted / temperature)
    # 0 / temperature is 0 / 0 where the device flushes tiny numbers to 0.
    return torch.where(shifted == 0, 1.0, weights)


def top_ids(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of `values`, ascending; of equals the first ones.

    `values` has one dimension; `count` is at least 1, and more than there are means all.
    """
    if count >= values.shape[0]:
        return torch.arange(values.shape[0], device=values.device)
    # topk promises no order among equals, so only its last value is used: the threshold.
    threshold = values.topk(count).values[-1]
    keep = values > threshold
    tied = torch.nonzero(values == threshold).squeeze(1)
    keep[tied[: count - int(keep.sum())]] = True
    return torch.nonzero(keep).squeeze(1)


def ranked(values: Tensor) -> Tensor:
    """Positions of all of `values`, largest first; of equals the first ones first."""
    return values.sort(descending=True, stable=True).indices


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Positions of the smallest set of largest `weights` that sums to `top_p` of all, ascending.

    Of equals the first ones are taken; the largest is always in the set.
    """
    total = weights.cumsum(0)[-1]
    # All weights below this sum to less than (1 - top_p) of the total, so the set is complete
    # without them. Sorting the few others is what makes top-p cheap on a large vocabulary.
    floor = torch.minimum((1.0 - top_p) * total / weights.shape[0], weights.max())
    candidates = torch.nonzero(weights >= floor).squeeze(1)
    order = candidates[ranked(weights[candidates])]
    # A weight is in if what stands before it falls short. Nothing stands before the first.
    count = 1 + int((weights[order].cumsum(0)[:-1] < top_p * total).sum())
    return order[:count].sort().values


def kept_tokens(weights: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Token ids that min-p, then top-k, then top-p leave to the draw, ascending; never empty.

    `weights` is what `relative_weights` returns. Top-p counts the probability of what the
    rules before it left. `top_k` 0 or -1, `min_p` 0 and `top_p` 1 leave everything.
    """
    ids = torch.nonzero((weights >= min_p) & (weights > 0)).squeeze(1)
    if top_k > 0:
        ids = ids[top_ids(weights[ids], top_k)]
    if top_p < 1.0:
        ids = ids[nucleus(weights[ids], top_p)]
    return ids
