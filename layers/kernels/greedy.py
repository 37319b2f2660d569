"""The largest logit of each row and its token, in two passes: one program cannot read a row fast.

What comes out is packed for one copy to the host, and noted where the next step looks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, next_power_of_2, tl

PART = 4096
"""Logits that one program looks at."""


@jit("vocab")
def best_of_part_kernel(
    logits: Pointer,
    values: Pointer,
    places: Pointer,
    vocab: Scalar,
    row_stride: Scalar,
    parts: constexpr,
    size: constexpr,
) -> None:
    """The largest of `size` logits of one row, and where it stands. Grid: (parts, rows).

    Of equals the first. NaN where there is any NaN.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = part * size + tl.arange(0, size)
    inside = place < vocab
    value = tl.load(logits + row * row_stride + place, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    spoilt = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value != value, float("-inf"), value), 0)
    first = tl.min(tl.where((value == best) & inside, place, vocab), 0)
    tl.store(values + row * parts + part, tl.where(spoilt > 0, float("nan"), best))
    tl.store(places + row * parts + part, first)


@jit("vocab")
def best_of_row_kernel(
    values: Pointer,
    places: Pointer,
    rows: Pointer,
    newest: Pointer,
    token_ids: Pointer,
    best: Pointer,
    vocab: Scalar,
    parts: constexpr,
    padded: constexpr,
) -> None:
    """Of the parts of one row. Grid: (rows,)."""
    row = tl.program_id(0)
    part = tl.arange(0, padded)
    inside = part < parts
    value = tl.load(values + row * parts + part, mask=inside, other=float("-inf"))
    place = tl.load(places + row * parts + part, mask=inside, other=0)
    spoilt = tl.max((value != value).to(tl.int32), 0)
    top = tl.max(tl.where(value != value, float("-inf"), value), 0)
    first = tl.min(tl.where((value == top) & inside, place, vocab), 0)
    token_id = tl.where(spoilt > 0, 0, first)
    tl.store(token_ids + row, token_id)
    tl.store(best + row, tl.where(spoilt > 0, float("nan"), top))
    tl.store(newest + tl.load(rows + row), token_id.to(tl.int64))


def greedy(logits: Tensor, rows: Tensor, newest: Tensor, *, out: Tensor) -> Tensor:
    """The first of the largest logits of each row of `logits` [N, vocabulary]. Returns `out`.

    `out` is int32 [2, N]: token ids, and the bits of the logits as float32, NaN for a row that
    holds any. The token of row i also goes to `newest[rows[i]]`; both are int64. Rows of `logits`
    are contiguous; N > 0. Asserted: shapes, dtypes, strides.
    """
    num_rows, vocab = logits.shape
    assert num_rows > 0, "a grid is not empty"
    assert rows.shape == (num_rows,), "a place for each row"
    assert rows.dtype == newest.dtype == torch.int64
    assert out.shape == (2, num_rows), "a token and a logit for each row"
    assert out.dtype == torch.int32
    assert logits.stride(1) == rows.stride(0) == out.stride(1) == 1, "rows are contiguous"
    parts = -(-vocab // PART)
    values = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    best_of_part_kernel[parts, num_rows](
        logits, values, places, vocab, logits.stride(0), parts=parts, size=PART, num_warps=8
    )
    best_of_row_kernel[(num_rows,)](
        values, places, rows, newest, out[0], out[1].view(torch.float32), vocab,
        parts=parts, padded=next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return out
