"""Attention of one long chunk by the matrix library: its pages are gathered, and cuDNN attends.

cuDNN computes long chunks about twice as fast as our kernel, but prepares each shape for 40 ms when
it first sees it. So everything is cut and padded to few shapes: keys before the chunk in pieces
whose sizes are powers of two, queries in multiples of 512. What is left over of the keys joins the
chunk itself, with rows before it whose answers nobody reads. Two answers over different keys are
joined by the logarithms of their weights.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, next_power_of_2, tl

QUERY_GRAIN = 512
KEY_GRAIN = 1024
"""The smallest piece of keys before a chunk."""
MAX_HEAD_DIM = 128
_TOKENS = 32
_HEADS = 8
_MATRIX_FLOPS = 700e12
_LAUNCH_S = 0.28e-3
"""Launching a layer takes the host so long with our kernel, and with the library so much more: for
the chunk, and for each call. Other hosts of such machines took up to twice as long, for all."""
_LAUNCH_GATHERED_S = 60e-6
_LAUNCH_CALL_S = 25e-6


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
            # Rows around a chunk's are computed, and their answers not read.
            torch.zeros((rows, num_heads, head_dim), dtype=dtype, device=device),
        )


class LibraryAnswer(NamedTuple):
    """What the library's attention comes to."""

    answer: Tensor
    """[1, heads, n, d], laid out like the queries: [n, heads, d]."""
    weight: Tensor
    """Natural logarithms of the weights, float32 [1, heads, n, 1]."""


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


@jit("num_heads", "skipped", "out_skipped")
def join_two_kernel(
    a: Pointer,
    a_weight: Pointer,
    b: Pointer,
    b_weight: Pointer,
    out: Pointer,
    num_heads: Scalar,
    skipped: Scalar,
    out_skipped: Scalar,
    a_token_stride: Scalar,
    b_token_stride: Scalar,
    out_token_stride: Scalar,
    a_weight_stride: Scalar,
    b_weight_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    heads: constexpr,
) -> None:
    """Join some heads of one token of `b` with those of `a`. Grid: (tokens, head groups).

    Weights are natural logarithms, [heads, tokens]; that of `a` becomes the sum's. Token 0 of `b`
    is token `skipped` of `a`, and goes to token `out_skipped` of `out`, which may be `a`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, padded_dim)
    real = head < num_heads
    mask = real[:, None] & (dim < head_dim)[None, :]
    place = head[:, None] * head_dim + dim[None, :]
    a_at = a + (token + skipped) * a_token_stride + place
    b_at = b + token * b_token_stride + place
    a_weight_at = a_weight + head * a_weight_stride + token + skipped
    wa = tl.load(a_weight_at, mask=real, other=0.0)
    wb = tl.load(b_weight + head * b_weight_stride + token, mask=real, other=0.0)
    top = tl.maximum(wa, wb)
    fa = tl.exp(wa - top)
    fb = tl.exp(wb - top)
    whole = fa + fb
    x = tl.load(a_at, mask=mask, other=0.0).to(tl.float32) * (fa / whole)[:, None]
    y = tl.load(b_at, mask=mask, other=0.0).to(tl.float32) * (fb / whole)[:, None]
    out_at = out + (token + out_skipped) * out_token_stride + place
    tl.store(out_at, (x + y).to(out.dtype.element_ty), mask=mask)
    tl.store(a_weight_at, top + tl.log(whole), mask=real)


class GatheredChunk:
    """One request's chunk in one step. What is the same in each layer is done once, here.

    Steps that overlap on the device may not share a workspace; the chunks of one step may.
    """

    def __init__(
        self,
        new: int,
        seq_len: int,
        block_ids: Tensor,
        workspace: GatherWorkspace,
        *,
        scale: float,
    ) -> None:
        """For the last `new` of the request's `seq_len` tokens; `block_ids` int32 is its row of the
        block table. Asserted: that they fit into the workspace."""
        cut = Cut.of(new, seq_len - new)
        rows = max(cut.rows, cut.skipped + _padded(new))
        assert cut.before + cut.rows <= workspace.keys.shape[1], "the workspace holds the keys"
        assert rows <= workspace.queries.shape[0], "it holds the queries"
        self._new = new
        self._seq_len = seq_len
        self._block_ids = block_ids
        self._workspace = workspace
        self._scale = scale
        self._cut = cut
        self._is_exact = cut.skipped == 0 and new == rows
        queries = workspace.queries
        self._place = queries[cut.skipped : cut.skipped + new]
        self._causal_queries = for_library(queries[: cut.rows])
        self._queries = for_library(queries[cut.skipped :][: _padded(new)])
        keys, values = workspace.keys[None], workspace.values[None]
        chunk = slice(cut.before, cut.before + cut.rows)
        self._causal_kv = keys[:, :, chunk], values[:, :, chunk]
        self._pieces = [(keys[:, :, piece], values[:, :, piece]) for piece in cut.pieces]

    def attend(self, q: Tensor, pages: Tensor, out: Tensor) -> None:
        """Put into `out` what `paged_attention` computes. 16-bit dtypes, no window.

        `q` and `out` are [new, heads, head_dim], rows contiguous; `pages` as in `paged_attention`.
        The library allocates, so this is not for graphs. Raises what torch raises if cuDNN does not
        take the shape.
        """
        cut, scale = self._cut, self._scale
        gather(pages, self._block_ids, self._seq_len, cut.before + cut.rows, self._workspace)
        if self._is_exact:
            causal_queries = queries = for_library(q)
        else:
            self._place.copy_(q)
            causal_queries, queries = self._causal_queries, self._queries
        whole = library_attention(causal_queries, *self._causal_kv, scale=scale, causal=True)
        if not self._pieces:
            out.copy_(whole[0][0].transpose(0, 1)[cut.skipped :][: self._new])
        for number, kv in enumerate(self._pieces, 1):
            part = library_attention(queries, *kv, scale=scale, causal=False)
            join_two(whole, part, cut.skipped, self._new, out, is_last=number == len(self._pieces))


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
    new: int,
    context: int,
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_sms: int,
    rest_flops: float | None = None,
) -> bool:
    """Whether the library is faster for such a chunk, by rates measured beside an H200.

    Our kernel reaches 330 TFLOP/s in the longest chunks, but 265 where the keys are shared out
    among programs and joined. The library reaches 650 where 128 query rows of each head make whole
    waves of programs, but rows are padded, and each call costs 10 us more.

    `rest_flops`: of the rest of the layer. A small model's layers are computed sooner than launched
    and the library takes longer to launch, so then it is not worth it. None: the device alone
    counts.
    """
    if dtype not in (torch.bfloat16, torch.float16) or head_dim > MAX_HEAD_DIM:
        return False
    cut = Cut.of(new, context)
    per_score = 4 * num_heads * head_dim
    rate = 330e12 if new >= 4 * QUERY_GRAIN else 265e12
    ours = per_score * new * (context + new / 2) / rate
    prefix = per_score * _padded(new) * cut.before / _library_rate(_padded(new), num_heads, num_sms)
    chunk = per_score * cut.rows**2 / 2 / _library_rate(cut.rows, num_heads, num_sms)
    library = prefix + 1.2 * chunk + 10e-6 * (5 + len(cut.pieces))
    if rest_flops is None or library >= ours:
        return library < ours
    rest = rest_flops / _MATRIX_FLOPS
    launch = _LAUNCH_S + _LAUNCH_GATHERED_S + _LAUNCH_CALL_S * (1 + len(cut.pieces))
    return max(rest + library, launch) < max(rest + ours, _LAUNCH_S)


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


def join_two(
    whole: LibraryAnswer,
    part: LibraryAnswer,
    skipped: int,
    new: int,
    out: Tensor,
    *,
    is_last: bool,
) -> None:
    """Join `part`, of `new` tokens, into `whole`, of `skipped` more before: in place, or, if it
    `is_last`, into `out` [new, heads, head_dim]. Both over the same queries and different keys."""
    (answer, weight), (other, other_weight) = whole, part
    _, num_heads, _, head_dim = answer.shape
    for one in (answer, other):
        assert one.stride(1) == head_dim, "a token's heads lie together"
        assert one.stride(3) == 1, "heads are contiguous"
    assert out.stride(1) == head_dim
    assert weight.stride(2) == other_weight.stride(2) == 1, "a head's weights are contiguous"
    target, out_skipped, out_stride = (
        (out, 0, out.stride(0)) if is_last else (answer, skipped, answer.stride(2))
    )
    join_two_kernel[new, -(-num_heads // _HEADS)](
        answer, weight, other, other_weight, target, num_heads, skipped, out_skipped,
        answer.stride(2), other.stride(2), out_stride, weight.stride(1), other_weight.stride(1),
        head_dim=head_dim, padded_dim=next_power_of_2(head_dim), heads=_HEADS, num_warps=4,
    )  # fmt: skip


def for_library(q: Tensor) -> Tensor:
    """[n, heads, d] as the library takes it: [1, heads, n, d], without a copy."""
    return q.transpose(0, 1)[None]


def library_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
) -> LibraryAnswer:
    """cuDNN's attention of `q` [1, heads, n, d] over `k` and `v` [1, kv_heads, m, d]."""
    answer, weight = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale  # noqa: FBT003
    )[:2]  # fmt: skip
    return LibraryAnswer(answer, weight)


def _padded(rows: int) -> int:
    return -(-rows // QUERY_GRAIN) * QUERY_GRAIN
