"""Which figures are held to a bar, and where."""

from __future__ import annotations

import pytest

from interlace.bench.bars import NO_BARS, NO_OVERLAP_BARS, bars_for

H200 = "NVIDIA H200"


def test_a_large_model() -> None:
    bars = bars_for(H200, "dummy:llama-3.1-8b", "bfloat16")
    assert [bars.decode(size, 232) for size in (1, 8, 32, 4)] == [5.0, 5.3, 5.8, None]
    assert bars.prefill(1, 8192) == 220
    assert [bars.hit(8192, new) for new in (16, 128, 688, 1984, 17)] == [8, 11, 28, 66, None]


def test_a_small_model() -> None:
    bars = bars_for(H200, "dummy:qwen3-0.6b", "bfloat16")
    assert [bars.decode(size, 200) for size in (1, 8, 32)] == [1.6, None, 2.0]
    assert bars.prefill(1, 8192) == 34
    assert bars.hit(8192, 16) is None


def test_other_work_has_no_bar() -> None:
    bars = bars_for(H200, "dummy:llama-3.1-8b", "bfloat16")
    assert bars.decode(1, 2000) is None
    assert bars.prefill(2, 8192) is None
    assert bars.prefill(1, 4096) is None
    assert bars.hit(4096, 16) is None


@pytest.mark.parametrize("model", ["dummy:llama-3.1-8b", "dummy:qwen3-0.6b"])
def test_loads(model: str) -> None:
    bars = bars_for(H200, model, "bfloat16")
    asked = bars.overlapping(8192, 32)
    assert (asked.hidden, asked.mixed, asked.mode_worst) == (0.93, 1.05, 1.15)
    for other in (bars.overlapping(4096, 32), bars.overlapping(8192, 8)):
        assert other is NO_OVERLAP_BARS
        assert other.hidden is None


def test_first_tokens_behind_loads() -> None:
    asked = bars_for(H200, "dummy:llama-3.1-8b", "bfloat16").overlapping(8192, 32)
    assert asked.first_token_ms == {16: 23, 128: 24, 688: 30, 1984: 68}
    assert asked.hidden_new == {688}


@pytest.mark.parametrize(
    ("gpu", "model", "dtype"),
    [
        (None, "dummy:qwen3-0.6b", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "dummy:qwen3-0.6b", "bfloat16"),
        (H200, "smollm2-135m", "bfloat16"),
        (H200, "dummy:qwen3-0.6b", "float32"),
    ],
)
def test_other_machines_models_and_dtypes_have_none(
    gpu: str | None, model: str, dtype: str
) -> None:
    assert bars_for(gpu, model, dtype) is NO_BARS
