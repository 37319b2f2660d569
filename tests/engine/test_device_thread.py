"""The crossing to the device thread: order, cancellation, and errors that always arrive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from interlace.engine.device_thread import DeviceThread, finish_despite_cancel


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    device = DeviceThread()
    yield device
    device.close()


async def test_calls_run_in_order_on_one_thread(device: DeviceThread) -> None:
    # I7
    names: list[str] = []

    def call(number: int) -> int:
        names.append(threading.current_thread().name)
        return number

    futures = [device.submit(call, number) for number in range(20)]
    assert [await finish_despite_cancel(future) for future in futures] == list(range(20))
    assert set(names) == {"interlace-device_0"}


async def test_a_cancelled_wait_goes_on_until_the_work_has_ended(device: DeviceThread) -> None:
    # I8
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert gate.wait(30)
        ended.set()

    async def wait() -> None:
        await finish_despite_cancel(device.submit(work))

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        for _ in range(3):  # impatient callers change nothing
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
    assert task.cancelled()
    assert ended.is_set()


async def test_a_cancelled_wait_drops_the_works_own_error(device: DeviceThread) -> None:
    gate = threading.Event()

    def work() -> None:
        assert gate.wait(30)
        raise ValueError("nobody asks any more")

    async def wait() -> None:
        await finish_despite_cancel(device.submit(work))

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
    assert task.cancelled()


async def test_an_error_arrives_as_it_was_raised(device: DeviceThread) -> None:
    error = ValueError("why")

    def work() -> None:
        raise error

    with pytest.raises(ValueError, match="why") as caught:
        await finish_despite_cancel(device.submit(work))
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("next() of nothing"),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
async def test_errors_that_futures_treat_specially_arrive_as_ordinary_ones(
    device: DeviceThread, error: BaseException
) -> None:
    """FE04: such an error must neither be lost (its waiter hangs) nor pass for a cancellation."""

    def work() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        await finish_despite_cancel(device.submit(work))
    assert caught.value.__cause__ is error
    assert await finish_despite_cancel(device.submit(lambda: 5)) == 5


async def test_a_waiter_that_is_closed_after_a_cancellation_ends_quietly() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = finish_despite_cancel(future)
    waiter.send(None)
    waiter.throw(asyncio.CancelledError())  # now it waits on, with the cancellation to tell
    waiter.close()  # as when a loop is torn down by a second Ctrl-C
    future.set_result(None)
    await asyncio.sleep(0)
