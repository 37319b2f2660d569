"""Several transfers at once, in whatever order their lanes get on."""

from __future__ import annotations

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage

_SEEDS = 5


def _any_order(stage: Stage) -> None:
    """Loads of different lengths and saves are held back, and then end in one order and in the
    other; and in some that a seed chooses."""
    _in_seeded_order(stage, 0)
    if not stage.bench.lane_names:
        raise NotJudged("it uses no lanes, so its transfers have one order")
    names = tuple(sorted(stage.bench.lane_names))
    for is_reversed in (False, True):
        shape = {"lane_policy": names[::-1] if is_reversed else names}
        with stage.engine(**shape) as engine:
            engine.lanes.newest_first = is_reversed
            _mix(stage, engine, is_held_back=True)
    for number in range(1, _SEEDS):
        _in_seeded_order(stage, number)


def _in_seeded_order(stage: Stage, number: int) -> None:
    seed = 100 + stage.variant.lane_seed + number
    with stage.engine(lane_policy="seed", lane_seed=seed) as engine:
        _mix(stage, engine, is_held_back=False)


def _mix(stage: Stage, engine: Harness, *, is_held_back: bool) -> None:
    stored = [stage.prompt(num_blocks, 1) for num_blocks in (3, 1, 2, 1)]
    for prompt in stored:
        stage.store(engine, prompt)
    engine.lanes.holds_back = is_held_back
    for number, prompt in enumerate(stored):
        engine.add(f"load{number}", prompt + stage.prompt(1), max_tokens=3)
        engine.add(f"save{number}", stage.prompt(1, 1), max_tokens=3)
        engine.steps(1)
    engine.lanes.holds_back = False
    engine.run()


SCENARIOS = (
    Scenario(
        "transfers-in-any-order",
        _any_order,
        frozenset(
            (
                "loaded-kv-right",
                "layer-loads-complete",
                "loads-reported-when-done",
                "loads-write-only-their-blocks",
                "saves-visible-when-whole",
                "saves-fenced",
            )
        ),
    ),
)
