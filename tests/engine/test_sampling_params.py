"""Sampling fields are checked when they are given, not in the middle of a step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from interlace.engine.errors import InterlaceError, SamplingError
from interlace.engine.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

BAD: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": 10**400},
    {"temperature": "1"},
    {"temperature": None},
    {"top_k": -2},
    {"top_k": 1.0},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"seed": -1},
    {"seed": 2**64},
    {"seed": 1.5},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"min_tokens": -1},
    {"min_tokens": 17},  # above the default max_tokens
    {"logprobs": -1},
    {"logprobs": MAX_LOGPROBS + 1},
    {"logprobs": True},
    {"ignore_eos": "no"},
    {"detokenize": None},
    {"include_stop_str_in_output": 2},
    {"skip_special_tokens": "yes"},
    {"stop": ""},
    {"stop": 5},
    {"stop": b"end"},
    {"stop": {"a": 1}},
    {"stop": ["a", ""]},
    {"stop": ["a", 5]},
    {"stop": [["a"]]},
    {"stop": "x" * 1025},
    {"stop": ["x"] * (MAX_STOP_STRINGS + 1)},
    {"stop_token_ids": 5},
    {"stop_token_ids": 0},
    {"stop_token_ids": "12"},
    {"stop_token_ids": {2: 1}},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": [1.0]},
    {"logit_bias": [1]},
    {"logit_bias": {"1": 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {True: 1.0}},
    {"logit_bias": {1: 100.1}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: True}},
    {"temprature": 1.0},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**fields)
    assert next(iter(fields)) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InterlaceError)


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": -1},
    {"top_p": 1},
    {"max_tokens": None, "min_tokens": 1000},
    {"seed": 2**64 - 1},
    {"stop": "x" * 1024},
    {"stop": []},
    {"stop_token_ids": frozenset({3})},
    {"logprobs": 0},
    {"logit_bias": {}},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize("stop", ["x", ["x"]])
def test_stop_strings_without_text_are_refused(stop: Any) -> None:
    """FE14: a token-only request cannot honour a stop string, so it says so."""
    with pytest.raises(SamplingError, match="stop strings need detokenize=True"):
        SamplingParams(detokenize=False, stop=stop)
    SamplingParams(detokenize=False, stop_token_ids=[1])


def test_what_the_caller_changes_later_changes_nothing() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 1.0
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (1,)
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_derived_facts() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert not SamplingParams().needs_history
    assert SamplingParams(repetition_penalty=1.5).needs_history
    assert SamplingParams(presence_penalty=1.5).needs_history
    assert SamplingParams(frequency_penalty=1.5).needs_history
