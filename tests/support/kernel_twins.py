"""Plain torch twins of the kernels, in float64 where rounding is not part of the promise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from interlace.layers.kv_pages import K, V
from interlace.layers.norm import rms_norm
from interlace.layers.rotary import rotate


def paged_attention_twin(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Float64 answers; NaN in rows that belong to no request. Reads what rows see, no slot more."""
    out = torch.full(q.shape, torch.nan, dtype=torch.float64, device=q.device)
    starts = query_start_loc.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        if length == 0:
            out[rows] = 0
        elif rows.start < rows.stop:
            k, v = (_tokens(pages[:, half], block_table[b], length) for half in (K, V))
            out[rows] = _attend(q[rows].double(), k, v, scale, window)
    return out


def _tokens(half: Tensor, table: Tensor, length: int) -> Tensor:
    """K or V of a request: float64 [length, kv_heads, head_dim]."""
    position = torch.arange(length, device=half.device)
    block_size = half.shape[1]
    return half[table[position // block_size].long(), position % block_size].double()


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """One request's last rows `q` [n, heads, d] over all its tokens."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    key = torch.arange(k.shape[0], device=q.device)
    position = key[-q.shape[0] :, None]
    hidden = key > position
    if window:
        hidden = hidden | (key <= position - window)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rope_and_write_twin(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    pages: Tensor,
    *,
    num_heads: int,
    qk_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """What the decoder and the pages do on a CPU, step by step; writes into `pages`, returns Q."""
    num_kv_heads, head_dim = pages.shape[3:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    c, s = cos[positions], sin[positions]
    qk = rotate(qk.contiguous(), torch.cat((c, c), -1)[:, None], torch.cat((-s, s), -1)[:, None])
    kept = slot_mapping >= 0
    block, offset = slot_mapping[kept] // pages.shape[2], slot_mapping[kept] % pages.shape[2]
    pages[block, K, offset] = qk[kept, num_heads:]
    pages[block, V, offset] = v[kept]
    return qk[:, :num_heads]


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    """As in the decoder's feed-forward."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def matvec_twin(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Float64."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`, or itself if all is 0; NaN if anything is."""
    wide = expected.double()
    return float((found.double() - wide).norm() / (wide.norm() or 1))


def greedy_twin(logits: Tensor) -> tuple[list[int], Tensor]:
    """The first of the largest logits of each row, and what it is: NaN if any of the row is."""
    best = logits.float().amax(-1)
    first = [
        row.tolist().index(value) if value == value else 0
        for row, value in zip(logits.float(), best.tolist(), strict=True)
    ]
    return first, best
