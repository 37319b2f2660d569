"""Lanes that a seed drives: what runs when, and that all kinds of lanes mean the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from interlace.engine.errors import (
    ConfigError,
    LaneClosedError,
    LaneFullError,
    VirtualLaneError,
)
from interlace.engine.ports import Gate, Lane, Lanes
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import Policy, VirtualLanes

POLICIES: list[Policy] = ["seed", "eager", "lazy", ("load", "store"), ("store", "load")]


def note(log: list[str], word: str) -> Callable[[], None]:
    return lambda: log.append(word)


def boom() -> None:
    raise RuntimeError("boom")


def two_lanes(policy: Policy, seed: int = 0) -> tuple[VirtualLanes, list[str]]:
    """Three works each, in lanes "load" and "store"."""
    lanes, log = VirtualLanes(seed, policy), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")
    for i in range(3):
        load.submit(note(log, f"load{i}"))
        store.submit(note(log, f"store{i}"))
    return lanes, log


# ---------------------------------------------------------------- policies


def test_nothing_runs_by_itself() -> None:
    for policy in POLICIES:
        lanes, log = two_lanes(policy)
        assert bool(log) == (policy == "eager")
        lanes.drain()
        assert len(log) == 6
        assert not lanes.pending
        assert list(lanes.trace) == [f"{w[:-1]}#{int(w[-1]) + 1}" for w in log]


def test_eager_work_runs_while_it_is_submitted_and_blocked_work_as_soon_as_it_can() -> None:
    lanes, log = VirtualLanes(0, "eager"), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")

    def work() -> None:
        inner = load.submit(note(log, "inner"))
        store.wait(inner)
        store.submit(note(log, "store"))
        log.append("outer")

    gate = store.submit(work)
    assert log == ["outer", "inner", "store"]
    assert gate.has_ended


def test_lazy_runs_only_what_a_wait_needs() -> None:
    lanes, log = VirtualLanes(0, "lazy"), list[str]()
    a, b, c = (lanes.lane(name) for name in "abc")
    a.submit(note(log, "a1"))
    needed = a.submit(note(log, "a2"))
    a.submit(note(log, "a3"))
    b.wait(needed)
    target = b.submit(note(log, "b1"))
    c.submit(note(log, "c1"))
    assert target.wait()
    assert log == ["a1", "a2", "b1"]
    assert lanes.pending == ["a#3", "c#1"]


@pytest.mark.parametrize("polls", [1, 4])
def test_lazy_lets_who_asks_again_and_again_get_on(polls: int) -> None:
    lanes, log = VirtualLanes(0, "lazy", polls_per_work=polls), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")
    store.wait(load.submit(note(log, "load")))
    gate = store.submit(note(log, "store"))
    load.submit(note(log, "not needed"))
    asked = 0
    while not gate.query():
        asked += 1
    assert asked == 2 * polls - 1
    assert log == ["load", "store"]
    while not load.query():
        asked += 1
    assert asked == 3 * polls - 2


@pytest.mark.parametrize("order", [("load", "store"), ("store", "load"), ("x", "store")])
def test_a_list_of_names_is_an_order_of_lanes(order: tuple[str, ...]) -> None:
    lanes, log = two_lanes(order)
    lanes.drain()
    first = "load" if order[0] == "load" else "store"
    assert [word[:-1] for word in log] == [first] * 3 + [
        word for word in ("load", "store") if word != first
    ] * 3


def test_under_a_list_a_question_lets_one_work_run_and_a_wait_what_comes_first() -> None:
    lanes, log = VirtualLanes(0, ("store", "load")), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")
    gate = load.submit(note(log, "load"))
    store.submit(note(log, "store1"))
    store.submit(note(log, "store2"))
    assert not gate.query()
    assert log == ["store1"]
    assert gate.wait()
    assert log == ["store1", "store2", "load"]


def test_seeds_bring_every_order_and_a_poller_always_ends() -> None:
    orders = set()
    for seed in range(200):
        lanes, log = VirtualLanes(seed), list[str]()
        load, store = lanes.lane("load"), lanes.lane("store")
        gates = [load.submit(note(log, "a")), store.submit(note(log, "b"))]
        for _ in range(100):
            if all(gate.query() for gate in gates):
                break
        assert len(log) == 2
        orders.add("".join(log))
    assert orders == {"ab", "ba"}


@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POLICIES),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30),
)
def test_the_same_seed_and_questions_give_the_same_trace(
    seed: int, policy: Policy, asks: list[tuple[int, int]]
) -> None:
    def run() -> list[str]:
        lanes, log = VirtualLanes(seed, policy), list[str]()
        load, store, gates = lanes.lane("load"), lanes.lane("store"), list[Gate]()
        for kind, n in asks:
            if kind == 0:
                gates.append((load, store)[n % 2].submit(note(log, "x")))
            elif kind == 1 and gates:
                (load, store)[n % 2].wait(gates[n % len(gates)])
            elif kind == 2 and gates:
                gates[n % len(gates)].query()
            elif kind == 3:
                lanes.advance()
        lanes.drain()
        return list(lanes.trace)

    assert run() == run()


# ---------------------------------------------------------------- waits that never end


def test_a_wait_that_would_never_end_names_the_lanes() -> None:
    lanes = VirtualLanes(0)
    load, store = lanes.lane("load"), lanes.lane("store")
    gates: list[Gate] = []

    def circle() -> None:
        gates[1].wait()

    gates.append(load.submit(circle))
    store.wait(gates[0])
    gates.append(store.submit(lambda: None))
    with pytest.raises(
        VirtualLaneError, match=r"store#1 .* for ever.*load .*runs load#1; store has 1"
    ):
        gates[1].wait()
    assert isinstance(gates[0].error, VirtualLaneError)


def test_a_work_that_waits_for_its_own_lane_is_found() -> None:
    for policy in POLICIES:
        lanes = VirtualLanes(0, policy)
        lane = lanes.lane("load")

        def work(lane: Lane = lane) -> None:
            lane.submit(lambda: None).wait()

        with pytest.raises(VirtualLaneError, match="load#2 would be waited for for ever"):
            lane.submit(work).wait()


def test_with_a_timeout_a_wait_gives_up_when_nothing_can_run_and_not_before() -> None:
    lanes, log = VirtualLanes(0), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")
    answers = list[bool]()
    gates: list[Gate] = []

    def work() -> None:
        answers.append(gates[0].wait(5.0))

    hung = load.submit(work)
    store.wait(hung)
    gates.append(store.submit(note(log, "store")))
    assert gates[0].wait(1e9), "time does not pass"
    assert answers == [False]
    assert log == ["store"]
    gate = load.submit(lambda: None)
    for _ in range(50):
        gate.wait(0.0)
    assert gate.has_ended, "a timeout of nothing is a question"


def test_closing_what_cannot_end_fails_what_is_left() -> None:
    lanes = VirtualLanes(0)
    load, store = lanes.lane("load"), lanes.lane("store")
    seen = list[object]()

    def work() -> None:
        seen.append(store.close(1.0))
        with pytest.raises(VirtualLaneError):
            load.close()

    hung = load.submit(work)
    store.wait(hung)
    never = store.submit(lambda: None)
    record = store.record()
    assert load.close()
    assert seen == [False]
    assert isinstance(never.error, LaneClosedError)
    assert isinstance(record.error, LaneClosedError)
    assert store.close()
    with pytest.raises(LaneClosedError):
        store.submit(lambda: None)


def test_gates_of_another_world_are_refused() -> None:
    lane = VirtualLanes(0).lane("load")
    thread = ThreadLanes().lane("load")
    for foreign in (VirtualLanes(0).lane("x").submit(lambda: None), thread.record()):
        with pytest.raises(VirtualLaneError, match="all lanes of one run from one object"):
            lane.wait(foreign)


# ---------------------------------------------------------------- who looks on


def test_hooks_see_each_work_and_what_they_raise_goes_to_who_let_it_run() -> None:
    seen: list[object] = []
    lanes = VirtualLanes(0)
    lanes.on_before_work = lambda label: seen.append(label)
    lanes.on_after_work = lambda label, error: seen.append((label, str(error)))
    lane = lanes.lane("store")
    lane.submit(note([], "x"))
    lane.submit(boom)
    lane.record()
    lanes.drain()
    assert seen == ["store#1", ("store#1", "None"), "store#2", ("store#2", "boom")]

    def complain(_: str) -> None:
        raise AssertionError("somebody wrote here")

    lanes.on_before_work = complain
    gate = lane.submit(lambda: None)
    with pytest.raises(AssertionError, match="somebody"):
        gate.wait()
    assert lanes.pending == ["store#3"], "it has not run"
    lanes.on_before_work = None
    assert gate.wait()


def test_what_a_test_raises_in_a_work_ends_the_test() -> None:
    lanes = VirtualLanes(0)
    lane = lanes.lane("load")
    gate = lane.submit(lambda: pytest.fail("wrong"))
    with pytest.raises(pytest.fail.Exception, match="wrong"):
        gate.wait()
    assert gate.error is not None
    assert lane.submit(lambda: None).wait(), "the lane goes on"


def test_the_trace_and_the_lanes_that_are_known_have_a_bound() -> None:
    lanes = VirtualLanes(0, trace_length=5)
    for _ in range(20):
        lane = lanes.lane("load")
        lane.submit(lambda: None)
        lane.close()
    assert list(lanes.trace) == [f"load-{n}#1" for n in range(16, 21)]
    assert len(lanes._lanes) == 1


def test_another_thread_waits_for_its_turn() -> None:
    lanes, log = VirtualLanes(3), list[str]()
    load, store = lanes.lane("load"), lanes.lane("store")

    def drive(lane: Lane) -> None:
        for _ in range(50):
            assert lane.submit(note(log, lane.name)).wait()

    threads = [threading.Thread(target=drive, args=(lane,)) for lane in (load, store)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log) == 100


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sometimes'"):
        VirtualLanes(0, "sometimes")
    with pytest.raises(ConfigError, match="at least 1"):
        VirtualLanes(0, polls_per_work=0)
    with pytest.raises(ConfigError, match="at least 1"):
        VirtualLanes(0, trace_length=0)
    with pytest.raises(ValueError, match="max_pending"):
        VirtualLanes(0).lane("x", max_pending=0)


# ---------------------------------------------------------------- all kinds mean the same


MAX_PENDING = 5


class Meaning(RuleBasedStateMachine):
    """Random programs over three lanes, against what lanes promise.

    The model knows of each work its lane, its number, whether it fails, and which gates were
    waited for before it was queued. It does not know when anything runs, only what must have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.ran: list[int] = []  # works in the order in which they ended
        self.works: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.waits: list[list[Gate]] = [[], [], []]
        self.unrecorded: list[list[int]] = [[], [], []]
        self.closed = [False, False, False]

    @initialize(kind=st.sampled_from(["threads", *POLICIES]), seed=st.integers(0, 1000))
    def make(self, kind: Any, seed: int) -> None:
        lanes: Lanes = ThreadLanes() if kind == "threads" else VirtualLanes(seed, kind)
        names = ("load", "store", "store")
        self.lanes: list[Lane] = [lanes.lane(name, max_pending=MAX_PENDING) for name in names]

    @rule(n=st.integers(0, 2), fails=st.booleans())
    def submit(self, n: int, fails: bool) -> None:
        number = len(self.works)

        def work() -> None:
            with self.lock:
                self.ran.append(number)
            if fails:
                raise RuntimeError(str(number))

        try:
            gate = self.lanes[n].submit(work)
        except LaneClosedError:
            assert self.closed[n]
            return
        except LaneFullError:
            mine = [work for work in self.works if work["lane"] == n]
            assert len(mine) >= MAX_PENDING
            return
        assert not self.closed[n]
        self.works.append({"lane": n, "gate": gate, "fails": fails, "after": list(self.waits[n])})
        self.unrecorded[n].append(number)

    @rule(n=st.integers(0, 2))
    def record(self, n: int) -> None:
        covers, self.unrecorded[n] = self.unrecorded[n], []
        before = [i for i, work in enumerate(self.works) if work["lane"] == n]
        gate = self.lanes[n].record()
        self.records.append(
            {"gate": gate, "covers": covers, "before": before, "after": list(self.waits[n])}
        )

    @precondition(lambda self: self.works or self.records)
    @rule(n=st.integers(0, 2), data=st.data())
    def wait(self, n: int, data: st.DataObject) -> None:
        gate = data.draw(st.sampled_from([*self.works, *self.records]))["gate"]
        if not self.closed[n]:
            self.waits[n].append(gate)
        self.lanes[n].wait(gate)

    @precondition(lambda self: self.works or self.records)
    @rule(data=st.data(), waits=st.booleans())
    def ask(self, data: st.DataObject, waits: bool) -> None:
        one = data.draw(st.sampled_from([*self.works, *self.records]))
        has_ended = one["gate"].wait(20.0) if waits else one["gate"].query()
        assert has_ended or not waits
        if has_ended:
            self.check(one)

    @rule(n=st.integers(0, 2))
    def ask_lane(self, n: int) -> None:
        if self.lanes[n].query():
            with self.lock:
                assert all(i in self.ran for i, work in enumerate(self.works) if work["lane"] == n)

    @rule(n=st.integers(0, 2))
    def close(self, n: int) -> None:
        assert self.lanes[n].close(20.0)
        self.closed[n] = True
        assert self.lanes[n].query()

    def check(self, one: dict[str, Any]) -> None:
        """It has ended, so what had to come before it has ended, and its error is its own."""
        with self.lock:
            ran = list(self.ran)
        if "covers" in one:
            failed = [str(i) for i in one["covers"] if self.works[i]["fails"]]
            expected = failed[0] if failed else None
            assert all(i in ran for i in one["before"])
        else:
            number = self.works.index(one)
            expected = str(number) if one["fails"] else None
            mine = [i for i, work in enumerate(self.works) if work["lane"] == one["lane"]]
            assert [i for i in ran if i in mine][: mine.index(number) + 1] == mine[
                : mine.index(number) + 1
            ]
        error = one["gate"].error
        assert (None if error is None else str(error)) == expected
        for gate in one["after"]:
            assert gate.query(), "it was waited for"
            for work in self.works:
                if work["gate"] is gate and "covers" not in one:
                    assert ran.index(self.works.index(work)) < ran.index(self.works.index(one))

    def teardown(self) -> None:
        for lane in getattr(self, "lanes", ()):
            assert lane.close(20.0)
        for one in (*self.works, *self.records):
            assert one["gate"].query()
            self.check(one)
        assert sorted(self.ran) == list(range(len(self.works))), "each work ran once"


TestMeaning = Meaning.TestCase
TestMeaning.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
