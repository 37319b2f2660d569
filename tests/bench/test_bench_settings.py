"""Which device, and which engines, a benchmark runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interlace.bench.settings import Settings, model_len, pick_device
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.hardware import cuda


def test_auto_is_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings("dummy:qwen3-0.6b", device="auto", request_tokens=300)
    monkeypatch.setattr(cuda, "works", lambda: False)
    on_cpu = pick_device(settings, Silent())
    assert (on_cpu.device, on_cpu.max_model_len) == ("cpu", None)
    monkeypatch.setattr(cuda, "works", lambda: True)
    on_gpu = pick_device(settings, Silent())
    assert (on_gpu.device, on_gpu.max_model_len) == ("cuda", 12_288)


@pytest.mark.parametrize(
    ("request_tokens", "length"), [(0, 12_288), (12_288, 12_288), (12_289, 16_384)]
)
def test_the_length_on_a_gpu_holds_the_work(request_tokens: int, length: int) -> None:
    assert model_len(request_tokens) == length


def test_a_model_may_be_made_for_less_and_a_user_may_ask_for_less(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = Settings(f"dummy:{tmp_path}/config.json", device="cuda", request_tokens=300)
    assert pick_device(small, Silent()).max_model_len == 2048
    asked = Settings("dummy:qwen3-0.6b", device="cuda", max_model_len=500)
    assert pick_device(asked, Silent()).max_model_len == 500


def test_engines_on_a_gpu_share_its_memory() -> None:
    one = Settings("m", device="cuda", cudagraph_mode="FULL")
    two = Settings("m", (1, 2), device="cuda")
    (only,) = one.engine_configs()
    assert (only[0], only[1].gpu_memory_utilization) == (None, 0.9)
    assert only[1].cudagraph_mode == "FULL"
    assert [(d, c.gpu_memory_utilization) for d, c in two.engine_configs()] == [(1, 0.45), (2, 0.9)]


def test_facts_name_what_was_given() -> None:
    assert Settings("m").facts() == {"model": "m", "device": "cpu"}
    given = Settings("m", max_model_len=9, max_num_batched_tokens=8, cudagraph_mode="NONE")
    assert given.facts() == {
        "model": "m",
        "device": "cpu",
        "max_model_len": 9,
        "max_num_batched_tokens": 8,
        "cudagraph_mode": "NONE",
    }
