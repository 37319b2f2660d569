"""Match queries that are asked again and again."""

from __future__ import annotations

import collections

from interlace.connectors.conformance.findings import Violation
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage

_REPEATS = 4
_REMOTE_PREFILL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "nobody",
    "remote_request_id": "nothing",
    "remote_block_ids": [1],
    "remote_host": "localhost",
    "remote_port": 1,
    "tp_size": 1,
}
"""What a router tells a decoding engine. Only questions have it: nobody is at the other end."""


def _match_has_no_effects(stage: Stage) -> None:
    """The same requests twice, with one query each and with several: nothing else may differ."""
    once = _play(stage, 0)
    try:
        often = _play(stage, _REPEATS)
    except Violation as violation:
        raise violation.of("match-has-no-effects") from violation
    if once != often:
        raise Violation(
            "match-has-no-effects",
            f"with one query for each request {_count(once)}, with {_REPEATS + 1} {_count(often)}.",
        )


def _play(stage: Stage, num_repeats: int) -> collections.Counter[str]:
    """What was loaded, with so many more queries for each of the engine's."""
    with stage.engine(query_repeats=num_repeats) as engine:
        prompt = stage.prompt(3, 2)
        stage.store(engine, prompt)
        for number in range(2):
            engine.add(f"hit{number}", prompt + stage.prompt(1, number), max_tokens=3)
            engine.run()
            stage.forget_local(engine)
        engine.add("cold", stage.prompt(2, 1), max_tokens=3)
        engine.run()
        stage.forget_local(engine)
        _ask_without_admission(stage, engine, prompt, num_repeats)
        evidence = engine.watch.evidence
        seen = ("loaded tokens", "sync loads", "async loads")
        return collections.Counter({name: evidence[name] for name in seen})


def _ask_without_admission(
    stage: Stage, engine: Harness, prompt: list[int], num_repeats: int
) -> None:
    """Ask about a request that never comes, and then let another one load the same."""
    other = engine.add("asked-and-aborted", prompt, max_tokens=3)
    for _ in range(num_repeats):
        engine.ask(other)
    if num_repeats:
        engine.ask(other, _REMOTE_PREFILL)
    engine.abort(other)
    engine.run()
    engine.add("hit-after-all", prompt, max_tokens=3)
    engine.run()


def _count(seen: collections.Counter[str]) -> str:
    return (
        f"{seen['loaded tokens']} tokens came in {seen['sync loads'] + seen['async loads']} loads"
    )


SCENARIOS = (Scenario("match-has-no-effects", _match_has_no_effects),)
