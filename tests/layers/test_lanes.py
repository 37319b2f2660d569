"""Lanes made of threads: order, records, failures, ends, and what is let go of."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.layers.lane_queue import without_frames
from interlace.layers.lanes import ThreadGate, ThreadLane, ThreadLanes

PATIENCE_S = 20.0
SRC = str(Path(__file__).resolve().parents[2] / "src")


def lane(name: str = "load", *, max_pending: int = 1024) -> ThreadLane:
    return ThreadLanes().lane(name, max_pending=max_pending)


class Held:
    """A work that runs until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.let_go.wait(PATIENCE_S)


def boom() -> None:
    raise RuntimeError("boom")


def test_no_thread_before_the_first_work_and_a_daemon_after_it() -> None:
    before = set(threading.enumerate())
    one = lane("mine")
    assert one.query()
    assert one.record().wait(PATIENCE_S)
    assert set(threading.enumerate()) == before
    assert one.submit(lambda: None).wait(PATIENCE_S)
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("interlace-lane-mine", True)
    assert one.close()
    assert not thread.is_alive()


def test_a_failure_fails_its_gate_and_the_next_record_alone() -> None:
    one = lane()
    gates = [one.submit(work) for work in (lambda: None, boom, lambda: None)]
    first, second = one.record(), one.record()
    after = one.submit(lambda: None)
    third = one.record()
    assert one.close(PATIENCE_S)
    assert [str(gate.error) for gate in (*gates, after)] == ["None", "boom", "None", "None"]
    assert [str(gate.error) for gate in (first, second, third)] == ["boom", "None", "None"]


def test_a_failed_gate_keeps_no_frames_and_says_where_it_was_raised() -> None:
    class Buffer:
        pass

    watched: list[weakref.ref[Buffer]] = []

    def inner() -> None:
        raise KeyError("lost")

    def work() -> None:
        buffer = Buffer()
        watched.append(weakref.ref(buffer))
        try:
            inner()
        except KeyError as error:
            raise OSError("cannot") from error

    one = lane()
    gate = one.submit(work)
    gate.wait(PATIENCE_S)
    gc.collect()
    assert watched[0]() is None
    assert isinstance(gate.error, OSError)
    (note,) = gate.error.__notes__
    assert "lane 'load'" in note
    assert "work" in note
    assert "test_lanes.py" in note
    assert one.close()


def test_frames_of_groups_and_circles_go_too() -> None:
    inner, outer = ValueError("x"), ExceptionGroup("many", [KeyError("y")])
    inner.__cause__, outer.__cause__ = outer, inner
    for error in (inner, *outer.exceptions):
        try:
            raise error
        except type(error):
            pass
    assert without_frames(outer, "load") is outer
    assert inner.__traceback__ is outer.exceptions[0].__traceback__ is None


def test_what_has_run_is_let_go_while_the_lane_waits_for_more() -> None:
    class Buffer:
        pass

    buffer = Buffer()
    watched = weakref.ref(buffer)
    one = lane()
    assert one.submit(lambda held=buffer: None).wait(PATIENCE_S)  # type: ignore[misc]
    del buffer
    end = time.monotonic() + PATIENCE_S
    while watched() is not None:
        assert time.monotonic() < end
        time.sleep(0.001)
    one.close()


def test_max_pending_counts_what_has_not_ended_and_nothing_is_queued_beyond_it() -> None:
    one, held, ran = lane(max_pending=2), Held(), list[int]()
    one.submit(held)
    one.submit(lambda: ran.append(1))
    with pytest.raises(LaneFullError, match="'load' has 2 works"):
        one.submit(lambda: ran.append(2))
    held.let_go.set()
    assert one.record().wait(PATIENCE_S)
    one.submit(lambda: ran.append(3))
    assert one.close(PATIENCE_S)
    assert ran == [1, 3]
    with pytest.raises(ValueError, match="at least 1"):
        lane(max_pending=0)


def test_records_and_waits_with_nothing_new_are_not_queued_again() -> None:
    one, other, held = lane(), lane("store"), Held()
    closed = one.submit(held)
    other.submit(lambda: None)
    records = set()
    for _ in range(100):
        other.wait(closed)
        records.add(id(other.record()))
    assert len(records) <= 3
    held.let_go.set()
    assert other.close(PATIENCE_S)
    assert one.close(PATIENCE_S)


def test_a_lane_waits_for_a_gate_of_another_one_and_its_own_is_no_obstacle() -> None:
    one, other, held, order = lane(), lane("store"), Held(), list[str]()
    copied = one.submit(held)
    first = other.submit(lambda: order.append("before"))
    other.wait(copied)
    written = other.submit(lambda: order.append("written"))
    other.wait(written)
    last = other.submit(lambda: order.append("last"))
    assert first.wait(PATIENCE_S)
    assert not written.wait(0.02)
    assert not other.query()
    order.append("copied")
    held.let_go.set()
    assert last.wait(PATIENCE_S)
    assert order == ["before", "copied", "written", "last"]
    assert other.query()
    assert one.close()
    assert other.close()


def test_a_failed_gate_is_no_longer_closed_so_the_lane_that_waits_goes_on() -> None:
    one, other = lane(), lane("store")
    other.wait(one.submit(boom))
    gate = other.submit(lambda: None)
    assert gate.wait(PATIENCE_S)
    assert gate.error is None


def test_close_lets_what_is_queued_end_refuses_more_and_may_be_repeated() -> None:
    one, ran = lane(), list[int]()
    for i in range(50):
        one.submit(lambda i=i: ran.append(i))  # type: ignore[misc]
    assert one.close()
    assert one.close(0.0)
    assert ran == list(range(50))
    with pytest.raises(LaneClosedError, match="'load' is closed"):
        one.submit(lambda: None)
    assert one.record().query()
    assert lane().close(), "a lane that never worked"


def test_close_in_time_fails_what_never_ran_and_not_what_still_runs() -> None:
    one, held, ran = lane(), Held(), list[int]()
    running = one.submit(held)
    never = one.submit(lambda: ran.append(1))
    record = one.record()
    assert held.has_begun.wait(PATIENCE_S)
    assert not one.close(0.01)
    assert never.query()
    assert isinstance(never.error, LaneClosedError)
    assert not running.query(), "it still uses what it was given"
    assert not record.query(), "so does whoever waits for all of it"
    assert not one.close(0.0)
    held.let_go.set()
    assert record.wait(PATIENCE_S)
    assert isinstance(record.error, LaneClosedError)
    assert running.query()
    assert running.error is None
    assert one.close(PATIENCE_S)
    assert not ran


def test_a_lane_that_is_closed_while_it_waits_for_another_ends_at_once() -> None:
    one, other, held = lane(), lane("store"), Held()
    other.wait(one.submit(held))
    never, record = other.submit(lambda: None), other.record()
    assert not other.close(0.01)
    assert never.query()
    assert record.query()
    assert isinstance(record.error, LaneClosedError)
    assert other.close(0.0)
    held.let_go.set()
    assert one.close()


def test_work_may_submit_wait_for_others_and_close_its_own_lane() -> None:
    one, other, seen = lane(), lane("store"), list[object]()

    def work() -> None:
        seen.append(other.submit(lambda: None).wait(PATIENCE_S))
        seen.append(one.close(PATIENCE_S))

    gate = one.submit(work)
    assert gate.wait(PATIENCE_S)
    assert seen == [True, False]
    assert gate.error is None


def test_any_exception_of_a_work_is_its_gate_s() -> None:
    def leave() -> None:
        raise SystemExit(3)

    one = lane()
    gate = one.submit(leave)
    assert one.submit(lambda: None).wait(PATIENCE_S)
    assert isinstance(gate.error, SystemExit)
    assert "failed" in repr(gate)


def test_a_lane_that_nobody_holds_does_its_work_and_ends() -> None:
    before, held = set(threading.enumerate()), Held()
    one = lane()
    one.submit(held)
    gate = one.submit(lambda: None)
    del one
    gc.collect()
    held.let_go.set()
    assert gate.wait(PATIENCE_S)
    assert gate.error is None
    end = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end, "its thread ends"
        gc.collect()
        time.sleep(0.001)


def test_many_threads_may_submit_and_each_one_s_order_holds() -> None:
    one, ran = lane(), list[tuple[int, int]]()

    def submit(thread: int) -> None:
        for i in range(100):
            one.submit(lambda pair=(thread, i): ran.append(pair))  # type: ignore[misc]

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.close(PATIENCE_S)
    for n in range(4):
        assert [i for thread, i in ran if thread == n] == list(range(100))


AT_EXIT = """
import atexit, sys, threading
atexit.register(lambda: print(gate.wait(20), type(gate.error).__name__))
from interlace.layers.lanes import ThreadLanes
lane, begun = ThreadLanes().lane("load"), threading.Event()
lane.submit(lambda: (begun.set(), threading.Event().wait()))
gate = lane.submit(lambda: None)
assert begun.wait(20)
assert "torch" not in sys.modules
"""


def test_when_the_interpreter_ends_gates_of_what_has_not_begun_fail() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        env={"PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "True LaneClosedError"
    assert not done.stderr


def test_gates_can_be_waited_for_without_an_end_and_for_absurdly_long() -> None:
    gate = ThreadGate()
    assert not gate.wait(-1.0)
    gate.end(None)
    assert gate.wait(1e300)
    assert gate.wait()
    assert lane().close(1e300)
