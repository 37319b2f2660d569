"""ExampleConnector on lanes that a seed drives: right KV in every order, and hangs that end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_engine import ExampleEngine, example_config, folders
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.reading import MAX_HUNG_LANES, Reader, Reading
from interlace.engine.request import Request, RequestStatus
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import Policy, VirtualLanes

POLICIES: list[Policy] = [
    "seed",
    "eager",
    "lazy",
    ("index", "load", "store"),
    ("store", "load", "index"),
]
TIMELESS: dict[str, Any] = {"refresh_s": 86_400.0, "deadline_s": 60.0}
PROMPT = list(range(17))


class Story:
    """Random traffic by an engine's rules, with every finished request checked."""

    def __init__(self, root: Path, seed: int, lanes: VirtualLanes, **options: Any) -> None:
        self.source = random.Random(seed)
        self.engine = ExampleEngine(example_config(root, lanes=lanes, **TIMELESS, **options))
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # preempted
        self.num_external = 0
        lanes.on_before_work = self.look
        lanes.on_after_work = lambda label, _: self.compare(label)

    def look(self, _: str) -> None:
        self.before = [layer.clone() for pages in self.engine.all_pages for layer in pages.values()]

    def compare(self, label: str) -> None:
        """No lane touches pages."""
        after = [layer for pages in self.engine.all_pages for layer in pages.values()]
        assert all(map(torch.equal, self.before, after)), label

    def play(self, length: int) -> None:
        with self.engine:
            for _ in range(length):
                self.source.choice([self.begin, self.go_on, self.go_on, self.preempt, self.end])()
            while self.running or self.waiting:
                self.go_on()
                self.end()
            self.engine.settle()
            assert len(self.engine.free) == 255, "nothing is held"
            assert not self.engine.scheduler._scheduler._requests

    def begin(self) -> None:
        engine, source = self.engine, self.source
        if self.waiting:
            request = self.waiting.pop()
        elif len(self.running) < 3:
            prefix = [source.randrange(2)] * source.choice([4, 8])
            request = engine.request([*prefix, *range(source.randrange(1, 12))])
        else:
            return
        self.num_external += engine.admit(request)
        if engine.scheduler.options.load_async and engine.num_computed[request.request_id]:
            if not request.num_preemptions and source.random() < 0.3:
                self.abort_while_it_loads(request)
                return
            engine.received = [one for one in engine.received if one != request.request_id]
            engine.receive(request)
        self.running.append(request)
        rest = request.num_tokens - engine.num_computed[request.request_id]
        engine.step({request: source.randint(1, rest)})  # a load within a step is of this one

    def abort_while_it_loads(self, request: Request) -> None:
        """Its blocks stay until its load has ended."""
        blocks, request.blocks = request.blocks, list(request.blocks)
        ids = [block.block_id for block in blocks]
        free = list(self.engine.free)
        self.engine.step()
        self.engine._new.remove(request)
        request.status = RequestStatus.FINISHED_ABORTED
        is_held, _ = self.engine.scheduler.request_finished(request, ids)
        assert not is_held
        self.engine.until(lambda: request.request_id in self.engine.received)
        assert set(self.engine.free) >= set(free)
        self.engine.release(request)

    def go_on(self) -> None:
        engine = self.engine
        work = {}
        for request in self.running:
            rest = request.num_tokens - engine.num_computed[request.request_id]
            if rest == 0:
                request.append_output(self.source.randrange(100))
                rest = 1
            work[request] = self.source.randint(1, rest)
        engine.step(work)

    def preempt(self) -> None:
        if self.running and not self.waiting:
            request = self.running.pop(0)
            self.engine.preempt(request)
            self.engine.step(preempted=[request])
            self.waiting.append(request)

    def end(self) -> None:
        if self.waiting and not self.running:
            self.begin()
        if self.running:
            request = self.running.pop(self.source.randrange(len(self.running)))
            while rest := request.num_tokens - self.engine.num_computed[request.request_id]:
                self.engine.step({request: rest})
            self.engine.check(request)
            self.engine.finish(request)


@given(
    seed=st.integers(0, 2**16),
    policy=st.sampled_from(POLICIES),
    load_async=st.booleans(),
    num_workers=st.sampled_from([1, 1, 2]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_back_is_right_in_every_order(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    policy: Policy,
    load_async: bool,
    num_workers: int,
) -> None:
    root = tmp_path_factory.mktemp("kv")
    for day in range(2):
        lanes = VirtualLanes(seed + day, policy)
        options = {"load_async": load_async, "num_workers": num_workers}
        story = Story(root, seed + day, lanes, **options)
        story.play(14)
        assert not lanes.pending, "nothing is left on any lane"
        counters = [worker.counters for worker in story.engine.workers]
        assert not any(one.blocks_failed or one.saves_dropped_error for one in counters)
    tmp = next(root.iterdir()) / "tmp"
    assert not list(tmp.iterdir())


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_same_seed_gives_the_same_trace_with_a_whole_connector(
    tmp_path: Path, policy: Policy
) -> None:
    def two_days(root: Path) -> list[str]:
        trace: list[str] = []
        for day in range(2):
            lanes = VirtualLanes(11 + day, policy)
            story = Story(root, 5, lanes, load_async=True)
            story.play(20)
            trace += lanes.trace
        assert story.num_external
        return trace

    trace = two_days(tmp_path / "one")
    assert trace == two_days(tmp_path / "other")
    assert {label.split("#")[0] for label in trace} == {"index", "load-2", "store"}


def test_lazy_lanes_hold_saves_back_until_somebody_needs_them(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1000)
    with ExampleEngine(example_config(tmp_path, lanes=lanes, **TIMELESS)) as engine:
        lanes.drain()
        request = engine.request(PROMPT)
        engine.admit(request)
        engine.step({request: 17})
        assert engine.finish(request)
        for _ in range(5):
            engine.step()
        assert not folders(tmp_path)
        assert lanes.pending
        lanes.drain()
        engine.settle()
        assert len(folders(tmp_path)) == 1


# ---------------------------------------------------------------- hangs


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While the event is not set, reads of layers hang."""
    let_go, read_layer = threading.Event(), KVFolders.read_layer

    def hang(*arguments: Any) -> Any:
        assert let_go.wait(60)
        return read_layer(*arguments)

    monkeypatch.setattr(KVFolders, "read_layer", hang)
    yield let_go
    let_go.set()


def wait_until_idle(reader: Reader) -> None:
    waiter = threading.Event()
    for _ in range(4000):
        if not reader.is_busy:
            return
        waiter.wait(0.005)
    raise AssertionError("the readers never end")


def hangs(reader: Reader) -> bool:
    return reader.hangs


class Hands:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_hung_lane_is_given_up_and_so_many_of_them_are_the_last() -> None:
    clock, let_go, begun = Hands(), threading.Event(), threading.Semaphore(0)
    reader = Reader(ThreadLanes(), "load", deadline_s=1.0, clock=clock)

    def hang(_: object) -> str:
        begun.release()
        assert let_go.wait(60)
        return "late"

    readings: list[tuple[Reading[str], Reading[str] | None]] = []
    for _ in range(MAX_HUNG_LANES + 1):
        reading = reader.ask(hang)
        assert reading is not None
        behind = reader.ask(lambda _: "never")
        assert begun.acquire(timeout=60)
        assert not hangs(reader)
        clock.now += 1.5
        assert hangs(reader)
        assert not reader.wait(reading)
        readings.append((reading, behind))
    assert reader.ask(lambda _: "no lane is left") is None
    assert not any(reading.is_done for reading, _ in readings)
    for _, behind in readings[:-1]:
        assert behind is not None
        assert behind.wait(20), "it was queued on a lane that was given up"
        assert behind.take_result() is None
    let_go.set()
    wait_until_idle(reader)
    assert readings[0][0].take_result() == "late"
    good = reader.ask(lambda _: "good")
    assert good is not None
    assert reader.wait(good)
    assert good.take_result() == "good"
    reader.close()


def test_a_read_that_beats_may_take_longer_than_the_deadline() -> None:
    clock, step, done = Hands(), threading.Semaphore(0), threading.Semaphore(0)
    reader = Reader(ThreadLanes(), "load", deadline_s=1.0, clock=clock)

    def slow(beat: Any) -> str:
        for _ in range(5):
            assert step.acquire(timeout=60)
            beat()
            done.release()
        return "slow"

    reading = reader.ask(slow)
    behind = reader.ask(lambda _: "behind")
    assert reading is not None
    assert behind is not None
    for _ in range(5):
        clock.now += 0.9
        assert not reader.hangs
        step.release()
        assert done.acquire(timeout=60)
    assert reader.wait(behind), "what waits behind it has not hung either"
    assert (reading.take_result(), behind.take_result()) == ("slow", "behind")
    reader.close()


def test_a_read_that_raises_is_logged_and_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(VirtualLanes(0), "load", deadline_s=1.0)

    def bad(_: object) -> str:
        raise RuntimeError("boom")

    readings = [reader.ask(bad), reader.ask(lambda _: "good")]
    assert [one.wait(1.0) and one.take_result() for one in readings if one] == [None, "good"]
    (record,) = caplog.records
    assert "Reading stored KV failed" in record.getMessage()
    reader.close()


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_b62_loads_go_on_on_a_fresh_lane_and_fail_at_once_when_all_hang(
    tmp_path: Path, hanging: threading.Event, load_async: bool
) -> None:
    hanging.set()
    with ExampleEngine(example_config(tmp_path)) as engine:
        engine.run(PROMPT)
    hanging.clear()
    config = example_config(tmp_path, load_async=load_async, deadline_s=0.05)
    with ExampleEngine(config) as engine:
        worker = engine.worker._worker
        loads = worker.background_loads if load_async else worker.step_loads
        for number in range(MAX_HUNG_LANES + 3):
            request = engine.request([*PROMPT, number])
            engine.invalid.clear()
            engine.received.clear()
            assert engine.admit(request) == 16
            if load_async:
                engine.receive(request)
            while rest := request.num_tokens - engine.num_computed[request.request_id]:
                engine.step({request: rest})
            assert engine.invalid == {block.block_id for block in request.blocks[:4]}
            engine.check(request)
            engine.finish(request)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("interlace-lane-load") == MAX_HUNG_LANES + 1, "there is a bound"
        assert loads._reader.ask(lambda _: None) is None
        hanging.set()
        wait_until_idle(loads._reader)
        engine.settle()
        for pages in engine.pages.values():
            pages[engine.free] = 255
        before = {name: pages.clone() for name, pages in engine.pages.items()}
        engine.step()
        assert all(torch.equal(before[n], engine.pages[n]) for n in before), "late rows go nowhere"
        engine.invalid.clear()
        engine.received.clear()
        assert engine.run([*PROMPT, 99]) == 16
        assert not engine.invalid
