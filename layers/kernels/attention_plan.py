"""How an attention call is cut up: a pure function of shapes, so it can be fixed at capture."""

from __future__ import annotations

import dataclasses

import torch

from interlace.layers.kernels.toolchain import next_power_of_2

HEAD_SIZES = (64, 80, 96, 128, 256)
"""Head sizes that the kernels are tested with; others up to 256 in steps of 8 work as well."""
MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of what one program computes at a time, and how it is compiled."""

    rows: int
    """Query rows, a power of two of at least 16: tokens times the query heads of a KV head."""
    keys: int
    """Keys loaded at a time, a power of two of at least 16."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Grid and tiles of one call. The same plan serves every step that fits its numbers.

    A step is served in two passes: requests with one new token, and those with more. Each program
    takes a share of a request's keys; where there are several, a second kernel joins them.
    """

    num_tokens: int
    """Rows of `q`, padding included."""
    num_requests: int
    """Rows of the block table, padding included."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    decode: Tiles
    decode_splits: int
    chunk: Tiles
    chunk_splits: int
    """0: no request has more than one new token, and the pass is left out."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def chunk_tokens(self) -> int:
        """Query tokens of one program in the second pass."""
        return self.chunk.rows // self.group

    @property
    def workspace_numel(self) -> int:
        """Float32 numbers that a call needs to put partial answers into."""
        decode = self.num_requests * self.decode_splits if self.decode_splits > 1 else 0
        chunk = self.num_tokens * self.chunk_splits if self.chunk_splits > 1 else 0
        return max(decode, chunk) * self.num_heads * (self.head_dim + 1)


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
) -> AttentionPlan:
    """Choose tiles and splits.

    `max_query_len` and `max_seq_len` are bounds on the new tokens and on all tokens of any request,
    whatever is replayed; `num_sms` is the device's number of multiprocessors.
    """
    group = num_heads // num_kv_heads
    assert group * num_kv_heads == num_heads, "query heads are dealt out evenly to KV heads"
    assert head_dim % 8 == 0, "rows of K and V begin at multiples of 16 bytes"
    assert head_dim <= max(HEAD_SIZES), "larger heads would not fit into a program"
    decode = decode_tiles(head_dim, group, dtype)
    chunk = chunk_tiles(head_dim, group, max_query_len, dtype)
    decode_programs = num_requests * num_kv_heads
    chunk_programs = (num_tokens // (chunk.rows // group) + 1) * num_kv_heads
    return AttentionPlan(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        decode=decode,
        decode_splits=_splits(decode_programs, 4 * num_sms, max_seq_len, decode.keys),
        chunk=chunk,
        chunk_splits=_splits(chunk_programs, num_sms, max_seq_len, 4 * chunk.keys)
        if max_query_len > 1
        else 0,
    )


def decode_tiles(head_dim: int, group: int, dtype: torch.dtype) -> Tiles:
    """For one query token: the group's rows, and as many keys as keep the memory busy."""
    rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return Tiles(rows, 16 if head_dim > 64 else 32, num_warps=4, num_stages=2)
    return Tiles(rows, 32 if head_dim > 128 else 64, num_warps=4, num_stages=3)


def chunk_tiles(head_dim: int, group: int, max_query_len: int, dtype: torch.dtype) -> Tiles:
    """For several query tokens: large tiles where there are rows enough to fill them."""
    wanted = next_power_of_2(max(max_query_len * group, 16))
    least = next_power_of_2(max(group, 16))
    if dtype == torch.float32:
        rows = max(least, min(wanted, 32))
        return Tiles(rows, 16 if head_dim > 64 else 32, num_warps=8, num_stages=2)
    rows = max(least, min(wanted, 128))
    warps = 8 if rows >= 128 else 4
    return Tiles(rows, 32 if head_dim > 128 else 64, warps, 2 if head_dim > 128 else 3)


def _splits(programs: int, wanted_programs: int, max_seq_len: int, least_keys: int) -> int:
    """Shares of the keys: enough to occupy the device, but none of fewer than `least_keys`."""
    most = -(-max_seq_len // least_keys)
    return max(1, min(wanted_programs // programs, most, MAX_SPLITS))
