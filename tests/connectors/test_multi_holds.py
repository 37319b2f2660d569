"""When a MultiConnector lets a request's blocks go: when every child that asked is done."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from connected import NOTHING, assert_right, prompt_of, warm
from hypothesis import given
from hypothesis import strategies as st
from multi_kit import MultiSides, multi_stepper
from scheduling import launched

from interlace.connectors.conformance import Async, Rule, Script
from interlace.connectors.multi_ledger import ReportLedger
from interlace.connectors.multi_messages import Hold
from interlace.engine.request import Request, RequestStatus

depths = pytest.mark.parametrize("depth", [1, 2])
PROMPT = prompt_of(17)


def holding(delay: int | None, **more: object) -> Script:
    """A child with nothing to load, which holds each request for so many steps."""
    return Script(default=Rule(answers=((0, False),), hold=True, send_delay=delay, **more))  # type: ignore[arg-type]


def ended(sides: MultiSides) -> Request:
    """A request that has just ended, with nothing in flight."""
    request = sides.stepper.add(PROMPT, request_id="r", max_tokens=1)
    while not request.is_finished:
        sides.stepper.step()
    while sides.stepper.inflight:
        sides.stepper.apply()
    return request


def held_for(sides: MultiSides) -> int:
    """Empty steps until the blocks are free."""
    steps = 0
    while sides.stepper.scheduler.num_held_requests:
        assert sides.stepper.launch() is not None
        sides.stepper.apply()
        steps += 1
        assert steps < 50, "the blocks never return"
    return steps


@pytest.mark.parametrize("delays", [(0, 6), (6, 0), (3, 6), (6, 6)])
def test_b51_blocks_stay_until_every_child_has_reported(delays: tuple[int, int]) -> None:
    sides = multi_stepper(holding(delays[0]), holding(delays[1]), Script(default=NOTHING))
    ended(sides)
    assert held_for(sides) == 7, "the step that tells of the end, and six more"
    sides.assert_idle()


def test_b51_second_reports_of_one_child_do_not_count_for_another() -> None:
    sides = multi_stepper(holding(0, repeat_sending=4), holding(6), holding(2, repeat_sending=9))
    ended(sides)
    assert held_for(sides) == 7
    sides.stepper.run()
    assert sides.worker.num_stray_reports > 4
    assert sides.stepper.scheduler.stats.num_stray_reports == 0, "the engine hears of none"


def test_nobody_asked_so_nothing_is_held() -> None:
    sides = multi_stepper(Script(default=NOTHING), Script(default=NOTHING))
    ended(sides)
    assert sides.stepper.scheduler.num_held_requests == 0


def parked(sides: MultiSides, request_id: str = "r") -> Request:
    """A request whose asynchronous load has begun on the device."""
    request = sides.stepper.add(PROMPT, request_id=request_id)
    launched(sides.stepper)
    sides.stepper.apply()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


@pytest.mark.parametrize("delay", [0, 2, 9])
def test_an_abort_during_a_load_waits_for_the_load(delay: int) -> None:
    """The other child, which would hold it, is told of an end without blocks."""
    loader = Script(default=Rule(answers=(Async(),), load_delay=5))
    saver = holding(delay)
    warm(loader, PROMPT)
    sides = multi_stepper(loader, saver)
    request = parked(sides)
    sides.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    assert saver.calls[-1].summary == "r blocks=0"
    assert loader.calls[-1].summary == "r blocks=4"
    assert held_for(sides) == 5
    assert saver.store == {}, "nothing of it was there to be saved"
    sides.stepper.run()
    sides.assert_idle()


class HoldsWithoutBlocks:
    """Makes a child hold a request also if it has no blocks: something of it is still open."""

    def __init__(self, sides: MultiSides, index: int) -> None:
        self.child = sides.scheduler.children[index]
        self.worker = sides.worker.children[index]
        self._request_finished = self.child.request_finished
        self.child.request_finished = self.request_finished  # type: ignore[method-assign]
        self._get_finished = self.worker.get_finished
        self.worker.get_finished = self.get_finished  # type: ignore[method-assign]
        self.done: set[str] = set()
        self.received: set[str] = set()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._request_finished(request, block_ids)
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._get_finished(finished_req_ids)
        done, self.done = self.done, set()
        ended, self.received = self.received, set()
        return (sent or set()) | done, (received or set()) | ended


@pytest.mark.parametrize("sent_after", [0, 2, 5, 8])
def test_an_aborted_load_and_a_held_request_are_one_report(sent_after: int) -> None:
    """Either report would free the blocks: the engine gets one, when both are done."""
    loader = Script(default=Rule(answers=(Async(),), load_delay=5))
    warm(loader, PROMPT)
    sides = multi_stepper(loader, Script(default=NOTHING))
    other = HoldsWithoutBlocks(sides, 1)
    request = parked(sides)
    sides.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    steps = 0
    while sides.stepper.scheduler.num_held_requests:
        assert steps < 20
        launched(sides.stepper)
        if steps == sent_after:
            other.done = {"r"}
        sides.stepper.apply()
        steps += 1
    assert steps == max(5, sent_after + 1)
    assert sides.worker.num_stray_reports == 0
    assert sides.stepper.scheduler.stats.num_stray_reports == 0
    sides.assert_idle()


def test_a_load_that_was_reported_before_its_abort_was_heard_of() -> None:
    """Its end is in flight when the request ends: that frees the blocks, and once only."""
    loader = Script(default=Rule(answers=(Async(),), load_delay=1))
    warm(loader, PROMPT)
    sides = multi_stepper(loader, Script(default=NOTHING))
    other = HoldsWithoutBlocks(sides, 1)
    request = parked(sides)
    launched(sides.stepper)  # reports the load
    sides.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    sides.stepper.apply()
    assert sides.stepper.scheduler.num_held_requests == 0
    launched(sides.stepper)
    other.done = {"r"}
    sides.stepper.apply()
    assert sides.worker.num_stray_reports == 0
    sides.assert_idle()


def test_a_child_may_hold_what_it_loads_and_report_once() -> None:
    for kind in ("sent", "received"):
        loader = Script(default=Rule(answers=(Async(),), load_delay=None))
        warm(loader, PROMPT)
        sides = multi_stepper(loader, Script(default=NOTHING))
        child = HoldsWithoutBlocks(sides, 0)
        request = parked(sides)
        sides.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
        launched(sides.stepper)
        sides.stepper.apply()
        assert sides.stepper.scheduler.num_held_requests == 1
        if kind == "sent":
            child.done = {"r"}
        else:
            child.received = {"r"}
        launched(sides.stepper)
        sides.stepper.apply()
        assert sides.stepper.scheduler.num_held_requests == 0
        assert sides.scheduler.is_idle
        assert sides.worker.is_idle


@depths
def test_ids_are_shown_to_whom_they_concern(depth: int) -> None:
    loader = Script(default=Rule(answers=(Async(),), load_delay=2, hold=True, send_delay=1))
    saver = holding(3)
    silent = Script(default=NOTHING)
    warm(loader, PROMPT)
    sides = multi_stepper(loader, saver, silent, depth=depth)
    loader.calls.clear()
    request = sides.stepper.add(PROMPT, request_id="r")
    sides.stepper.run()
    assert_right(sides.stepper, request)

    def shown(script: Script) -> list[str]:
        return [
            call.summary
            for call in script.calls
            if call.hook == "update_connector_output" and call.summary
        ]

    assert shown(loader) == ["received=['r']", "sent=['r']"]
    assert shown(saver) == ["sent=['r']"]
    assert shown(silent) == []
    sides.assert_idle()


# --- the ledger alone ----------------------------------------------------------------------------


@given(data=st.data(), num_ranks=st.integers(1, 3))
def test_the_engine_gets_one_report_of_one_kind_from_every_rank(
    data: st.DataObject, num_ranks: int
) -> None:
    """Children report at any time in any order, also again; a rank may have told of the load when
    the end is heard of, and another not yet. All tell the same, once, and none too early."""
    loader = data.draw(st.none() | st.integers(0, 2), label="loader")
    holders = frozenset(data.draw(st.sets(st.integers(0, 2), min_size=1), label="holders"))
    hold = Hold(holders, loader)
    told: list[list[str]] = []
    for _ in range(num_ranks):
        told.append(list(_rank(data, hold)))
        assert len(told[-1]) == 1
    assert {kind for (kind,) in told} == {"sent" if loader is None else "received"}


def _rank(data: st.DataObject, hold: Hold) -> Iterable[str]:
    """Kinds of reports that one rank gives, until every child has done its part."""
    ledger = ReportLedger()
    todo = [("sent", child) for child in hold.children if child != hold.loader]
    if hold.loader is not None:
        ledger.begin_step({"r": hold.loader}, {})
        todo.append(("received", hold.loader))
        if data.draw(st.booleans(), label="load reported before"):
            ledger.receive(hold.loader, {"r"})
            todo.pop()
            yield from _taken(ledger)
    ledger.begin_step({}, {"r": hold})
    yield from _taken(ledger)
    for kind, child in data.draw(st.permutations(todo), label="order"):
        report = ledger.send if kind == "sent" else ledger.receive
        for _ in range(data.draw(st.integers(1, 2), label="times")):
            report(child, {"r"})
        yield from _taken(ledger)
    assert ledger.is_idle


def _taken(ledger: ReportLedger) -> Iterable[str]:
    for kind, ids in zip(("sent", "received"), ledger.take(), strict=True):
        yield from [kind] * len(ids)
