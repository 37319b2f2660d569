"""A state machine drives scheduler and pool at random; the oracle runner checks every KV read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

import pytest
from connected import connected_stepper
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from paged_oracle import answer, mix
from scheduling import Stepper, make_scheduler

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.request import Request, RequestStatus

_prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=39),
    # Prefixes of one text, so that blocks are shared.
    st.integers(1, 39).map(lambda n: [i % 5 for i in range(n)]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Invariants cited: I1 (no leak), I2 (no block in two hands), I3 (no stall), I4 (right KV)."""

    depth = 1

    @initialize(
        num_blocks=st.integers(10, 24),
        budget=st.sampled_from([1, 3, 8, 64]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.booleans(),
        settles_late=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        policy: str,
        prefix_caching: bool,
        settles_late: bool,
    ) -> None:
        self.stepper = self.make_stepper(
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,
            prefix_caching=prefix_caching,
            depth=self.depth,
        )
        self.stepper.settles_late = settles_late
        self.requests: list[Request] = []

    @rule()
    def settle(self) -> None:
        self.stepper.scheduler.settle()

    def make_stepper(self, **options: Any) -> Stepper:
        return Stepper(make_scheduler(**options))

    @rule(
        prompt=_prompts,
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "x"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, salt: str | None) -> None:
        if len(prompt) >= self.stepper.scheduler.max_total_tokens:
            return  # refused at admission, before the scheduler
        self.requests.append(
            self.stepper.add(prompt, max_tokens=max_tokens, priority=priority, cache_salt=salt)
        )

    @rule()
    def launch(self) -> None:
        self.stepper.launch()

    @precondition(lambda self: self.stepper.inflight)
    @rule()
    def apply(self) -> None:
        self.stepper.apply()

    @rule()
    def several_steps(self) -> None:
        for _ in range(6):
            self.stepper.step()
        self.content_is_right()

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        status=st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED]),
    )
    def end_one(self, data: st.DataObject, status: RequestStatus) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.stepper.scheduler.finish_request(request, status)

    @rule()
    def reset_cache(self) -> None:
        scheduler = self.stepper.scheduler
        done = scheduler.reset_prefix_cache()  # settles, so what is held is asked behind it
        held = (
            any(r.blocks for r in self.requests)
            or scheduler.kv_cache.num_fenced_blocks
            or scheduler.num_held_requests
        )
        assert done == (not held)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if not hasattr(self, "stepper"):
            return
        scheduler = self.stepper.scheduler
        pool = scheduler.kv_cache.pool
        assert not pool._free.keys() & {b.block_id for r in self.requests for b in r.blocks}
        parked = {block.block_id for r in scheduler.parked for block in r.blocks}
        unfinished = Counter(
            b.block_id for r in self.requests if not r.is_finished for b in r.blocks
        )
        held: dict[int, int] = {}
        for blocks in [r.blocks for r in self.requests] + [
            fenced.blocks for fenced in scheduler.kv_cache._fenced
        ]:
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in pool.blocks[1:]:
            assert block.ref_cnt == held.get(block.block_id, 0)  # I1
            assert (block.block_id in pool._free) == (block.ref_cnt == 0)  # I2
            # What a void step in flight touches is nobody's any more, though it is still held.
            if unfinished[block.block_id] > 1 and block.block_id not in parked:
                assert block.tokens is not None, "only known content is shared or copied"
        assert set(pool._by_hash.values()) == {b for b in pool.blocks if b.block_hash is not None}
        assert pool.num_cached_blocks <= pool.num_usable_blocks  # B61

    @invariant()
    def answers_are_right_so_far(self) -> None:
        for request in getattr(self, "requests", []):
            tokens = self.stepper.outputs[request.request_id]
            assert tokens == answer(request.prompt_token_ids, len(tokens))  # I4

    def content_is_right(self) -> None:
        """Whatever can be found, whole or in part, is what it says it is (I6, I14, I16)."""
        size = self.stepper.scheduler.kv_cache.block_size
        before = {r.hash_before(0): 0 for r in self.requests}  # hash -> KV of the token before
        for request in self.requests:
            value = 0
            for i, token_id in enumerate(request.all_token_ids):
                if i % size == 0:
                    before[request.hash_before(i // size)] = value
                value = mix(value, token_id)
        pages = self.stepper.runner.pages
        for block in self.stepper.scheduler.kv_cache.pool.blocks:
            if block.tokens is None or block.pending_step is not None:
                continue
            value = before[block.tokens.parent]
            for offset, token_id in enumerate(block.tokens.token_ids):
                value = mix(value, token_id)
                assert pages[block.block_id, offset] == value

    def teardown(self) -> None:
        if not hasattr(self, "stepper"):
            return
        self.content_is_right()
        self.stepper.run()  # I3
        self.content_is_right()
        for request in self.requests:
            assert request.is_finished
            tokens = self.stepper.outputs[request.request_id]
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                limit = self.stepper.scheduler.max_total_tokens - request.num_prompt_tokens
                assert len(tokens) == min(request.sampling_params.max_tokens or limit, limit)
        self.every_block_is_in_one_place()
        self.answers_are_right_so_far()
        self.stepper.assert_idle()


class Depth2Machine(SchedulerMachine):
    depth = 2


_some_of = st.integers(0, 20)
_answers = st.one_of(
    st.sampled_from([Sync(), Async(), None, (0, False)]),
    st.builds(Sync, _some_of),
    st.builds(Async, _some_of),
)
_violations = st.sampled_from([(-1, False), (0, True), (10_000, True), (1.5, False), 7])
_rules = st.builds(
    Rule,
    # The last answer stays: it must not be "ask again", or nothing would ever come of it.
    answers=st.tuples(_answers, _answers, st.sampled_from([Sync(), Async(), (0, False)])),
    fail=st.frozensets(st.integers(0, 9), max_size=3),
    num_failing_loads=st.sampled_from([None, 1, 2]),
    load_delay=st.integers(0, 4),
    report_early=st.booleans(),
    save=st.booleans(),
    hold=st.booleans(),
    send_delay=st.integers(0, 4),
    repeat_recving=st.integers(0, 2),
    repeat_sending=st.integers(0, 2),
    repeat_invalid=st.integers(0, 2),
)


class ConnectedMachine(SchedulerMachine):
    """The same with loads, failures, held blocks, and reports that come late and again."""

    policy: Literal["fail", "recompute"] = "recompute"

    def make_stepper(self, **options: Any) -> Stepper:
        self.script = Script()
        stepper, self.sides = connected_stepper(
            self.script, policy_on_failure=self.policy, **options
        )
        return stepper

    @rule(
        prompt=_prompts,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        what=_rules,
        violation=st.none() | st.none() | st.none() | _violations,
    )
    def submit_scripted(
        self, prompt: list[int], max_tokens: int, priority: int, what: Rule, violation: Any
    ) -> None:
        if len(prompt) >= self.stepper.scheduler.max_total_tokens:
            return
        name = f"scripted{len(self.requests)}"
        answers = what.answers if violation is None else (violation, *what.answers)
        self.script.rules[name] = dataclasses.replace(what, answers=answers)
        self.requests.append(
            self.stepper.add(prompt, request_id=name, max_tokens=max_tokens, priority=priority)
        )

    @rule()
    def evict_all(self) -> None:
        """So that what was saved is loaded again."""
        pool = self.stepper.scheduler.kv_cache.pool
        pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "stepper"):
            while self.stepper.launch() or self.stepper.inflight:  # late reports
                self.stepper.apply()
            assert self.sides[0].is_idle
            assert self.sides[1].is_idle


class ConnectedDepth2Machine(ConnectedMachine):
    depth = 2


class FailingMachine(ConnectedMachine):
    policy = "fail"


class FailingDepth2Machine(FailingMachine):
    depth = 2


MACHINES = [
    SchedulerMachine,
    Depth2Machine,
    ConnectedMachine,
    ConnectedDepth2Machine,
    FailingMachine,
    FailingDepth2Machine,
]


@pytest.mark.parametrize("machine", MACHINES)
def test_random_lives(machine: type[SchedulerMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=55, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
