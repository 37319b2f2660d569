"""Loads from the back, held back for long enough that the hole before them is open while the front
is computed, a few tokens a step, and while the request is preempted or aborted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage
from interlace.engine.request import Request

_BLOCKS = 9
"""Of a prompt that is stored; one token more is computed."""
_POOL = 14
"""Blocks: room for one such prompt, and a little more."""
_PLAYS, _HOLES = "plays of both ends", "open holes"
"""Evidence: of all runs of a check."""
_WHY_NOT = "it never loaded from the back"


def _preempted(stage: Stage) -> None:
    """The two ends meet; then a request grows and takes the blocks away, while the front is being
    computed, or when it waits for the back. The same prompt comes again each time."""
    with _engine(stage) as engine:
        _meet(stage, engine)
        num_preempted = sum(_take_blocks(stage, engine, head_start) for head_start in (2, 10))
    stage.need_right_kv()
    if not num_preempted:
        raise NotJudged("nothing was preempted while it was loaded from the back")


def _aborted(stage: Stage) -> None:
    """A request is aborted when so many steps have computed a part of its front, or after a step
    was planned that preempts it; others come at once for the blocks."""
    with _engine(stage) as engine:
        for num_steps in (2, 9):
            _abort(stage, engine, num_steps)
        _abort_preempted(stage, engine)
    stage.need_right_kv()


@contextmanager
def _engine(stage: Stage) -> Iterator[Harness]:
    """One whose steps compute less than a block, if there is something to see in it.

    What runs eagerly cannot be held back, so lanes run by a seed then. Raises: `NotJudged`.
    """
    seen = stage.bench.evidence
    if seen[_PLAYS] and not seen[_HOLES]:
        raise NotJudged(_WHY_NOT)
    seen[_PLAYS] += 1
    policy = stage.variant.lane_policy
    with stage.engine(
        num_blocks=_POOL,
        max_num_batched_tokens=max(1, stage.block_size - 1),
        lane_policy="seed" if policy == "eager" else policy,
    ) as engine:
        if engine.scheduler.max_total_tokens <= (_BLOCKS + 2) * stage.block_size:
            raise NotJudged(f"the engine has no room for prompts of {_BLOCKS} blocks")
        stage.prompt(0, 1)  # other prompts than those of the property's other scenario
        yield engine


def _meet(stage: Stage, engine: Harness) -> None:
    """A hole is open for a while, and is closed; a part of the prompt is asked for meanwhile."""
    prompt = _stored(stage, engine)
    _open(stage, engine, "meets", prompt, 4)
    engine.add("head", prompt[: 2 * stage.block_size + 1], max_tokens=2)
    engine.steps(8)
    _let_go(stage, engine)
    _again(stage, engine, "meets", prompt)


def _take_blocks(stage: Stage, engine: Harness, head_start: int) -> bool:
    """Whether a request that has grown for so many steps before took the blocks of an open hole."""
    name, prompt = f"yields{head_start}", _stored(stage, engine)
    grows = _grow(stage, engine, f"grows{head_start}", head_start)
    loads = _open(stage, engine, name, prompt, 1)
    was_open = False
    while not (loads.num_preemptions or grows.is_finished or loads.is_finished):
        was_open = loads.hole_end is not None
        if not engine.step():
            break
    engine.steps(2)  # what was handed on is in use, and the lanes still wait
    _let_go(stage, engine)
    _again(stage, engine, name, prompt)
    return was_open and loads.num_preemptions > 0


def _abort(stage: Stage, engine: Harness, num_steps: int) -> None:
    name, prompt = f"goes{num_steps}", _stored(stage, engine)
    victim = _open(stage, engine, name, prompt, num_steps)
    engine.abort(victim)
    for number in range(2):
        engine.add(f"next{number}-{name}", stage.prompt(3, number), max_tokens=4)
    engine.steps(6)
    _let_go(stage, engine)
    _again(stage, engine, name, prompt)


def _abort_preempted(stage: Stage, engine: Harness) -> None:
    """The step that tells of the preemption is planned, and not executed, when the request ends."""
    prompt = _stored(stage, engine)
    grows = _grow(stage, engine, "grows", 6)
    victim = _open(stage, engine, "taken", prompt, 1)
    while not (grows.is_finished or victim.is_finished):
        engine.plan()
        if victim.num_preemptions:
            engine.abort(victim)
            break
        if not engine.step():
            break
    engine.steps(2)
    _let_go(stage, engine)
    _again(stage, engine, "taken", prompt)


def _stored(stage: Stage, engine: Harness) -> list[int]:
    prompt = stage.prompt(_BLOCKS, 1)
    stage.store(engine, prompt)
    return prompt


def _grow(stage: Stage, engine: Harness, name: str, num_steps: int) -> Request:
    """A request that comes to need more than a stored prompt leaves, after so many of its steps."""
    size = stage.block_size
    request = engine.add(name, stage.prompt(1, 1), max_tokens=(_POOL - _BLOCKS) * size)
    engine.steps(num_steps)
    return request


def _open(stage: Stage, engine: Harness, name: str, prompt: list[int], num_steps: int) -> Request:
    """A request, after so many steps in which no lane gets on by itself.

    Raises: `NotJudged` if there was no hole in any such request.
    """
    engine.lanes.holds_back = True
    request = engine.add(name, prompt, max_tokens=3)
    for _ in range(num_steps):
        engine.steps(1)
        stage.bench.evidence[_HOLES] += request.hole_end is not None
    if not stage.bench.evidence[_HOLES]:
        raise NotJudged(_WHY_NOT)
    return request


def _let_go(stage: Stage, engine: Harness) -> None:
    """The lanes get on, to the end of all requests."""
    engine.lanes.holds_back = False
    engine.run()
    stage.forget_local(engine)


def _again(stage: Stage, engine: Harness, name: str, prompt: list[int]) -> None:
    engine.add(f"again-{name}", prompt, max_tokens=2)
    engine.run()
    stage.forget_local(engine)


_ADOPTS = frozenset(("loaded-kv-right",))
SCENARIOS = (
    Scenario("tokens-preempted", _preempted, _ADOPTS, in_many_orders=True),
    Scenario("aborted-in-every-state", _aborted, _ADOPTS),
)
