"""Lanes over streams, with a device that runs what is queued when a test says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from fake_streams import FakeDevice, FakeEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lane, Lanes
from interlace.layers.cuda_gates import CudaGate, GraphGate
from interlace.layers.cuda_lanes import CudaLane, CudaLanes
from interlace.layers.lanes import ThreadGate, ThreadLanes

PATIENCE_S = 20.0


def lanes_of(device: FakeDevice) -> CudaLanes:
    return CudaLanes(device, clock=lambda: device.now, sleep=device.sleep)


class Notes:
    """What has run on the device, in order."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.ran: list[str] = []

    def op(self, name: str) -> Callable[[], None]:
        """A work that queues one piece."""
        return lambda: self.device.queue(lambda: self.ran.append(name))


class Kit:
    def __init__(self) -> None:
        self.device = FakeDevice()
        self.lanes = lanes_of(self.device)
        self.notes = Notes(self.device)
        self.load, self.store = self.lanes.lane("load"), self.lanes.lane("store")

    def op(self, name: str) -> Callable[[], None]:
        return self.notes.op(name)

    @property
    def ran(self) -> list[str]:
        return self.notes.ran


@pytest.fixture
def kit() -> Kit:
    return Kit()


def is_queued(gate: CudaGate) -> bool:
    return gate.is_queued


def boom() -> None:
    raise RuntimeError("boom")


def raising_after(work: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        work()
        boom()

    return both


def test_they_are_the_lanes_of_the_ports(kit: Kit) -> None:
    lanes: Lanes = kit.lanes
    lane: Lane = lanes.lane("load")
    gate: Gate = lane.submit(lambda: None)
    assert lane.name == "load"
    assert not gate.query()
    assert [stream.name for stream in kit.device.streams] == [
        "compute",
        "urgent",
        "other",
        "urgent",
    ]


def test_a_work_is_queued_at_once_and_its_gate_opens_behind_it(kit: Kit) -> None:
    gate = kit.load.submit(kit.op("copy"))
    assert kit.device.current() is kit.device.compute
    assert [len(stream.ops) for stream in kit.device.streams] == [0, 2, 0]
    assert not gate.query()
    assert not kit.load.query()
    assert kit.device.step()
    assert kit.ran == ["copy"]
    assert not gate.query(), "its event has not passed"
    kit.device.drain()
    assert gate.query()
    assert kit.load.query()
    assert gate.error is None


def test_a_stream_waits_for_a_gate_on_another_stream(kit: Kit) -> None:
    kit.store.wait(kit.load.submit(kit.op("copy")))
    kit.store.submit(kit.op("write"))
    kit.lanes.compute.wait(kit.store.record())
    kit.op("step")()
    kit.load.wait(kit.lanes.compute.record())
    kit.load.submit(kit.op("next copy"))
    assert not kit.lanes.poll(), "nothing is held back on the host"
    kit.device.drain()
    assert kit.ran == ["copy", "write", "step", "next copy"]


def test_what_comes_after_a_file_is_held_back_on_the_host(kit: Kit) -> None:
    read = ThreadGate()
    first = kit.load.submit(kit.op("first"))
    kit.load.wait(read)
    gate = kit.load.submit(kit.op("copy"))
    behind = kit.load.submit(kit.op("behind"))
    kit.store.wait(gate)
    after = kit.store.submit(kit.op("after"))
    kit.device.drain()
    assert (kit.ran, first.query(), gate.query(), after.query()) == (["first"], True, False, False)
    assert not is_queued(gate)
    assert kit.lanes.poll()
    read.end(None)
    assert not kit.lanes.poll()
    assert is_queued(gate)
    assert is_queued(after)
    kit.device.drain()
    assert kit.ran[:2] == ["first", "copy"]
    assert set(kit.ran[2:]) == {"behind", "after"}
    assert behind.query()
    assert after.query()


@pytest.mark.parametrize("how", ["query", "wait", "submit", "record", "lane"])
def test_any_call_puts_on_the_stream_what_a_file_held_back(kit: Kit, how: str) -> None:
    read = ThreadGate()
    kit.load.wait(read)
    gate = kit.load.submit(kit.op("copy"))
    read.end(None)
    match how:
        case "query":
            assert not gate.query()
        case "wait":
            assert gate.wait()
        case "submit":
            kit.store.submit(kit.op("other"))
        case "record":
            kit.load.record()
        case "lane":
            assert not kit.load.query()
    assert is_queued(gate)


def test_a_wait_goes_by_way_of_the_file_that_holds_back_another_lane(kit: Kit) -> None:
    reader = ThreadLanes().lane("read")
    let_go = threading.Event()
    read = reader.submit(lambda: _await(let_go))
    kit.load.wait(read)
    kit.store.wait(kit.load.submit(kit.op("copy")))
    written = kit.store.submit(kit.op("write"))
    assert not written.wait(0.0)
    assert not written.wait(0.01), "the file has not come"
    threading.Timer(0.02, let_go.set).start()
    assert written.wait()
    assert kit.ran == ["copy", "write"]
    assert reader.close(PATIENCE_S)


def _await(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_a_wait_with_a_timeout_sleeps_ever_longer_and_no_longer_than_that(kit: Kit) -> None:
    kit.op("forever")()
    kit.device.compute.ops.appendleft(("wait", FakeEvent(kit.device, is_external=False), 1))
    gate = kit.lanes.compute.record()
    assert not gate.wait(0.005)
    assert kit.device.now == pytest.approx(0.005)
    sleeps = kit.device.sleeps[:-1]
    assert sleeps == sorted(sleeps)
    assert max(sleeps) == pytest.approx(1e-3)
    kit.device.compute.ops.popleft()
    assert gate.wait(1.0)
    assert kit.device.now < 0.01


def test_the_compute_stream_waits_for_no_file_but_the_host_does(kit: Kit) -> None:
    read = ThreadGate()
    kit.load.wait(read)
    copied = kit.load.submit(kit.op("copy"))
    assert not kit.lanes.compute.wait(copied, 0.001)
    assert not kit.lanes.compute.wait(read, 0.001)
    assert not kit.device.compute.ops
    threading.Timer(0.02, lambda: read.end(None)).start()
    assert kit.lanes.compute.wait(copied, PATIENCE_S)
    assert not copied.query(), "the stream waits from here on, and not the host"
    kit.op("step")()
    kit.device.drain()
    assert kit.ran == ["copy", "step"]
    num_ops = len(kit.device.compute.ops)
    assert kit.lanes.compute.wait(copied)
    assert len(kit.device.compute.ops) == num_ops, "it is open"


# ---------------------------------------------------------------- failures


def test_a_failure_fails_its_gate_and_the_next_record_alone(kit: Kit) -> None:
    works = [kit.op("a"), raising_after(kit.op("b")), kit.op("c")]
    gates = [kit.load.submit(work) for work in works]
    first, second = kit.load.record(), kit.load.record()
    last = kit.load.submit(kit.op("d"))
    third = kit.load.record()
    assert [gate.error for gate in gates] == [None] * 3, "closed until what they queued has ended"
    kit.device.drain()
    assert kit.ran == ["a", "b", "c", "d"]
    assert [str(gate.error) for gate in (*gates, last)] == ["None", "boom", "None", "None"]
    assert [str(gate.error) for gate in (first, second, third)] == ["boom", "None", "None"]
    error = gates[1].error
    assert error is not None
    assert error.__traceback__ is None
    assert "lane 'load'" in error.__notes__[0]


def test_what_waits_for_a_failed_gate_goes_on(kit: Kit) -> None:
    kit.store.wait(kit.load.submit(boom))
    gate = kit.store.submit(kit.op("write"))
    assert gate.wait()
    assert gate.error is None


def test_an_interrupt_goes_to_whoever_let_the_work_run(kit: Kit) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kit.load.submit(interrupted)
    gate = kit.load.submit(kit.op("next"))
    assert gate.wait()
    assert isinstance(
        kit.load.record().error or _ended(kit.load.record()), KeyboardInterrupt | None
    )


def _ended(gate: CudaGate) -> BaseException | None:
    gate.wait()
    return gate.error


def test_works_that_have_not_ended_are_bounded_wherever_they_are(kit: Kit) -> None:
    lane = kit.lanes.lane("small", max_pending=2)
    lane.submit(kit.op("a"))
    lane.wait(read := ThreadGate())
    lane.submit(kit.op("b"))
    with pytest.raises(LaneFullError, match="'small' has 2 works"):
        lane.submit(kit.op("c"))
    kit.device.drain()
    lane.submit(kit.op("c"))
    with pytest.raises(LaneFullError):
        lane.submit(kit.op("d"))
    read.end(None)
    assert lane.close()
    assert kit.ran == ["a", "b", "c"]
    with pytest.raises(ValueError, match="at least 1"):
        kit.lanes.lane("none", max_pending=0)


def test_records_with_nothing_new_are_one(kit: Kit) -> None:
    kit.load.submit(kit.op("a"))
    assert len({kit.load.record() for _ in range(10)}) == 2
    assert kit.lanes.compute.record() is not kit.lanes.compute.record(), "others queue there"


# ---------------------------------------------------------------- the end


def test_a_closed_lane_takes_no_more_and_waits_for_what_it_has(kit: Kit) -> None:
    gate = kit.load.submit(kit.op("a"))
    assert kit.load.close()
    assert gate.query()
    assert kit.load.close()
    with pytest.raises(LaneClosedError, match="'load' is closed"):
        kit.load.submit(kit.op("b"))
    kit.load.wait(ThreadGate())
    assert kit.load.record().wait()


def test_closing_does_not_wait_for_a_file_that_never_comes(kit: Kit) -> None:
    before = kit.load.submit(kit.op("a"))
    kit.load.wait(ThreadGate())
    held, record = kit.load.submit(kit.op("b")), kit.load.record()
    kit.store.wait(held)
    other = kit.store.submit(kit.op("c"))
    assert not kit.load.close(0.01)
    assert isinstance(held.error, LaneClosedError)
    assert record.wait()
    assert isinstance(record.error, LaneClosedError)
    assert other.wait()
    assert before.wait()
    assert sorted(kit.ran) == ["a", "c"]
    assert not kit.lanes.poll()


def test_a_lane_that_its_own_work_closes_runs_nothing_more(kit: Kit) -> None:
    said: list[bool] = []

    def work() -> None:
        behind.append(kit.load.submit(kit.op("behind")))
        assert not is_queued(behind[0])
        said.append(kit.load.close())

    behind: list[CudaGate] = []
    gate = kit.load.submit(work)
    assert said == [False]
    assert gate.wait()
    assert isinstance(behind[0].error, LaneClosedError)


def test_what_a_work_submits_comes_after_it(kit: Kit) -> None:
    def work() -> None:
        kit.op("first")()
        kit.load.submit(kit.op("third"))
        kit.op("second")()

    kit.load.submit(work)
    assert kit.load.record().wait()
    assert kit.ran == ["first", "second", "third"]


def test_a_lane_that_nobody_holds_ends_its_work(kit: Kit) -> None:
    lane: CudaLane | None = kit.lanes.lane("mine")
    assert lane is not None
    lane.wait(read := ThreadGate())
    lane.submit(kit.op("a"))
    lane = None
    read.end(None)
    assert not kit.lanes.poll()
    kit.device.drain()
    assert kit.ran == ["a"]


def test_a_work_is_kept_until_its_event_has_passed(kit: Kit) -> None:
    import weakref

    class Buffer:
        pass

    buffer = Buffer()
    watched = weakref.ref(buffer)

    def work(held: Buffer = buffer) -> None:
        kit.op("copy")()

    kit.load.submit(work)
    del buffer, work
    kit.device.step()
    kit.lanes.poll()
    assert watched() is not None, "the copy's event has not passed"
    kit.device.drain()
    kit.lanes.poll()
    assert watched() is None


def test_another_thread_waits_for_a_gate_and_moves_nothing(kit: Kit) -> None:
    """It gets on when the device thread has put the work on its stream."""
    read, writer = ThreadGate(), ThreadLanes().lane("store")
    kit.lanes = CudaLanes(kit.device)  # with real time
    load = kit.lanes.lane("load")
    load.wait(read)
    copied = load.submit(kit.op("copy"))
    read.end(None)
    writer.wait(copied)
    assert not copied.query()
    load.wait(held := ThreadGate())
    late = load.submit(kit.op("late"))
    assert not late.query()
    asked = writer.submit(lambda: kit.ran.append(f"asked {late.wait(0.001)} {late.is_queued}"))
    kit.device.drain()
    assert asked.wait(PATIENCE_S)
    held.end(None)
    assert late.wait()
    assert writer.close(PATIENCE_S)
    assert kit.ran == ["copy", "asked False False", "late"]


# ---------------------------------------------------------------- gates of graphs


def replay(device: FakeDevice, gate: FakeEvent, op: Callable[[], None]) -> None:
    """As a captured graph: the wait takes the event's state at the launch."""
    device.compute.wait_event(gate)
    op()


def test_a_graph_gate_is_armed_behind_the_copies_and_knows_its_step(kit: Kit) -> None:
    gate = kit.lanes.graph_gate()
    event = gate._event
    assert isinstance(event, FakeEvent)
    assert (event.is_external, event.num_recorded, gate.armed_for) == (True, 1, None)
    for step_id in (5, 6):
        kit.load.submit(kit.op(f"copy {step_id}"))
        assert kit.load.arm(gate, step_id)
        assert gate.armed_for == step_id
        replay(kit.device, event, kit.op(f"step {step_id}"))
    kit.device.drain()
    for step_id in (5, 6):
        assert kit.ran.index(f"copy {step_id}") < kit.ran.index(f"step {step_id}")
    gate.wait_here()
    assert kit.device.compute.ops[-1] == ("wait", event, 3)


def test_a_graph_gate_is_not_armed_over_what_is_held_back_or_failed(kit: Kit) -> None:
    gate: GraphGate = kit.lanes.graph_gate()
    kit.load.wait(read := ThreadGate())
    assert not kit.load.arm(gate, 1), "what comes next waits"
    kit.load.submit(kit.op("copy"))
    assert not kit.load.arm(gate, 1)
    seen = [gate.armed_for]
    read.end(None)
    assert kit.load.arm(gate, 1)
    kit.load.submit(boom)
    assert not kit.load.arm(gate, 2)
    seen.append(gate.armed_for)
    kit.load.record()
    assert kit.load.arm(gate, 3)
    assert [*seen, gate.armed_for] == [None, 1, 3]


# ---------------------------------------------------------------- works in parts


def parts_of(
    kit: Kit, *names: str, bad: str = ""
) -> tuple[list[Callable[[], None]], list[GraphGate]]:
    """A part that queues each name, the bad one raising behind it; and a gate for each."""
    parts = [raising_after(kit.op(name)) if name == bad else kit.op(name) for name in names]
    return parts, [kit.lanes.graph_gate() for _ in names]


def events_of(gates: list[GraphGate]) -> list[FakeEvent]:
    return [event for gate in gates if isinstance(event := gate._event, FakeEvent)]


def test_each_part_is_followed_by_its_own_gate_and_nothing_else(kit: Kit) -> None:
    parts, armed = parts_of(kit, "a", "b")
    gates = kit.load.submit_parts(parts, armed, 5)
    late = kit.lanes.graph_gate()
    assert kit.load.arm(late, 6)
    kit.load.submit(kit.op("next"))
    ops = list(kit.device.streams[1].ops)
    one, two, *_ = events = events_of([*armed, late])
    assert [op if isinstance(op, tuple) else "piece" for op in ops[:5]] == [
        "piece", ("record", one, 2), "piece", ("record", two, 2), ("record", events[2], 2)
    ]  # fmt: skip
    assert [gate.armed_for for gate in armed] == [5, 5]
    opened = []
    while not kit.load.query():
        opened.append([gate.query() for gate in gates])
        assert kit.device.step()
    assert [False, False] in opened
    assert [True, False] in opened
    assert kit.ran == ["a", "b", "next"]
    assert [gate.error for gate in gates] == [None, None]


def test_a_part_that_fails_fails_its_gate_and_those_behind_it_open_unarmed(kit: Kit) -> None:
    parts, armed = parts_of(kit, "a", "b", "c", bad="b")
    gates = kit.load.submit_parts(parts, armed, 5)
    assert [gate.armed_for for gate in armed] == [5, None, None]
    assert [event.num_recorded for event in events_of(armed)] == [2, 1, 1]
    assert all(gate.wait() for gate in gates)
    assert [str(gate.error) for gate in gates] == ["None", "boom", "None"]
    assert kit.ran == ["a", "b", "c"]
    assert isinstance(_ended(kit.load.record()), RuntimeError)
    kit.load.submit_parts(parts_of(kit, "d")[0], armed[:1], 6)
    assert armed[0].armed_for == 6


def test_an_interrupt_in_a_part_ends_all_gates(kit: Kit) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    _, armed = parts_of(kit, "a", "b", "c")
    seen: list[CudaGate] = []
    put = CudaGate.put

    def note(gate: CudaGate, event: FakeEvent, error: BaseException | None) -> None:
        seen.append(gate)
        put(gate, event, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGate, "put", note)
        with pytest.raises(KeyboardInterrupt):
            kit.load.submit_parts([kit.op("a"), interrupted, kit.op("c")], armed, 5)
    assert [type(_ended(gate)) for gate in seen] == [type(None)] + 2 * [KeyboardInterrupt]
    assert kit.ran == ["a"]
    assert kit.load.query()


def test_parts_behind_a_file_are_held_back_and_armed_when_they_are_queued(kit: Kit) -> None:
    kit.load.wait(read := ThreadGate())
    parts, armed = parts_of(kit, "a", "b")
    gates = kit.load.submit_parts(parts, armed, 5)
    assert [gate.is_queued for gate in gates] == [False, False]
    assert [gate.armed_for for gate in armed] == [None, None]
    read.end(None)
    assert not kit.lanes.poll()
    assert [gate.armed_for for gate in armed] == [5, 5]
    kit.lanes.compute.wait(gates[1])
    kit.op("step")()
    kit.device.drain()
    assert kit.ran == ["a", "b", "step"]


def test_parts_are_one_work_and_a_lane_that_closes_fails_them_all(kit: Kit) -> None:
    lane = kit.lanes.lane("small", max_pending=1)
    lane.wait(ThreadGate())
    gates = lane.submit_parts(*parts_of(kit, "a", "b"), 5)
    with pytest.raises(LaneFullError):
        lane.submit_parts(*parts_of(kit, "c"), 6)
    assert not lane.close(0.0)
    assert [type(gate.error) for gate in gates] == [LaneClosedError, LaneClosedError]
    with pytest.raises(LaneClosedError):
        lane.submit_parts(*parts_of(kit, "d"), 7)


def test_a_gate_that_is_armed_again_opens_later_and_never_earlier(kit: Kit) -> None:
    parts, armed = parts_of(kit, "a")
    (old,) = kit.load.submit_parts(parts, armed, 5)
    (new,) = kit.load.submit_parts([kit.op("b")], armed, 6)
    kit.lanes.compute.wait(old)
    kit.op("step")()
    while not old.query():
        assert kit.device.step()
    assert "a" in kit.ran
    kit.device.drain()
    assert new.query()
    assert kit.ran.index("a") < kit.ran.index("step")


# ---------------------------------------------------------------- at random


class Programme:
    """Random calls, and what has to have ended before each piece runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = FakeDevice(seed)
        self.lanes = lanes_of(self.device)
        self.own = [self.lanes.lane(name) for name in ("load", "store", "third")]
        self.files: list[ThreadGate] = []
        self.gates: list[Gate] = []
        self.before: dict[Gate, set[int]] = {}  # gate -> works that it stands for
        self.fails: dict[Gate, bool] = {}
        self.awaited: dict[CudaLane, tuple[set[int], set[ThreadGate]]] = {
            lane: (set(), set()) for lane in self.own
        }
        self.has_failed = dict.fromkeys(self.own, False)
        self.ran: set[int] = set()
        self.num_works = 0

    def submit(self, lane: CudaLane) -> None:
        gate = lane.submit(self._next(lane, fails := self._may_fail()))
        self._note(gate, set(self.awaited[lane][0]), fails=fails)

    def submit_parts(self, lane: CudaLane) -> None:
        fails = [self._may_fail() for _ in range(self.random.randint(1, 3))]
        parts, stands_for = [], []
        for one in fails:
            parts.append(self._next(lane, one))
            stands_for.append(set(self.awaited[lane][0]))
        armed = [self.lanes.graph_gate() for _ in fails]
        gates = lane.submit_parts(parts, armed, 7)
        for gate, works, one in zip(gates, stands_for, fails, strict=True):
            self._note(gate, works, fails=one)

    def _may_fail(self) -> bool:
        return self.random.random() < 0.2

    def _next(self, lane: CudaLane, fails: bool) -> Callable[[], None]:
        """A work, which counts as submitted."""
        works, files = self.awaited[lane]
        number, first, opened = self.num_works, set(works), set(files)
        self.num_works += 1

        def piece() -> None:
            assert first <= self.ran, "the order of waits"
            assert number not in self.ran, "once"
            self.ran.add(number)

        def work() -> None:
            assert all(gate.query() for gate in opened), "no stream waits for a file"
            self.device.queue(piece)
            if fails:
                boom()

        works.add(number)
        self.has_failed[lane] |= fails
        return work

    def record(self, lane: CudaLane) -> None:
        gate = lane.record()
        if gate not in self.before:
            fails, self.has_failed[lane] = self.has_failed[lane], False
            self._note(gate, set(self.awaited[lane][0]), fails=fails)

    def wait(self, lane: CudaLane) -> None:
        gate = self.random.choice([*self.gates, *self.files])
        works, files = self.awaited[lane]
        lane.wait(gate)
        if isinstance(gate, ThreadGate):
            files.add(gate)
        else:
            works |= self.before[gate]

    def step(self) -> None:
        """The steps' own stream."""
        works: set[int] = set()
        if self.gates and self.random.random() < 0.5:
            gate = self.random.choice(self.gates)
            if self.lanes.compute.wait(gate, 0.0):
                works = set(self.before[gate])
        self.device.queue(lambda: self._check(works))
        self._note(self.lanes.compute.record(), set(), fails=False)

    def _check(self, works: set[int]) -> None:
        assert works <= self.ran

    def _note(self, gate: Gate, works: set[int], *, fails: bool) -> None:
        self.gates.append(gate)
        self.before[gate], self.fails[gate] = works, fails

    def look(self) -> None:
        gate = self.random.choice(self.gates)
        if gate.query():
            self._check_ended(gate)
        else:
            assert gate.error is None

    def _check_ended(self, gate: Gate) -> None:
        assert self.before[gate] <= self.ran
        assert (gate.error is not None) == self.fails[gate]

    def go_on(self) -> None:
        lane = self.random.choice(self.own)
        match self.random.randrange(10):
            case 0 | 1:
                self.submit(lane)
            case 9:
                self.submit_parts(lane)
            case 2 if self.gates or self.files:
                self.wait(lane)
            case 3:
                self.record(lane)
            case 4:
                self.files.append(ThreadGate())
            case 5 if self.files:
                file = self.random.choice(self.files)
                if not file.query():
                    file.end(None)
            case 6:
                self.step()
            case 7 if self.gates:
                self.look()
            case _:
                self.device.step()

    def finish(self) -> None:
        for file in self.files:
            if not file.query():
                file.end(None)
        for gate in self.gates:
            assert gate.wait()
            self._check_ended(gate)
        assert not self.lanes.poll()
        assert self.ran == set(range(self.num_works))
        for lane in self.own:
            assert lane.query()
            assert lane.close(0.0)


@given(st.integers(0, 10**9), st.integers(1, 80))
@settings(max_examples=150, deadline=None)
def test_any_programme_keeps_every_order(seed: int, length: int) -> None:
    programme = Programme(seed)
    for _ in range(length):
        programme.go_on()
    programme.finish()
