"""What is lost in the store is reported, exactly that, and does no harm."""

from __future__ import annotations

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage

_BLOCKS = 4


def _exact(stage: Stage) -> None:
    """Each kind of damage, to the first, a middle, the last or to two blocks of a prompt; at two of
    these places where what is lost is recomputed, at one of them where that is an error."""
    places = [(0,), (1, 2)] if stage.variant.depth == 1 else [(1,), (_BLOCKS - 1,)]
    num_met = 0
    for policy in ("recompute", "fail"):
        with stage.engine(failure_policy=policy) as engine:
            if not engine.store_fault_kinds:
                raise NotJudged("it declares no store_fault_kinds")
            for number, kind in enumerate(engine.store_fault_kinds):
                hit = places if policy == "recompute" else [places[number // 2 % 2]]
                for damaged in hit:
                    when_planned = (number + damaged[0]) % 2 == 0
                    _fail(stage, engine, kind, damaged, when_planned=when_planned)
            num_met += engine.watch.evidence["lost blocks reported"]
    if not num_met:
        raise NotJudged("no load ever met the damage")


def _fail(
    stage: Stage, engine: Harness, kind: str, damaged: tuple[int, ...], *, when_planned: bool
) -> None:
    """Two requests share what is damaged, one does not.

    `when_planned`: the damage comes between the promise and the load.
    """
    prompt, other = stage.prompt(_BLOCKS, 1), stage.prompt(2, 1)
    for stored in (prompt, other):
        stage.store(engine, stored)
    name = f"{kind}-{''.join(map(str, damaged))}"

    def damage() -> None:
        for place in damaged:
            engine.damage(kind, prompt, place)

    if not when_planned:
        damage()
    engine.add(f"loads-{name}", prompt + stage.prompt(1), max_tokens=3)
    engine.add(f"shares-{name}", prompt + stage.prompt(0, 1), max_tokens=3)
    engine.add(f"other-{name}", other, max_tokens=3)
    if when_planned:
        engine.plan()
        damage()
    engine.run()
    stage.forget_local(engine)
    engine.add(f"again-{name}", prompt, max_tokens=2)
    engine.run()
    stage.forget_local(engine)


SCENARIOS = (Scenario("failures-exact", _exact, frozenset(("loaded-kv-right",))),)
