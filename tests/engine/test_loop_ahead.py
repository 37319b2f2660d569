"""Runners whose device works by itself: steps are launched before older ones are waited for."""

from __future__ import annotations

import asyncio
import threading

import pytest
from connected import NOTHING, prompt_of, scripted_sides, warm
from engine_kit import BLOCK_SIZE, PATIENCE_S, GatedRunner, build_engine, greedy, until
from paged_oracle import answer

from interlace.connectors.conformance import Async, Rule, Script
from interlace.engine.errors import EngineDeadError
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import PendingStep, WorkerConnector
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput

PROMPT = [3, 1, 4, 1, 5]


class AheadRunner(GatedRunner):
    """Notes launches and waits; one of them may raise."""

    works_ahead = True

    def __init__(self, connector: WorkerConnector | None = None) -> None:
        super().__init__(is_open=True, connector=connector)
        self.calls: list[tuple[str, int]] = []
        self.failing: tuple[str, int] | None = None

    def _note(self, what: str, step_id: int) -> None:
        self.calls.append((what, step_id))
        if self.failing == (what, step_id):
            raise OSError("the device is gone")

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        self._note("launch", scheduler_output.step_id)
        output = self.execute(scheduler_output)

        def wait() -> ModelRunnerOutput:
            self._note("wait", scheduler_output.step_id)
            return output

        return wait


@pytest.mark.parametrize("depth", [1, 2])
async def test_as_many_steps_as_may_be_are_launched_before_one_is_waited_for(depth: int) -> None:
    runner = AheadRunner()
    async with asyncio.timeout(PATIENCE_S), build_engine(runner, depth=depth) as engine:
        done = await engine.complete(PROMPT, greedy(6))
    assert list(done.token_ids) == answer(PROMPT, 6)
    launches = [step for what, step in runner.calls if what == "launch"]
    waits = [step for what, step in runner.calls if what == "wait"]
    assert launches == waits == list(range(1, len(launches) + 1))
    for step in waits[: 6 - depth]:
        ahead = runner.calls[: runner.calls.index(("wait", step))]
        assert ("launch", step + depth - 1) in ahead
        assert ("launch", step + depth) not in ahead


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("what", ["launch", "wait"])
async def test_a_step_that_fails_ends_everyone(what: str, depth: int) -> None:
    runner = AheadRunner()
    runner.failing = (what, 3)
    async with asyncio.timeout(PATIENCE_S), build_engine(runner, depth=depth) as engine:
        with pytest.raises(EngineDeadError, match="OSError: the device is gone"):
            await engine.complete(PROMPT, greedy(6))
    assert runner.closed
    num_waited = sum(call[0] == "wait" for call in runner.calls)
    num_launched = sum(call[0] == "launch" for call in runner.calls)
    assert num_waited == num_launched - (what == "launch")  # nothing is abandoned


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_go_out_before_the_next_step_is_planned_if_the_device_has_another(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning may take long. A device that waits for it is served first."""
    order: list[str] = []
    schedule = Scheduler.schedule

    def noted(scheduler: Scheduler, **how: bool) -> SchedulerOutput | None:
        plan = schedule(scheduler, **how)
        if plan is not None:
            order.append("plan")
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    async with asyncio.timeout(PATIENCE_S), build_engine(AheadRunner(), depth=depth) as engine:
        async for out in engine.generate(PROMPT, greedy(6)):
            order += ["token"] * len(out.token_ids)
    # At depth 1 the second step is planned when the first has ended, and goes before its token; at
    # depth 2 it was planned with the first, and the third one comes after it.
    num_planned = [order[:i].count("plan") for i, what in enumerate(order) if what == "token"]
    assert num_planned == [2, 3, 4, 5, 6, 6]


async def test_news_are_asked_for_behind_the_last_step_and_when_that_has_ended() -> None:
    """A prompt whose front is computed while its back is loaded: nothing can be planned behind the
    front, and the load's end is what everybody waits for."""
    script = Script()
    warm(script, prompt_of(40), block_size=BLOCK_SIZE)
    load = Rule(answers=(Async(32),), compute_ends=(16,), load_delay=3, save=False)
    script.default = load
    scheduler_side, worker_side = scripted_sides(script, block_size=BLOCK_SIZE)
    num_planned: dict[int, int] = {}

    class Watching(AheadRunner):
        def _note(self, what: str, step_id: int) -> None:
            super()._note(what, step_id)
            if what == "wait":
                num_planned[step_id] = engine._scheduler.num_inflight_steps

    runner = Watching(worker_side)
    engine = build_engine(runner, depth=2, connector=scheduler_side, max_num_batched_tokens=16)
    async with asyncio.timeout(PATIENCE_S), engine:
        done = await engine.complete(prompt_of(36), greedy(3))
    assert list(done.token_ids) == answer(prompt_of(36), 3)
    computing = {one.step_id: one.total_num_scheduled_tokens > 0 for one in runner.executed}
    front = next(step for step, computes in computing.items() if computes)
    assert not computing[front + 1]
    assert num_planned[front] == 2
    asked = runner.calls.index(("launch", front + 1))
    assert runner.calls[asked - 1] == ("wait", front)
    launched = [step for what, step in runner.calls if what == "launch"]
    assert launched == [step for what, step in runner.calls if what == "wait"]


async def test_who_comes_while_an_empty_step_is_under_way_is_planned_at_once() -> None:
    """It takes nobody's turn at depth 2; at depth 1 there is none."""
    script = Script()
    warm(script, prompt_of(40), block_size=BLOCK_SIZE)
    script.rules["front"] = Rule(answers=(Async(32),), compute_ends=(16,), load_delay=3, save=False)
    script.default = NOTHING
    scheduler_side, worker_side = scripted_sides(script, block_size=BLOCK_SIZE)
    num_planned: list[int] = []

    class Holding(AheadRunner):
        def _note(self, what: str, step_id: int) -> None:
            super()._note(what, step_id)
            if what == "wait" and not num_planned:
                num_planned.append(engine._scheduler.num_inflight_steps)
                has_front.set()
                assert has_other.wait(PATIENCE_S)

    runner = Holding(worker_side)
    engine = build_engine(runner, depth=2, connector=scheduler_side, max_num_batched_tokens=16)
    has_front, has_other = threading.Event(), threading.Event()
    async with asyncio.timeout(PATIENCE_S), engine, asyncio.TaskGroup() as tasks:
        front = tasks.create_task(engine.complete(prompt_of(36), greedy(3), request_id="front"))
        await asyncio.to_thread(has_front.wait, PATIENCE_S)
        other = tasks.create_task(engine.complete(PROMPT, greedy(3), request_id="other"))
        await until(lambda: engine._scheduler.num_inflight_steps == 3)
        has_other.set()
    assert list(front.result().token_ids) == answer(prompt_of(36), 3)
    assert list(other.result().token_ids) == answer(PROMPT, 3)
    assert num_planned == [2]
