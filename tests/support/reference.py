"""The reference's cases, and checks that an engine gives exactly its ids and texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace import AsyncEngine, Completion, SamplingParams

REFERENCE = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text()
)


def _longest_then_shortest(case: dict[str, Any]) -> int:
    """An order in which the small pool of the preemption test is full at once."""
    return -1 if case["name"] == "long_1000" else int(case["n_prompt"])


CASES: list[dict[str, Any]] = sorted(REFERENCE["cases"], key=_longest_then_shortest)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, skip_special_tokens=False)


def check(case: dict[str, Any], answer: Completion) -> None:
    """The whole answer is the reference's."""
    assert list(answer.token_ids) == case["output_ids"], case["name"]
    assert answer.text == case["output_text"], case["name"]
    assert answer.usage.num_prompt_tokens == case["n_prompt"]
    assert answer.finish_reason == "length"


async def all_together(
    engine: AsyncEngine, cases: Sequence[dict[str, Any]] = CASES
) -> list[Completion]:
    """Every case at once; checked, and in the order of `cases`."""
    answers = await asyncio.gather(*(engine.complete(case["prompt"], GREEDY) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        check(case, answer)
    return answers
