"""What steps must read and compute, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
from bench_kit import TINY
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.work_size import kv_numbers, num_weights, work_size
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.dummy import open_dummy
from interlace.layers.weights import weight_shapes


def shape(name: str) -> Architecture:
    return open_dummy(f"dummy:{name}", 0).architecture


# Of one layer: Q, K and V; output; gate and up; down. Then two norms, and Q's and K's own.
LAYER_8B = 6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336
WEIGHTS_8B = 32 * (LAYER_8B + 2 * 4096) + 4096 + 128256 * 4096
LAYER_06B = 4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072
WEIGHTS_06B = 28 * (LAYER_06B + 2 * 1024 + 2 * 128) + 1024 + 151936 * 1024


def test_each_weight_is_read_once_but_for_an_embedding_beside_a_head() -> None:
    assert num_weights(shape("llama-3.1-8b")) == WEIGHTS_8B == 7_504_924_672
    assert num_weights(shape("qwen3-0.6b")) == WEIGHTS_06B == 596_049_920


def test_kv_of_one_token() -> None:
    assert 2 * kv_numbers(shape("llama-3.1-8b")) == 131_072
    assert 2 * kv_numbers(shape("qwen3-0.6b")) == 114_688


def test_a_decode_step_reads_weights_once_and_the_kv_of_each_request() -> None:
    size = work_size(shape("llama-3.1-8b"), 2, batch_size=8, cached=200, new=1)
    assert size.num_bytes == 2 * WEIGHTS_8B + 8 * 200 * 131_072
    products = 2 * (32 * LAYER_8B + 128256 * 4096)
    assert size.flops == 8 * (products + 4 * 32 * 128 * 32 * 201)


def test_a_prefill_computes_all_pairs_and_ends_with_one_row() -> None:
    size = work_size(shape("qwen3-0.6b"), 2, batch_size=1, cached=0, new=8192)
    last = LAYER_06B - 4096 * 1024  # what of the last layer only the sampled row needs
    products = 2 * (8192 * 28 * LAYER_06B - 8191 * last + 151936 * 1024)
    assert size.flops == products + 4 * 16 * 128 * 28 * (8192 * 8193 // 2)
    assert size.num_bytes == 2 * WEIGHTS_06B


def test_a_prefill_of_8b_is_as_large_as_known() -> None:
    size = work_size(shape("llama-3.1-8b"), 2, batch_size=1, cached=0, new=8192)
    assert size.num_bytes == pytest.approx(3.49e-3 * 4.3e12, rel=0.001)
    assert size.flops == pytest.approx(1.289e14, rel=0.001)


@given(new=st.integers(2, 50), cut=st.integers(1, 49), cached=st.integers(0, 50))
def test_chunks_see_as_many_pairs_as_the_whole(new: int, cut: int, cached: int) -> None:
    cut = min(cut, new - 1)
    whole = work_size(TINY, 4, batch_size=1, cached=cached, new=new).flops
    first = work_size(TINY, 4, batch_size=1, cached=cached, new=cut).flops
    rest = work_size(TINY, 4, batch_size=1, cached=cached + cut, new=new - cut).flops
    once = 2 * (8 * (8 + 3 * 16) + 10 * 8)  # the chunk's own row behind the last attention
    assert first + rest == whole + once


def test_a_tied_head_is_read_and_biases_too() -> None:
    tied = dataclasses.replace(TINY, tied_head=True, qkv_bias=True)
    assert num_weights(tied) == num_weights(TINY) + 2 * 16
    assert num_weights(tied) == sum(math.prod(s) for s in weight_shapes(tied).values())
