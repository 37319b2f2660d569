"""What a step must read and compute at the very least, from a model's sizes. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math

from interlace.layers.architecture import Architecture
from interlace.layers.weights import weight_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class WorkSize:
    """The least that one step of a batch can do."""

    num_bytes: int
    """To read: each weight once, rows of the embedding aside, and the KV of what is cached."""
    flops: int
    """Operations of matrix products and causal attention; a product and its sum are two."""


def work_size(
    architecture: Architecture, itemsize: int, *, batch_size: int, cached: int, new: int
) -> WorkSize:
    """One step in which each of `batch_size` requests computes `new` tokens behind `cached` ones.

    `itemsize` is bytes of a number, of weights and KV alike. Each request samples once, so the
    head, and what follows the last layer's attention, counts for one row of each.
    """
    numbers = num_weights(architecture) + batch_size * cached * kv_numbers(architecture)
    rows = _layers(architecture) * new - _after_last_attention(architecture) * (new - 1)
    pairs = new * cached + new * (new + 1) // 2
    attention = 4 * architecture.q_size * architecture.num_layers * pairs
    return WorkSize(
        num_bytes=itemsize * numbers,
        flops=batch_size * (2 * (rows + _head(architecture)) + attention),
    )


def num_weights(architecture: Architecture) -> int:
    """Numbers of all weights that each step goes through; a tied head is the embedding, read."""
    shapes = weight_shapes(architecture)
    if not architecture.tied_head:
        del shapes["embed"]
    return sum(math.prod(shape) for shape in shapes.values())


def kv_numbers(architecture: Architecture) -> int:
    """Numbers of K and V that all layers keep for one token."""
    return 2 * architecture.num_layers * architecture.kv_size


def _layers(a: Architecture) -> int:
    """Numbers of the matrices of all layers: what each token is multiplied by."""
    qkv = (a.q_size + 2 * a.kv_size) * a.hidden_size
    return a.num_layers * (qkv + _after_last_attention(a))


def _after_last_attention(a: Architecture) -> int:
    """Numbers of one layer's output projection and feed-forward."""
    return a.hidden_size * (a.q_size + 3 * a.intermediate_size)


def _head(a: Architecture) -> int:
    return a.vocab_size * a.hidden_size
