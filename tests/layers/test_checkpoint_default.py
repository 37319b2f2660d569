"""The default model itself: fetched at the first run, then from the cache."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.engine.tokenizer import Tokenizer
from interlace.layers.checkpoint import LoadedModel

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8")
)
CASES = {case["name"]: case for case in REFERENCE["cases"]}


@pytest.fixture
def tokenizer(default_model: LoadedModel) -> Tokenizer:
    assert default_model.tokenizer is not None
    return default_model.tokenizer


@functools.cache
def future(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def dense_causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[1], 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)
    weights = scores.masked_fill(future(tokens), -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(tokens, heads * head_dim)


def test_it_is_what_it_should_be(default_model: LoadedModel) -> None:
    a = default_model.architecture
    assert (a.num_layers, a.hidden_size, a.intermediate_size) == (30, 576, 1536)
    assert (a.num_heads, a.num_kv_heads, a.head_dim) == (9, 3, 64)
    assert (a.vocab_size, a.rope_theta, a.tied_head) == (49152, 100000.0, True)
    assert a.rms_eps == pytest.approx(1e-5)
    assert default_model.max_model_len == 8192
    assert default_model.eos_token_ids == (2,)
    assert default_model.name == "smollm2-135m"
    assert default_model.decoder.dtype == torch.float32


@pytest.mark.parametrize("case", REFERENCE["tokenizer_cases"], ids=lambda case: ascii(case["text"]))
def test_texts_have_their_right_ids(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("name", ["short_chat", "emptyish"])
def test_the_first_logits_are_the_reference_s(name: str, default_model: LoadedModel) -> None:
    case = CASES[name]
    ids = torch.tensor(case["prompt_ids"])
    with torch.inference_mode():
        hidden = default_model.decoder.forward(ids, torch.arange(len(ids)), dense_causal)
        values, tops = default_model.decoder.logits(hidden[-1:])[0].topk(5)
    assert tops.tolist() == [token for token, _ in case["top5_first"]]
    assert values.tolist() == pytest.approx([v for _, v in case["top5_first"]], abs=1e-3)
