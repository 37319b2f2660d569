"""Several transfers at once, in whatever order their lanes get on."""

from __future__ import annotations

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.stage import Scenario, Stage, Variant

_SEEDS = 5


def _any_order(stage: Stage) -> None:
    """Loads of different lengths and saves go on together, with each lane first in turn."""
    if not stage.bench.lane_names:
        raise NotJudged("it uses no lanes, so its transfers have one order")
    names = sorted(stage.bench.lane_names)
    orders = [Variant(stage.variant.depth, tuple(order)) for order in (names, names[::-1])]
    orders += [
        Variant(stage.variant.depth, "seed", 100 + stage.variant.lane_seed + seed)
        for seed in range(_SEEDS)
    ]
    for place, order in enumerate(orders):
        _mix(stage, place, order)


def _mix(stage: Stage, place: int, order: Variant) -> None:
    shape = {"lane_policy": order.lane_policy, "lane_seed": order.lane_seed}
    with stage.engine(**shape) as engine:
        stored = [stage.prompt(num_blocks, 1) for num_blocks in (3, 1, 2, 1)]
        for prompt in stored:
            stage.store(engine, prompt)
        for number, prompt in enumerate(stored):
            engine.add(f"load{number}order{place}", prompt + stage.prompt(1), max_tokens=3)
            engine.add(f"save{number}order{place}", stage.prompt(1, 1), max_tokens=3)
            engine.steps(1)
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
