"""What is saved can be found when it is whole, when its step was applied, and not before."""

from __future__ import annotations

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage

_FOLLOWERS = 6
_STEPS_AFTER = 8
"""After a reset, before it is asked what was forgotten."""


def _visible_when_whole(stage: Stage) -> None:
    """While a prompt is computed and saved, the same one comes again and again."""
    size = stage.block_size
    for budget in (64, size + 1):
        with stage.engine(prefix_caching=False, max_num_batched_tokens=budget) as engine:
            prompt = stage.prompt(4, 1)
            engine.add(f"saver-budget{budget}", prompt, max_tokens=2)
            for number in range(_FOLLOWERS):
                engine.steps(1)
                follower = engine.add(f"no{number}-budget{budget}", prompt, max_tokens=1)
                engine.ask(follower)
            engine.run()
            _expect_no_failures(engine)
    _on_bad_ground(stage)
    stage.need_right_kv()
    stage.need_loads()


def _expect_no_failures(engine: Harness) -> None:
    """A block that could not be loaded though nobody damaged it was served too early."""
    if engine.watch.evidence["unprovoked failures"]:
        engine.watch.findings.add(
            "saves-visible-when-whole",
            "blocks were promised that could not be loaded, though nothing was damaged.",
        )
        engine.watch.findings.raise_first()


def _on_bad_ground(stage: Stage) -> None:
    """A block is lost beneath those that a step computes: what it computed is not served."""
    for policy in ("fail", "recompute"):
        with stage.engine(failure_policy=policy) as engine:
            if not engine.store_fault_kinds:
                return
            head = stage.prompt(3)
            whole = head + stage.prompt(2, 2)
            stage.store(engine, head + whole[len(head) : len(head) + 1])
            if not engine.damage(engine.store_fault_kinds[0], head, 1):
                raise NotJudged("it never saved what could be damaged")
            for number in range(3):
                engine.add(f"{policy}{number}", whole, max_tokens=2)
                engine.run()
                stage.forget_local(engine)


def _reset_forgets(stage: Stage) -> None:
    """After `reset_cache` nothing of before is promised, and what is saved anew is."""
    cls = stage.subject.cls
    with stage.engine() as engine:
        prompt = stage.prompt(3, 1)
        stage.store(engine, prompt)
        if not engine.reset_prefix_cache(reset_connector=True):
            raise NotJudged("its reset_cache says that it does not forget")
        if not _has_reset(cls):
            raise NotJudged("it has no reset_cache")
        stage.bench.truth.forget()
        # Some steps without it: what was saved before and is listed only now must not be.
        engine.add("meanwhile", stage.prompt(1), max_tokens=_STEPS_AFTER)
        engine.run()
        stage.forget_local(engine)
        engine.add("after-reset", prompt, max_tokens=2)
        engine.run()
        stage.forget_local(engine)
        engine.add("again", prompt, max_tokens=2)
        engine.run()


def _has_reset(cls: type) -> bool:
    from interlace.connectors.base import KVConnectorBase_V1

    return getattr(cls, "reset_cache", None) is not KVConnectorBase_V1.reset_cache


SCENARIOS = (
    Scenario(
        "saves-visible-when-whole",
        _visible_when_whole,
        frozenset(
            (
                "loaded-kv-right",
                "layer-loads-complete",
                "loads-reported-when-done",
                "saves-fenced",
            )
        ),
        in_many_orders=True,
    ),
    Scenario("reset-forgets", _reset_forgets),
)
