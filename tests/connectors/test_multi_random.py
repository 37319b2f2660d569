"""A MultiConnector whose children do whatever the protocol allows: all answers are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
import torch
from connected import prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from multi_kit import MultiSides, multi_stepper
from paged_oracle import answer, mix

from interlace.connectors.conformance import Answer, Async, Rule, Script, Sync
from interlace.engine.request import Request, RequestStatus

BLOCK = 4
NUM_REQUESTS = 5
Policy = Literal["recompute", "fail"]

few = st.integers(0, 3)
an_answer = st.sampled_from([Sync(), Async(), Sync(8), Async(8), Async(5), (0, False), None])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Ends: the last answer, which stays, is never "ask again"."""
    answers: list[Answer] = draw(st.lists(an_answer, max_size=2))
    last = draw(an_answer.filter(lambda one: one is not None))
    return Rule(
        answers=(*answers, last),
        fail=frozenset(draw(st.sets(few, max_size=1))),
        num_failing_loads=draw(st.sampled_from([0, 0, 1, None])),
        load_delay=draw(few),
        report_early=draw(st.booleans()),
        save=draw(st.booleans()),
        hold=draw(st.booleans()),
        send_delay=draw(few),
        repeat_recving=draw(st.sampled_from([0, 0, 2])),
        repeat_sending=draw(st.sampled_from([0, 0, 2])),
    )


def drive(sides: MultiSides, requests: list[Request], aborts: Mapping[int, int]) -> None:
    """Step to the end; `aborts`: step -> number of a request that ends then."""
    for number in range(2000):
        if number in aborts:
            victim = requests[aborts[number]]
            sides.stepper.scheduler.finish_request(victim, RequestStatus.FINISHED_ABORTED)
        if not sides.stepper.step() and number > max(aborts, default=0):
            return
    raise AssertionError("no end")


def assert_only_right_pages(script: Script, requests: list[Request]) -> None:
    """Whatever was saved under a hash of one of these requests is its KV."""
    for request in requests:
        value, expected = 0, []
        for token_id in request.all_token_ids:
            value = mix(value, token_id)
            expected.append(value)
        for index, block_hash in enumerate(request.block_hashes):
            if block_hash in script.store:
                (page,) = script.store[block_hash]
                assert torch.equal(page, torch.tensor(expected[index * BLOCK :][:BLOCK]))


def prompts() -> list[list[int]]:
    """Some share prefixes; together they do not fit into the pool."""
    return [[*prompt_of(9 + 3 * (i % 3)), *([i % 2] * 5), i] for i in range(NUM_REQUESTS)]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whatever_children_do_the_answers_are_right(
    depth: int, policy: Policy, data: st.DataObject
) -> None:
    scripts = [Script(paint=-1) for _ in range(data.draw(st.integers(1, 3), label="children"))]
    for round_number in range(2):  # the second one finds what the first one stored
        for script in scripts:
            script.rules = {f"{round_number}.{i}": data.draw(rules()) for i in range(NUM_REQUESTS)}
        sides = multi_stepper(
            *scripts, policy_on_failure=policy, num_blocks=14, depth=depth, max_num_seqs=3
        )
        requests = [
            sides.stepper.add(prompt, request_id=f"{round_number}.{i}", max_tokens=6)
            for i, prompt in enumerate(prompts())
        ]
        aborts = data.draw(st.dictionaries(st.integers(0, 20), few, max_size=2), label="aborts")
        drive(sides, requests, aborts)
        for request in requests:
            tokens = sides.stepper.outputs[request.request_id]
            assert tokens == answer(request.prompt_token_ids, len(tokens))
            aborted = request.status is RequestStatus.FINISHED_ABORTED
            failed = policy == "fail" and request.status is RequestStatus.FINISHED_ERROR
            assert aborted or failed or len(tokens) == 6
        for script in scripts:
            assert_only_right_pages(script, requests)
        assert sides.stepper.scheduler.stats.num_stray_reports == 0, "the engine hears of none"
        sides.assert_idle()
