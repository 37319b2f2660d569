"""A step's tokens go out first; what it leaves behind is applied a little later."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from connected import prompt_of, scripted_sides
from engine_kit import greedy, open_engine
from scheduling import Stepper, launched, make_scheduler

from interlace.connectors.conformance.script import Script
from interlace.connectors.conformance.scripted import ScriptedConnector
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.request import Request, RequestStatus


def test_until_it_is_settled_a_step_counts_as_in_flight() -> None:
    stepper = Stepper(make_scheduler(depth=1))
    scheduler, pool = stepper.scheduler, stepper.scheduler.kv_cache.pool
    request = stepper.add(prompt_of(9), max_tokens=1)
    output = launched(stepper)
    (update,) = scheduler.take_tokens(output, stepper.runner.execute(output))
    assert update.request is request
    assert request.is_finished
    assert scheduler.num_inflight_steps == 1
    assert pool.num_free_blocks < pool.num_usable_blocks, "they are held, though nobody asks"
    scheduler.settle()
    assert scheduler.num_inflight_steps == 0
    assert pool.num_free_blocks == pool.num_usable_blocks


def test_who_plans_or_resets_settles() -> None:
    stepper = Stepper(make_scheduler(depth=1), settles_late=True)
    stepper.add(prompt_of(9), max_tokens=1)
    launched(stepper)
    stepper.apply()
    assert stepper.scheduler.reset_prefix_cache()
    assert stepper.scheduler.num_inflight_steps == 0
    stepper.add(prompt_of(9), max_tokens=1)
    launched(stepper)
    stepper.apply()
    stepper.launch()
    assert stepper.scheduler.kv_cache.num_fenced_blocks == 0


def test_an_abort_in_between_takes_nothing_twice() -> None:
    stepper = Stepper(make_scheduler(depth=1), settles_late=True)
    request = stepper.add(prompt_of(9), max_tokens=5)
    launched(stepper)
    stepper.apply()
    stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    stepper.run()
    stepper.assert_idle()


class _Hears(ScriptedConnector):
    """Cannot bear to be told."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        raise ValueError("told")


def test_what_fails_when_it_is_settled_fails_each_time() -> None:
    sides = scripted_sides(Script(), kind=_Hears)
    stepper = Stepper(make_scheduler(connector=sides[0]), sides[1])
    stepper.add(prompt_of(9), max_tokens=5)
    output = launched(stepper)
    stepper.scheduler.take_tokens(
        output,
        dataclasses.replace(
            stepper.runner.execute(output), kv_connector_output=KVConnectorOutput()
        ),
    )
    for _ in range(2):
        with pytest.raises(ConnectorError, match="told"):
            stepper.scheduler.settle()


async def test_who_has_the_last_delta_may_reset_the_cache() -> None:
    async with open_engine(is_open=True) as it:
        await it.engine.complete([1, 2, 3, 4, 5])
        assert it.engine.reset_prefix_cache()
        assert it.engine.snapshot().idle


@pytest.mark.parametrize("depth", [1, 2])
async def test_who_has_the_last_delta_sees_all_of_it_counted(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as it:
        await it.engine.complete([1, 2, 3, 4, 5], greedy(4))
        snapshot = it.engine.snapshot()
        assert snapshot.idle
        assert snapshot.stats.num_generated_tokens == 4


class _Corrects(ScriptedConnector):
    """What it says at a request's end is changed by what is reported with the same step."""

    params: dict[str, Any]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        self.params = {"stored": True}
        return False, self.params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.params["stored"] = False


class _SaysAndHears(_Hears):
    """Has something to say to callers, too."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return False, {"stored": True}


def test_who_ends_a_request_is_not_told_of_what_fails_when_that_is_settled() -> None:
    """It is fatal, and so the loop's to hear: who aborts, or closes the engine, goes on."""
    sides = scripted_sides(Script(), kind=_SaysAndHears)
    stepper = Stepper(make_scheduler(connector=sides[0]), sides[1])
    request = stepper.add(prompt_of(9), max_tokens=5)
    output = launched(stepper)
    result = dataclasses.replace(
        stepper.runner.execute(output), kv_connector_output=KVConnectorOutput()
    )
    stepper.scheduler.take_tokens(output, result)
    stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    assert request.is_finished
    with pytest.raises(ConnectorError, match="told"):
        stepper.scheduler.settle()


@pytest.mark.parametrize("by_text", [False, True])
def test_what_is_said_to_a_caller_waits_for_the_reports(by_text: bool) -> None:
    """Whether the token ends the request, or a stop string in the text that it makes."""
    sides = scripted_sides(Script(), kind=_Corrects)
    stepper = Stepper(make_scheduler(connector=sides[0]), sides[1])
    request = stepper.add(prompt_of(9), max_tokens=5 if by_text else 1)
    output = launched(stepper)
    result = dataclasses.replace(
        stepper.runner.execute(output), kv_connector_output=KVConnectorOutput()
    )
    stepper.scheduler.take_tokens(output, result)
    if by_text:
        stepper.scheduler.finish_request(request, RequestStatus.FINISHED_STOPPED)
    assert request.response_kv_transfer_params == {"stored": False}
    assert stepper.scheduler.num_inflight_steps == 0


def test_who_has_a_token_finds_it_counted() -> None:
    stepper = Stepper(make_scheduler(), settles_late=True)
    stepper.add(prompt_of(9), max_tokens=1)
    launched(stepper)
    stepper.apply()
    assert stepper.scheduler.stats.num_generated_tokens == 1
    assert stepper.scheduler.num_inflight_steps == 1, "it is not settled"
