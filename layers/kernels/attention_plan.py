"""How an attention call is cut up: a pure function of shapes, so it can be fixed at capture."""

from __future__ import annotations

import dataclasses

import torch

from interlace.layers.kernels.toolchain import next_power_of_2

HEAD_SIZES = (64, 80, 96, 128, 256)
"""Head sizes that models have; others up to 256 in steps of 8 work as well."""
MAX_SHARES = 64
MAX_SPLITS = 16
MANY_REQUESTS = 24
KEY_GRAIN = 128
"""Gathered keys of a request lie in whole multiples of this."""
GATHERED_TOKENS = 192
"""New tokens of a request from which its keys are gathered: fewer are computed sooner than that.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of what one program computes at a time, and how it is compiled."""

    rows: int
    """Query rows, a power of two of at least 16: tokens times the query heads of a KV head."""
    keys: int
    """Keys loaded at a time, a power of two of at least 16."""
    num_warps: int
    num_stages: int
    per_sm: int = 1
    """Programs that a multiprocessor holds at a time."""


LARGE_TILES = Tiles(128, KEY_GRAIN, num_warps=8, num_stages=3)
"""Of chunks with gathered keys."""
SMALL_TILES = Tiles(64, 64, num_warps=4, num_stages=3, per_sm=2)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Grid and tiles of one call. The same plan serves every step that fits its numbers.

    A step is served in two passes: requests with one new token, and those with more. Where several
    programs share the keys of a request, another kernel joins what they found.
    """

    num_tokens: int
    """Rows of `q`, padding included."""
    num_requests: int
    """Rows of the block table, padding included."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    decode: Tiles
    decode_items: int
    """Shares into which the keys of all requests are dealt, at most: programs for each KV head. 0:
    no request has exactly one new token, and the pass is left out."""
    max_shares: int
    """Shares of one request at most, a power of two; 1: no request's keys are shared."""
    chunk: Tiles
    is_gathered: bool
    """Whether the second pass reads gathered keys, and not pages."""
    chunk_splits: int
    """Programs that share the keys of a tile of query tokens. 0: no request has more than one new
    token, and the pass is left out."""

    @property
    def num_passes(self) -> int:
        """Of two."""
        return (self.decode_items > 0) + (self.chunk_splits > 0)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Head size as a program sees it: a power of two, and at least what a tensor core takes."""
        return max(16, next_power_of_2(self.head_dim))

    @property
    def least_share(self) -> int:
        """Keys that a program takes at least before another one helps it, in the first pass."""
        return 128

    @property
    def chunk_tokens(self) -> int:
        """Query tokens of one program in the second pass."""
        return self.chunk.rows // self.group

    @property
    def schedule_shape(self) -> tuple[int, int]:
        """Of the int32 tensor that `schedule_decode` fills and `paged_attention` takes."""
        return self.decode_items + self.num_requests, 8

    @property
    def num_chunk_tiles(self) -> int:
        """Tiles for any split of the tokens among the requests: each wastes less than one."""
        return self.num_tokens // self.chunk_tokens + self.num_requests

    @property
    def workspace_numel(self) -> int:
        """Float32 numbers that a call needs for partial answers and a schedule."""
        decode = self.decode_items if self.max_shares > 1 else 0
        chunk = self.num_tokens * self.chunk_splits if self.chunk_splits > 1 else 0
        rows, width = self.schedule_shape
        return max(decode, chunk) * self.num_heads * (self.head_dim + 1) + rows * width


def plan_attention(
    *,
    num_tokens: int,
    num_requests: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_sms: int,
    has_decodes: bool = True,
    may_gather: bool = False,
) -> AttentionPlan:
    """Choose tiles and shares.

    `max_query_len` and `max_seq_len` are bounds on the new tokens and on all tokens of any request,
    whatever is replayed; `num_sms` is the device's number of multiprocessors.
    `has_decodes`: whether any request may have exactly one new token. `may_gather`: whether there
    is room for the keys of those with more, see `KeyRoom`.
    """
    group = num_heads // num_kv_heads
    assert group * num_kv_heads == num_heads, "query heads are dealt out evenly to KV heads"
    assert head_dim % 8 == 0, "rows of K and V begin at multiples of 16 bytes"
    assert head_dim <= max(HEAD_SIZES), "larger heads would not fit into a program"
    plan = AttentionPlan(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        decode=decode_tiles(head_dim, group, num_requests, dtype),
        decode_items=num_requests,
        max_shares=1,
        chunk=chunk_tiles(head_dim, group, max_query_len, dtype),
        is_gathered=False,
        chunk_splits=0,
    )
    if may_gather and gathers(head_dim, group, max_query_len, dtype):
        plan = _gathered(plan, max_seq_len, num_sms)
    items, max_shares = _decode_shares(plan, max_seq_len, num_sms) if has_decodes else (0, 1)
    return dataclasses.replace(
        plan,
        decode_items=items,
        max_shares=max_shares,
        chunk_splits=_splits(plan, max_seq_len, num_sms) if max_query_len > 1 else 0,
    )


def decode_tiles(head_dim: int, group: int, num_requests: int, dtype: torch.dtype) -> Tiles:
    """For one query token: the group's rows, and as many keys as keep the memory busy.

    With few requests it is latency that counts, and larger steps are fewer; with many, smaller
    programs with more loads under way read faster.
    """
    rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return Tiles(rows, 16 if head_dim > 64 else 32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tiles(rows, 32, num_warps=4, num_stages=5)
    if num_requests < MANY_REQUESTS:
        return Tiles(rows, 128, num_warps=4, num_stages=3)
    return Tiles(rows, 64, num_warps=2, num_stages=5)


def chunk_tiles(head_dim: int, group: int, max_query_len: int, dtype: torch.dtype) -> Tiles:
    """For several query tokens: large tiles where there are rows enough to fill them."""
    wanted = next_power_of_2(max(max_query_len * group, 16))
    least = next_power_of_2(max(group, 16))
    if dtype == torch.float32:
        rows = max(least, min(wanted, 32))
        return Tiles(rows, 16 if head_dim > 64 else 32, num_warps=8, num_stages=2)
    rows = max(least, min(wanted, 128))
    warps = 8 if rows >= 128 else 4
    if head_dim > 128:
        return Tiles(rows, 32, warps, num_stages=2)
    return Tiles(rows, 64, warps, num_stages=5)


def gathers(head_dim: int, group: int, max_query_len: int, dtype: torch.dtype) -> bool:
    """Whether gathered keys pay for such chunks: products of 16 bits, and rows enough."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim <= 128
    return fits and group <= 64 and max_query_len >= GATHERED_TOKENS


def _gathered(plan: AttentionPlan, max_seq_len: int, num_sms: int) -> AttentionPlan:
    """With large tiles, or with small ones, two of which share a multiprocessor, if these make
    fuller waves: alone they are a little slower."""
    large, small = (
        dataclasses.replace(plan, is_gathered=True, chunk=tiles)
        for tiles in (LARGE_TILES, SMALL_TILES)
    )

    def cost(one: AttentionPlan) -> float:
        return _wave_cost(one, _splits(one, max_seq_len, num_sms), num_sms)

    return min((large, small), key=lambda one: cost(one) * (1 if one is large else 1.05))


def _decode_shares(plan: AttentionPlan, max_seq_len: int, num_sms: int) -> tuple[int, int]:
    """Shares of all requests and of one, at most.

    For few requests two programs a multiprocessor, all at work; for many, one each and half of that
    again for long ones. A multiprocessor holds three: in a larger grid programs without work would
    be dealt out with the others, who would then crowd together (72 us in place of 84, seen with 32
    requests).
    """
    if max_seq_len <= plan.least_share:
        return plan.num_requests, 1
    each = max(1, num_sms // plan.num_kv_heads)
    most = next_power_of_2(2 * each + 1) // 2
    return max(2 * each, plan.num_requests + each), max(2, min(MAX_SHARES, most))


def _splits(plan: AttentionPlan, max_seq_len: int, num_sms: int) -> int:
    """What makes the programs fill the device in whole waves, without many parts to join."""
    most = max(1, min(MAX_SPLITS, max_seq_len // (4 * plan.chunk.keys)))
    return min(range(1, most + 1), key=lambda splits: _wave_cost(plan, splits, num_sms))


def _wave_cost(plan: AttentionPlan, splits: int, num_sms: int) -> float:
    """Of the second pass: 1 is as long as one program of all keys takes, with small tiles two of
    half the rows. Each part more costs about 4% for joining."""
    tiles = -(-plan.num_tokens // plan.chunk_tokens) * plan.num_kv_heads
    waves = -(-tiles * splits // (num_sms * plan.chunk.per_sm))
    return waves / splits * (1 + 0.04 * (splits - 1))
