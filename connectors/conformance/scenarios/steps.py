"""What one step's metadata orders is done once."""

from __future__ import annotations

from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.retention import find_remembered
from interlace.connectors.conformance.stage import Scenario, Stage
from interlace.engine.config import EngineConfig
from interlace.engine.request import Request


def _plan_reset(stage: Stage) -> None:
    """A request loads and ends while another one goes on; in the end one comes that gives the
    connector nothing to do, and no message may speak of the others any more."""
    with stage.engine() as engine:
        prompt = stage.prompt(3, 2)
        stage.store(engine, prompt)
        engine.add("goes-on", stage.prompt(1, 1), max_tokens=16)
        engine.add("loads", prompt, max_tokens=2)
        engine.run()
        engine.lanes.drain()
        ended = list(engine.requests.values())
        engine.add("nothing-to-do", [1], max_tokens=2)
        engine.run()
        _check_silence(engine, ended)


def _check_silence(engine: Harness, ended: list[Request]) -> None:
    """Raises: `Violation` if the newest message speaks of requests that have ended before."""
    assert engine.newest_output is not None
    marks: list[str | bytes] = [one.request_id for one in ended]
    marks += [block_hash for one in ended for block_hash in one.block_hashes]
    way = find_remembered(
        {"metadata": engine.newest_output.kv_connector_metadata},
        marks,
        exempt=engine.subject.given_objects,
        exempt_types=(EngineConfig,),
    )
    if way is not None:
        engine.watch.findings.add(
            "plan-reset",
            f"{engine.subject.name}.build_connector_meta still speaks of what has ended: {way}.",
        )
        engine.watch.findings.raise_first()


SCENARIOS = (Scenario("plan-reset", _plan_reset),)
