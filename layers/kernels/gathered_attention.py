"""Attention of one long chunk by the matrix library: its pages are gathered, and cuDNN attends.

cuDNN computes long chunks about twice as fast as our kernel, but prepares each shape for 40 ms when
it first sees it. So everything is cut and padded to few shapes: keys before the chunk in pieces
whose sizes are powers of two, queries in multiples of 512. What is left over of the keys joins the
chunk itself, with rows before it whose answers nobody reads. Two answers over different keys are
joined by the logarithms of their weights.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, next_power_of_2, tl

QUERY_GRAIN = 512
KEY_GRAIN = 1024
"""The smallest piece of keys before a chunk."""
MAX_HEAD_DIM = 128
_TOKENS = 32
_HEADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class GatherWorkspace:
    """Where K, V and Q are put in the shapes that the library is called with."""

    keys: Tensor
    """[kv_heads, `key_capacity`, head_dim], contiguous, as are the others."""
    values: Tensor
    queries: Tensor
    """[`query_capacity`, heads, head_dim]."""

    @classmethod
    def allocate(
        cls,
        *,
        max_new: int,
        max_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> GatherWorkspace:
        """For chunks of up to `max_new` tokens of requests of up to `max_len`."""
        rows = _padded(max_new + KEY_GRAIN)
        kv = (num_kv_heads, max_len + rows, head_dim)
        return cls(
            torch.empty(kv, dtype=dtype, device=device),
            torch.empty(kv, dtype=dtype, device=device),
            torch.empty((rows, num_heads, head_dim), dtype=dtype, device=device),
        )


@jit("length", "padded_length")
def gather_kernel(
    pages: Pointer,
    block_table: Pointer,
    keys: Pointer,
    values: Pointer,
    length: Scalar,
    padded_length: Scalar,
    page_stride: Scalar,
    half_stride: Scalar,
    slot_stride: Scalar,
    head_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    block_size: constexpr,
    tokens: constexpr,
) -> None:
    """Copy `tokens` tokens' K or V of one head, zeros behind `length`.

    Grid: (padded_length / tokens rounded up, kv heads, 2).
    """
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    head = tl.program_id(1)
    half = tl.program_id(2)
    dim = tl.arange(0, padded_dim)
    present = token < length
    block = tl.load(block_table + token // block_size, mask=present, other=0).to(tl.int64)
    slot = block * page_stride + token % block_size * slot_stride
    at = pages + slot[:, None] + half * half_stride + head * head_stride + dim[None, :]
    narrow = (dim < head_dim)[None, :]
    kept = tl.load(at, mask=present[:, None] & narrow, other=0.0)
    place = head.to(tl.int64) * out_head_stride + token * head_dim
    mask = (token < padded_length)[:, None] & narrow
    out = keys
    if half == 1:
        out = values
    tl.store(out + place[:, None] + dim[None, :], kept, mask=mask)


@jit("num_heads")
def join_two_kernel(
    a: Pointer,
    a_weight: Pointer,
    b: Pointer,
    b_weight: Pointer,
    num_heads: Scalar,
    a_token_stride: Scalar,
    b_token_stride: Scalar,
    a_weight_stride: Scalar,
    b_weight_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    heads: constexpr,
) -> None:
    """Join `b` into `a` and its weight for some heads of one token. Grid: (tokens, head groups).

    Weights are natural logarithms, [heads, tokens].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, padded_dim)
    real = head < num_heads
    mask = real[:, None] & (dim < head_dim)[None, :]
    a_at = a + token * a_token_stride + head[:, None] * head_dim + dim[None, :]
    b_at = b + token * b_token_stride + head[:, None] * head_dim + dim[None, :]
    a_weight_at = a_weight + head * a_weight_stride + token
    wa = tl.load(a_weight_at, mask=real, other=0.0)
    wb = tl.load(b_weight + head * b_weight_stride + token, mask=real, other=0.0)
    top = tl.maximum(wa, wb)
    fa = tl.exp(wa - top)
    fb = tl.exp(wb - top)
    whole = fa + fb
    x = tl.load(a_at, mask=mask, other=0.0).to(tl.float32) * (fa / whole)[:, None]
    y = tl.load(b_at, mask=mask, other=0.0).to(tl.float32) * (fb / whole)[:, None]
    tl.store(a_at, (x + y).to(a.dtype.element_ty), mask=mask)
    tl.store(a_weight_at, top + tl.log(whole), mask=real)


def gathered_attention(
    q: Tensor,
    pages: Tensor,
    block_ids: Tensor,
    seq_len: int,
    *,
    scale: float,
    workspace: GatherWorkspace,
) -> Tensor:
    """What `paged_attention` computes for one request's chunk. 16-bit dtypes, no window.

    `q` [n, heads, head_dim] are the last n of the request's `seq_len` tokens; `block_ids` int32 is
    its row of the block table; `pages` as in `paged_attention`. Returns [n, heads, head_dim], rows
    contiguous, in memory of its own: the library allocates, so this is not for graphs. Asserted:
    that it fits into the workspace. Raises what torch raises if cuDNN does not take the shape.
    """
    new = q.shape[0]
    cut = Cut.of(new, seq_len - new)
    assert cut.before + cut.rows <= workspace.keys.shape[1], "the workspace holds the keys"
    assert cut.skipped + _padded(new) <= workspace.queries.shape[0], "it holds the queries"
    gather(pages, block_ids, seq_len, cut.before + cut.rows, workspace)
    queries = _placed(q, cut, workspace.queries)
    chunk = slice(cut.before, cut.before + cut.rows)
    answer, weight = library_attention(
        queries[: cut.rows],
        workspace.keys[:, chunk],
        workspace.values[:, chunk],
        scale=scale,
        causal=True,
    )
    answer, weight = answer[cut.skipped :][:new], weight[:, cut.skipped :][:, :new]
    rows = queries[cut.skipped :][: _padded(new)]
    for piece in cut.pieces:
        part = library_attention(
            rows, workspace.keys[:, piece], workspace.values[:, piece], scale=scale, causal=False
        )
        join_two(answer, weight, *part)
    return answer


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a chunk and what lies before it are cut up."""

    pieces: tuple[slice, ...]
    """Keys before the chunk, in pieces."""
    before: int
    """Keys in the pieces. The causal part begins here."""
    skipped: int
    """Rows of the causal part before the chunk's own."""
    rows: int
    """Rows of the causal part, padding included."""

    @classmethod
    def of(cls, new: int, context: int) -> Cut:
        """For `new` tokens after `context` others."""
        before = context // KEY_GRAIN * KEY_GRAIN
        pieces = []
        at = 0
        while at < before:
            size = 1 << ((before - at).bit_length() - 1)
            pieces.append(slice(at, at + size))
            at += size
        skipped = context - before
        return cls(tuple(pieces), before, skipped, _padded(skipped + new))


def prefers_gathered(
    new: int, context: int, *, num_heads: int, head_dim: int, dtype: torch.dtype, num_sms: int
) -> bool:
    """Whether the library is faster for such a chunk, by rates measured on an H200.

    Our kernel reaches 330 TFLOP/s in the longest chunks, but 265 where the keys are shared out
    among programs and joined. The library reaches 650 where 128 query rows of each head make whole
    waves of programs, but rows are padded, and each call costs 10 us more.
    """
    if dtype not in (torch.bfloat16, torch.float16) or head_dim > MAX_HEAD_DIM:
        return False
    cut = Cut.of(new, context)
    per_score = 4 * num_heads * head_dim
    rate = 330e12 if new >= 4 * QUERY_GRAIN else 265e12
    ours = per_score * new * (context + new / 2) / rate
    prefix = per_score * _padded(new) * cut.before / _library_rate(_padded(new), num_heads, num_sms)
    chunk = per_score * cut.rows**2 / 2 / _library_rate(cut.rows, num_heads, num_sms)
    return prefix + 1.2 * chunk + 10e-6 * (5 + len(cut.pieces)) < ours


def _library_rate(rows: int, num_heads: int, num_sms: int) -> float:
    programs = -(-rows // 128) * num_heads
    return 650e12 * programs / (-(-programs // num_sms) * num_sms)


def gather(
    pages: Tensor, block_ids: Tensor, length: int, padded_length: int, workspace: GatherWorkspace
) -> None:
    """Copy the first `length` tokens' K and V into the workspace, zeros up to `padded_length`."""
    _, _, block_size, num_kv_heads, head_dim = pages.shape
    keys, values = workspace.keys, workspace.values
    assert pages.stride(4) == block_ids.stride(0) == 1, "heads and the table are contiguous"
    assert block_ids.dtype == torch.int32
    assert length <= len(block_ids) * block_size, "the table holds the request's blocks"
    assert pages.dtype == keys.dtype, "one dtype"
    gather_kernel[-(-padded_length // _TOKENS), num_kv_heads, 2](
        pages, block_ids, keys, values, length, padded_length, *pages.stride()[:4], keys.stride(0),
        head_dim=head_dim, padded_dim=next_power_of_2(head_dim), block_size=block_size,
        tokens=_TOKENS, num_warps=4,
    )  # fmt: skip


def join_two(answer: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor) -> None:
    """Join `other` [at least n, heads, head_dim] into `answer` [n, ...], and its weight [heads, n].

    Both over the same queries and different keys; weights are logarithms.
    """
    new, num_heads, head_dim = answer.shape
    assert answer.stride(1) == other.stride(1) == head_dim, "rows are contiguous"
    assert weight.stride(1) == other_weight.stride(1) == 1, "a head's weights are contiguous"
    join_two_kernel[new, -(-num_heads // _HEADS)](
        answer, weight, other, other_weight, num_heads, answer.stride(0), other.stride(0),
        weight.stride(0), other_weight.stride(0),
        head_dim=head_dim, padded_dim=next_power_of_2(head_dim), heads=_HEADS, num_warps=4,
    )  # fmt: skip


def library_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """cuDNN's attention of `q` [n, heads, d] over `k` and `v` [kv_heads, m, d].

    Returns answers [n, heads, d] and the logarithms of their weights, float32 [heads, n].
    """
    answer, weight = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale  # noqa: FBT003
    )[:2]  # fmt: skip
    return answer[0].transpose(0, 1), weight[0, :, :, 0]


def _placed(q: Tensor, cut: Cut, queries: Tensor) -> Tensor:
    """`q` behind the skipped rows, with zeros around it up to where the library reads."""
    new = q.shape[0]
    end = cut.skipped + new
    if cut.skipped == 0 and end == cut.rows:
        return q  # nothing is around it
    queries[: cut.skipped].zero_()
    queries[cut.skipped : end].copy_(q)
    queries[end : max(cut.rows, cut.skipped + _padded(new))].zero_()
    return queries


def _padded(rows: int) -> int:
    return -(-rows // QUERY_GRAIN) * QUERY_GRAIN
