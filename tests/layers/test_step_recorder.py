"""Marks of moments, and what is taken down of steps and transfers with them: on stand-ins for
CUDA's events, which pass when a test lets them."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from fake_streams import FakeDevice, FakeEvent

from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import Timings, TransferTiming
from interlace.layers.gpu.inputs import StepSize
from interlace.layers.gpu.traced_graphs import TURNS, TracedGraphs
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.moments import ANCHOR_S, ClockMoments, EventMoments
from interlace.layers.step_recorder import MOST_PIECES, MOST_STEPS, LayerMarks, StepRecorder

NUM_LAYERS = 3
OP_S = 0.001
"""Each piece of work of the stand-in."""


def a_step(step_id: int, **tokens: int) -> SchedulerOutput:
    output: Any = object.__new__(SchedulerOutput)
    object.__setattr__(output, "step_id", step_id)
    object.__setattr__(output, "num_scheduled_tokens", tokens or {"a": 1})
    found: SchedulerOutput = output
    return found


class Rig:
    """A recorder over a stand-in for a device."""

    def __init__(self) -> None:
        self.device = FakeDevice(op_s=OP_S)
        self.moments = EventMoments(self.device, lambda: self.device.now)
        self.recorder = StepRecorder(self.moments, NUM_LAYERS)

    def run(self, step_id: int, hooks: LayerHooks | None = None) -> Any:
        """Queue a step of as many pieces of work as layers."""
        timer = self.recorder.begin_step(a_step(step_id))
        around = timer.around(hooks)
        for layer in range(NUM_LAYERS):
            around.wait(layer)
            self.device.queue(lambda: None)
            around.save(layer)
        assert around.end is not None
        around.end()
        timer.end()
        return timer


def a_piece(begin_s: float, end_s: float) -> TransferTiming:
    return TransferTiming("bulk", "load", ("a",), 0, 3, 2, 64, "strided", begin_s, end_s)


# -------------------------------------------------------------------- moments


def test_marks_are_told_on_the_engines_clock() -> None:
    device = FakeDevice(op_s=OP_S)
    device.now = 100.0
    moments = EventMoments(device, lambda: device.now)
    first = moments.mark()
    assert not moments.has_passed(first)
    device.drain()
    assert moments.has_passed(first)
    assert moments.time_s(first, moments.anchor) == pytest.approx(device.now, abs=2 * OP_S)


def test_an_anchor_is_taken_anew_when_it_is_old_and_the_device_answers_at_once() -> None:
    device = FakeDevice(op_s=OP_S)
    moments = EventMoments(device, lambda: device.now)
    first = moments.anchor
    moments.refresh()
    assert moments.anchor is first
    device.now += 2 * ANCHOR_S

    class Prompt(FakeEvent):
        def query(self) -> bool:
            self.device.drain()
            return super().query()

    device.timed_event = lambda *, is_external=False: Prompt(device, is_external)  # type: ignore[method-assign]
    moments.refresh()
    assert moments.anchor is not first
    assert moments.anchor.time_s == pytest.approx(device.now, abs=2 * OP_S)


def test_who_does_not_answer_at_once_is_not_waited_for() -> None:
    device = FakeDevice(op_s=OP_S)
    moments = EventMoments(device, lambda: device.now)
    first = moments.anchor
    device.now += 2 * ANCHOR_S
    moments.refresh()
    assert moments.anchor is first


def test_events_are_used_again() -> None:
    rig = Rig()
    made: list[FakeEvent] = []
    make = rig.device.timed_event

    def counted(*, is_external: bool = False) -> FakeEvent:
        made.append(make(is_external=is_external))
        return made[-1]

    rig.device.timed_event = counted  # type: ignore[method-assign]
    for step_id in range(5):
        rig.run(step_id)
        rig.device.drain()
        assert len(rig.recorder.take().steps) == 1
    assert len(made) <= 2 * NUM_LAYERS + 4, "those of one step"


# -------------------------------------------------------------------- steps


def test_a_step_is_told_when_its_last_mark_has_passed() -> None:
    rig = Rig()
    rig.run(7)
    assert rig.recorder.take().is_empty
    rig.device.drain()
    (step,) = rig.recorder.take().steps
    assert (step.step_id, step.mode, step.is_gated) == (7, "NONE", False)
    assert step.num_scheduled_tokens == (("a", 1),)
    assert [one.layer for one in step.layers] == [0, 1, 2]
    times = [step.begin_s]
    for one in step.layers:
        assert one.passed_s == one.arrived_s, "there are no hooks to wait in"
        times += [one.arrived_s, one.end_s]
    assert [*times, step.end_s] == sorted([*times, step.end_s])
    assert rig.recorder.take().is_empty


def test_the_wait_of_a_hook_is_between_arriving_and_passing() -> None:
    rig = Rig()
    calls: list[str] = []

    def wait(layer: int) -> None:
        calls.append(f"wait {layer}")
        if layer == 1:
            for _ in range(10):
                rig.device.queue(lambda: None)

    rig.run(1, LayerHooks(wait, lambda layer: calls.append(f"save {layer}")))
    rig.device.drain()
    (step,) = rig.recorder.take().steps
    waits = [one.waited_s for one in step.layers]
    assert waits == pytest.approx([OP_S, 11 * OP_S, OP_S])
    assert calls == ["wait 0", "save 0", "wait 1", "save 1", "wait 2", "save 2"]


def test_two_steps_under_way_are_told_one_by_one() -> None:
    rig = Rig()
    first = rig.run(1)
    rig.run(2)
    while not first.has_ended:
        rig.device.step()
    output = rig.recorder.with_timings(ModelRunnerOutput(), first)
    assert output.timings is not None
    assert [one.step_id for one in output.timings.steps] == [1]
    assert rig.recorder.with_timings(ModelRunnerOutput()).timings is None
    rig.device.drain()
    assert [one.step_id for one in rig.recorder.take().steps] == [2]


def test_only_so_many_steps_are_remembered() -> None:
    rig = Rig()
    for step_id in range(MOST_STEPS + 3):
        rig.run(step_id)
    rig.device.drain()
    timings = rig.recorder.take()
    assert [one.step_id for one in timings.steps] == list(range(3, MOST_STEPS + 3))
    assert timings.num_dropped == 3


def test_a_step_whose_layers_the_device_does_not_tell_is_told_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    for step_id in (1, 2):
        timer = rig.run(step_id)
        monkeypatch.setattr(timer._own_marks, "timings", _raise)
    rig.device.drain()
    with caplog.at_level(logging.WARNING):
        steps = rig.recorder.take().steps
    assert [one.layers for one in steps] == [(), ()]
    assert len(caplog.records) == 1


def _raise(*_: object) -> None:
    raise RuntimeError("CUDA error: device not ready")


def test_what_is_left_is_waited_for_or_dropped_at_the_end() -> None:
    rig = Rig()
    rig.run(1)
    lane = rig.device.stream(is_urgent=False)
    begin = rig.recorder.mark()
    with rig.device.on(lane):
        never = FakeEvent(rig.device, num_recorded=1)
        lane.wait_event(never)
        rig.recorder.add(begin, rig.recorder.mark(), a_piece)
    timings = rig.recorder.close()
    assert [one.step_id for one in timings.steps] == [1]
    assert timings.num_dropped == 1


# -------------------------------------------------------------------- transfers


def test_pieces_are_told_as_they_end_whatever_is_before_them() -> None:
    rig = Rig()
    slow, fast = (rig.device.stream(is_urgent=False) for _ in range(2))
    for lane in (slow, fast):
        with rig.device.on(lane):
            begin = rig.recorder.mark()
            rig.device.queue(lambda: None)
            rig.recorder.add(begin, rig.recorder.mark(), a_piece)
    while fast.ops:
        fast.run(rig.device.now)
        rig.device.now += OP_S
    (one,) = rig.recorder.take().transfers
    assert one.end_s - one.begin_s == pytest.approx(2 * OP_S)
    rig.device.drain()
    assert len(rig.recorder.take().transfers) == 1


@pytest.mark.parametrize("answer", [None, "text", KeyError("own")])
def test_who_cannot_tell_of_a_piece_harms_nobody(answer: object) -> None:
    recorder = StepRecorder(ClockMoments(lambda: 1.0), NUM_LAYERS)

    def tell(begin_s: float, end_s: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    recorder.add(recorder.mark(), recorder.mark(), tell)
    recorder.add(recorder.mark(), recorder.mark(), a_piece)
    assert recorder.take() == Timings((), (a_piece(1.0, 1.0),), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_bytes": np.int64(64)},
        {"num_bytes": 1 << 63},
        {"num_blocks": -1},
        {"num_blocks": True},
        {"end_layer": 0},
        {"end_layer": NUM_LAYERS + 1},
        {"begin_s": 2.0, "end_s": 1.0},
        {"end_s": float("nan")},
        {"begin_s": float("-inf")},
        {"lane": None},
        {"way": "copy"},
        {"request_ids": (1,)},
        {"step_id": 1.0},
        {"error": OSError("it is gone")},
    ],
)
def test_a_piece_that_no_file_could_hold_is_dropped(wrong: dict[str, Any]) -> None:
    recorder = StepRecorder(ClockMoments(lambda: 1.0), NUM_LAYERS)
    recorder.add(1.0, 1.0, lambda begin, end: dataclasses.replace(a_piece(begin, end), **wrong))
    assert recorder.take() == Timings((), (), 1)


def test_only_so_many_pieces_are_remembered() -> None:
    recorder = StepRecorder(ClockMoments(lambda: 1.0), NUM_LAYERS)
    for _ in range(MOST_PIECES + 5):
        recorder.add(0.0, 1.0, a_piece)
    timings = recorder.take()
    assert len(timings.transfers) == MOST_PIECES
    assert timings.num_dropped == 5


# -------------------------------------------------------------------- graphs


class FakeCaptured:
    """A `Captured`."""

    size = StepSize(8, 8)
    gathers = False
    is_cut = False

    def __init__(self, mode: GraphMode = GraphMode.FULL) -> None:
        self.runtime_mode = mode

    def replay(self, step: Any) -> Any:
        raise AssertionError("it is not asked for here")


class FakePool:
    """Captures for `TracedGraphs`."""

    def __init__(self) -> None:
        self.captured: list[bool] = []
        self.error: Exception | None = None

    def capture_traced(self, captured: Any, around: Any, *, is_gated: bool) -> Any:
        if self.error is not None:
            raise self.error
        self.captured.append(is_gated)
        hooks = around(LayerHooks(lambda layer: None, lambda layer: None) if is_gated else None)
        for layer in range(NUM_LAYERS):
            hooks.wait(layer)
            hooks.save(layer)
        hooks.end()
        return (object(),)


def traced_graphs(rig: Rig | None = None) -> tuple[TracedGraphs, FakePool]:
    pool: Any = FakePool()
    return TracedGraphs(pool, (rig or Rig()).moments, NUM_LAYERS), pool


def test_graphs_take_turns_and_are_captured_once() -> None:
    graphs, pool = traced_graphs()
    captured = FakeCaptured()
    lent = []
    for _ in range(6):
        one = graphs.lend(captured, is_gated=False)
        assert one is not None
        assert one.marks.has_all
        lent.append(one)
        if len(lent) == TURNS:
            lent.pop(0).give_back()
    assert len(pool.captured) == TURNS
    assert graphs.lend(captured, is_gated=True) is not None
    assert graphs.lend(FakeCaptured(), is_gated=False) is not None
    assert pool.captured == [False, False, True, False]


def test_a_graph_that_was_not_read_yet_is_not_replayed_again() -> None:
    graphs, _ = traced_graphs()
    captured = FakeCaptured()
    lent = [graphs.lend(captured, is_gated=False) for _ in range(TURNS)]
    assert graphs.lend(captured, is_gated=False) is None
    assert lent[0] is not None
    lent[0].give_back()
    assert graphs.lend(captured, is_gated=False) is lent[0]


def test_steps_in_pieces_have_no_traced_graph() -> None:
    graphs, pool = traced_graphs()
    assert graphs.lend(FakeCaptured(GraphMode.PIECEWISE), is_gated=False) is None
    assert pool.captured == []


def test_want_of_memory_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs, pool = traced_graphs()
    captured = FakeCaptured()
    assert graphs.lend(captured, is_gated=False) is not None
    pool.error = torch.cuda.OutOfMemoryError("there is none")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert graphs.lend(captured, is_gated=False) is None
            assert graphs.lend(FakeCaptured(), is_gated=True) is None
    assert len(caplog.records) == 1


def test_a_step_gives_back_what_it_has_borrowed_when_it_was_read() -> None:
    rig = Rig()
    graphs, _ = traced_graphs(rig)
    one = graphs.lend(FakeCaptured(), is_gated=False)
    assert one is not None
    timer = rig.recorder.begin_step(a_step(1))
    timer.mode = GraphMode.FULL
    timer.borrow(one.marks, one.give_back)
    timer.end()
    assert one.is_lent
    rig.device.drain()
    rig.recorder.take()
    assert not one.is_lent


def test_a_step_that_runs_once_more_with_its_hooks_tells_of_these() -> None:
    """The gates of its graph were not all armed, so what that recorded is of no step, or an older
    one."""
    rig = Rig()
    graphs, _ = traced_graphs(rig)
    one = graphs.lend(FakeCaptured(), is_gated=True)
    assert one is not None
    timer = rig.recorder.begin_step(a_step(1))
    timer.mode, timer.is_gated = GraphMode.FULL, True
    timer.borrow(one.marks, one.give_back)
    hooks = timer.around(None)
    for layer in range(NUM_LAYERS):
        hooks.wait(layer)
        hooks.save(layer)
    timer.end()
    rig.device.drain()
    (told,) = rig.recorder.take().steps
    assert told.mode == "NONE"
    assert not told.is_gated
    assert told.begin_s <= told.layers[0].arrived_s < told.layers[-1].end_s <= told.end_s
    assert not one.is_lent


def test_every_mark_of_a_graph_lives_as_long_as_it() -> None:
    """The driver reads an event that was let go of when the graph is made, and the process ends."""
    made: list[weakref.ref[Any]] = []

    class Mark:
        def __init__(self) -> None:
            made.append(weakref.ref(self))

    marks = LayerMarks(Mark, NUM_LAYERS)
    hooks = marks.around(LayerHooks(lambda layer: None, lambda layer: None))
    for layer in range(NUM_LAYERS):
        hooks.wait(layer)
        hooks.save(layer)
    assert hooks.end is not None
    hooks.end()
    gc.collect()
    assert len(made) == 2 * NUM_LAYERS + 2
    assert all(mark() is not None for mark in made)
    assert marks.has_all
