"""The small kernels under Triton's interpreter, against plain torch: equal up to a last bit."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_twins import (
    greedy_twin,
    matvec_twin,
    relative_error,
    rope_and_write_twin,
    silu_mul_twin,
)

from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kernels import pointwise
from interlace.layers.kernels.greedy import PART, greedy
from interlace.layers.kernels.host_copies import BLOCK, read_words, write_words
from interlace.layers.kernels.matvec import MatvecTiles, matvec
from interlace.layers.kernels.rope_write import rope_and_write
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages
from interlace.layers.norm import rms_norm

interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
# bfloat16 is for the GPU: the interpreter truncates where the device rounds.
DTYPES = [torch.float32, torch.float16]
dtypes = st.sampled_from(DTYPES)


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@interpreted
@settings(max_examples=15, deadline=None)
@given(
    heads=st.sampled_from([(4, 2, 64), (3, 1, 80), (2, 2, 96), (9, 3, 64), (1, 1, 256)]),
    norm=st.booleans(),
    dtype=dtypes,
    layout=st.sampled_from(["NHD", "HND"]),
    cross_layers=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rope_and_write(
    heads: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    layout: KVCacheLayout,
    cross_layers: bool,
    seed: int,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    pages, expected = (
        KVPages(
            num_layers=2,
            num_blocks=5,
            block_size=4,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
            layout=layout,
            cross_layers=cross_layers,
        )
        for _ in range(2)
    )
    tokens = 5
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(tokens, width, generator=generator).to(dtype)
    angles = torch.randn(30, head_dim // 2, generator=generator)
    positions = torch.randint(0, 30, (tokens,), generator=generator)
    slots = torch.randperm(19, generator=generator)[:tokens] + 1
    slots[seed % tokens] = -1
    weight = torch.randn(num_heads + num_kv_heads, head_dim, generator=generator).to(dtype)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    q = rope_and_write(
        qkv,
        positions,
        *tables,
        slots,
        pages.layers[1],
        q_out=_poisoned(tokens, num_heads, head_dim, dtype=dtype),
        qk_norm=weight if norm else None,
        eps=1e-6,
    )
    q_expected = rope_and_write_twin(
        qkv,
        positions,
        *tables,
        slots,
        expected.layers[1],
        num_heads=num_heads,
        qk_norm=weight if norm else None,
        eps=1e-6,
    )
    torch.testing.assert_close(q, q_expected)
    torch.testing.assert_close(pages.layers[1], expected.layers[1])
    assert not pages.layers[0].any(), "another layer was written"
    assert not pages.layers[1].flatten(0, 2)[0].any(), "the slot of padding was written"


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 576, 1024])
def test_norms(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, delta = (torch.randn(3, width, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(dtype)
    out = pointwise.rms_norm(x, weight, 1e-5, out=_poisoned(3, width, dtype=dtype))
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-5))
    total = x + delta
    out = pointwise.add_rms_norm(x, delta, weight, 1e-5, out=delta)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, rms_norm(total, weight, 1e-5))
    torch.testing.assert_close(pointwise.rms_norm(x, weight, 1e-5, out=x), out)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1536])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    out = pointwise.silu_mul(gate_up, out=_poisoned(3, width, dtype=dtype))
    torch.testing.assert_close(out, silu_mul_twin(gate_up))


@interpreted
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 8),
    n=st.sampled_from([1, 2, 31, 64]),
    k=st.sampled_from([8, 96, 300, 1024]),
    dtype=dtypes,
    bias=st.booleans(),
    tiles=st.sampled_from([None, MatvecTiles(2, 64, 2), MatvecTiles(8, 128, 4)]),
)
def test_matvec(
    rows: int, n: int, k: int, dtype: torch.dtype, bias: bool, tiles: MatvecTiles | None
) -> None:
    generator = torch.Generator().manual_seed(n * k + rows)
    x = torch.randn(rows, k + 3, generator=generator).to(dtype)[:, :k]
    weight = torch.randn(n, k, generator=generator).to(dtype)
    added = torch.randn(n, generator=generator).to(dtype) if bias else None
    out = matvec(x, weight, added, out=_poisoned(rows, n, dtype=dtype), tiles=tiles)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert relative_error(out, matvec_twin(x, weight, added)) < tolerance


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from interlace.engine.errors import ConfigError
from interlace.layers.kernels import matvec, paged_attention, pointwise, rope_write, toolchain
assert not toolchain.runs_on(torch.device("cuda"))
x = torch.ones(1, 8)
try:
    pointwise.rms_norm(x, x[0], 0.0, out=x)
except ConfigError as error:
    assert "pip install triton" in str(error)
else:
    raise AssertionError("no error")
"""


def test_without_triton_the_modules_load_and_a_call_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 40, PART, 2 * PART + 5])
def test_greedy(dtype: torch.dtype, vocab: int) -> None:
    """With many equals, rows that a step cannot sample from, and padding that all goes to one."""
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)).round().to(dtype)
    logits[1] = -math.inf
    logits[2, vocab // 2] = math.nan
    logits[3, vocab // 3] = math.inf
    rows = torch.tensor([4, 0, 2, 3, 1, 9, 9])
    newest = torch.full((10,), -7)
    out = greedy(logits, rows, newest, out=torch.full((2, 7), -7, dtype=torch.int32))
    token_ids, best = greedy_twin(logits)
    assert out[0].tolist() == token_ids
    assert torch.equal(out[1].view(torch.float32).nan_to_num(5e9), best.nan_to_num(5e9))
    assert newest[rows[:5]].tolist() == token_ids[:5]
    assert (newest[5:9] == -7).all()


@interpreted
def test_greedy_over_part_of_a_larger_buffer() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 9] = 1
    newest = torch.zeros(3, dtype=torch.int64)
    out = greedy(logits[:, 2:20], torch.arange(3), newest, out=torch.zeros(2, 3, dtype=torch.int32))
    assert out[0].tolist() == newest.tolist() == [7, 7, 7]


@interpreted
@pytest.mark.parametrize("num_words", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("copy", [read_words, write_words])
def test_words_are_copied_and_no_more(
    num_words: int, copy: Callable[[torch.Tensor, torch.Tensor, int], None]
) -> None:
    source = torch.arange(1, 4 * BLOCK, dtype=torch.int32)
    target = torch.zeros_like(source)
    copy(source, target, num_words)
    assert torch.equal(target[:num_words], source[:num_words])
    assert not target[num_words:].any()
