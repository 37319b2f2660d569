"""Aborts in every state that a request can be in."""

from __future__ import annotations

from collections.abc import Callable

from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage
from interlace.engine.request import Request, RequestStatus

_STEPS = 6
"""After so many steps each request was in all of its states."""


def _in_every_state(stage: Stage) -> None:
    """A request is aborted after so many steps; another one shares a part of its prefix, and
    others come at once for the blocks."""
    size = stage.block_size
    with stage.engine(num_blocks=14, max_num_batched_tokens=3 * size) as engine:
        for moment in range(_STEPS):
            _abort_at(stage, engine, f"after{moment}", _after(moment))
        _abort_at(stage, engine, "planned", _planned)
        _abort_at(stage, engine, "executed", _executed)
    with stage.engine(num_blocks=14) as engine:
        for moment in range(_STEPS):
            _come_again(stage, engine, moment)
    with stage.engine(num_blocks=14, max_num_seqs=1) as engine:
        _abort_at(stage, engine, "queued", _after(1))
    with stage.engine(num_blocks=9, max_num_batched_tokens=4 * size) as engine:
        _abort_preempted(stage, engine)
    stage.need_right_kv()


def _abort_at(stage: Stage, engine: Harness, name: str, until: Callable[[Harness], None]) -> None:
    prompt = stage.prompt(4, 2)
    stage.store(engine, prompt)
    head = prompt[: 2 * stage.block_size]
    engine.add(f"stays-{name}", head + stage.prompt(0, 3), max_tokens=4)
    victim = engine.add(f"goes-{name}", prompt, max_tokens=8)
    until(engine)
    engine.abort(victim)
    for number in range(2):
        engine.add(f"next{number}-{name}", stage.prompt(3, number), max_tokens=4)
    engine.run()
    stage.forget_local(engine)


def _come_again(stage: Stage, engine: Harness, moment: int) -> None:
    """An aborted request's id is used again before the next step is planned: that step tells of the
    end of one and of the other's beginning. Another prompt, the same one, or no blocks at all."""
    prompt = stage.prompt(3, 1)
    stage.store(engine, prompt)
    name = f"twice{moment}"
    first = engine.add(name, prompt, max_tokens=8)
    engine.steps(moment)
    engine.abort(first)
    if not engine.scheduler.knows(first.request_id):
        engine.add(name, stage.prompt(2, 2) if moment % 2 else prompt, max_tokens=4)
    engine.run()
    stage.forget_local(engine)


def _after(num_steps: int) -> Callable[[Harness], None]:
    return lambda engine: engine.steps(num_steps)


def _planned(engine: Harness) -> None:
    """A step with the request is planned, and not executed."""
    engine.plan()


def _executed(engine: Harness) -> None:
    """A step with the request was executed, and is not applied."""
    if engine.plan() is not None:
        engine.execute()


def _abort_preempted(stage: Stage, engine: Harness) -> None:
    """Requests grow until one of them is preempted, which is then aborted."""
    grown = [
        engine.add(f"grows{place}", stage.prompt(2, place), max_tokens=3 * stage.block_size)
        for place in range(3)
    ]
    while not any(map(_is_preempted, grown)) and engine.step():
        pass
    for request in filter(_is_preempted, grown):
        engine.abort(request)
    engine.run()


def _is_preempted(request: Request) -> bool:
    return request.status is RequestStatus.PREEMPTED


SCENARIOS = (
    Scenario(
        "aborted-in-every-state",
        _in_every_state,
        frozenset(("loaded-kv-right",)),
        in_many_orders=True,
    ),
)
