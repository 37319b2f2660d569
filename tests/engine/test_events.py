"""The bus: every reader its own queue, bounded; nothing is recorded while nobody reads."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import pytest

from interlace.engine import events
from interlace.engine.events import Event, EventBus, StepLaunched


def launched(number: int) -> StepLaunched:
    return StepLaunched(float(number), number)


def all_events() -> list[type[Event]]:
    return [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    ]


def test_names_are_fixed() -> None:
    assert {kind.name for kind in all_events()} == {
        "request.queued",
        "request.scheduled",
        "request.first_token",
        "request.finished",
        "request.preempted",
        "step.scheduled",
        "step.launched",
        "step.done",
        "block.stored",
        "block.removed",
        "block.cleared",
        "step.timed",
        "layer.compute",
        "layer.load",
        "layer.save",
        "gate.failed",
        "timings.dropped",
    }


def test_events_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        launched(1).step_id = 2  # type: ignore[misc]


async def test_each_reader_gets_everything_from_its_start_on() -> None:
    bus = EventBus()
    early = bus.subscribe()
    bus.emit(launched(1))
    late = bus.subscribe()
    bus.emit(launched(2))
    bus.close()
    assert [e async for e in early] == [launched(1), launched(2)]
    assert [e async for e in late] == [launched(2)]


async def test_a_bounded_reader_drops_the_oldest_and_counts() -> None:
    bus = EventBus()
    stream = bus.subscribe(max_pending=2)
    for number in range(5):
        bus.emit(launched(number))
    assert stream.num_dropped == 3
    assert await anext(stream) == launched(3)
    bus.emit(launched(5))
    assert stream.num_dropped == 3, "there was room again"
    stream.close()
    assert [e async for e in stream] == [launched(4), launched(5)]


async def test_cancelling_a_waiting_reader_loses_nothing() -> None:
    bus = EventBus()
    stream = bus.subscribe()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    bus.emit(launched(1))
    assert await anext(stream) == launched(1)


async def test_a_waiting_reader_wakes_when_the_bus_closes() -> None:
    bus = EventBus()
    stream = bus.subscribe()

    async def read() -> list[Event]:
        return [event async for event in stream]

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(read())
        await asyncio.sleep(0)
        bus.close()
    assert task.result() == []


async def test_nothing_is_recorded_once_nobody_reads() -> None:
    bus = EventBus()
    active = [bus.active]
    stream = bus.subscribe()
    other = bus.subscribe()
    active.append(bus.active)
    other.close()
    other.close()
    active.append(bus.active)
    del stream
    gc.collect()
    active.append(bus.active)
    assert active == [False, True, True, False], "a dropped reader leaves by itself"
