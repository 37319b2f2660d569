"""`check_connector` with connectors that raise, hang, or break the form of an answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from memory_connector import MemoryConnector
from memory_store import MemoryStore

from interlace.connectors.base import CheckSetup, KVConnectorBase_V1
from interlace.connectors.conformance import (
    Async,
    CheckReport,
    Rule,
    Script,
    ScriptedConnector,
    check_connector,
)
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorMetadata

HOLDING = Rule(answers=(Async(),), load_delay=1, hold=True)
RAISED = {
    "register_kv_caches": "tokens-cold",
    "set_host_xfer_buffer_ops": "tokens-cold",
    "get_handshake_metadata": "tokens-cold",
    "get_num_new_matched_tokens": "tokens-cold",
    "update_state_after_alloc": "tokens-cold",
    "build_connector_meta": "tokens-cold",
    "handle_preemptions": "tokens-cold",
    "bind_connector_metadata": "tokens-cold",
    "start_load_kv": "tokens-cold",
    "wait_for_layer_load": "tokens-cold",
    "save_kv_layer": "tokens-cold",
    "wait_for_save": "tokens-cold",
    "get_finished": "tokens-cold",
    "get_block_ids_with_load_errors": "tokens-cold",
    "get_kv_connector_stats": "tokens-cold",
    "get_kv_connector_kv_cache_events": "tokens-cold",
    "build_connector_worker_meta": "tokens-cold",
    "clear_connector_metadata": "tokens-cold",
    "update_connector_output": "tokens-cold",
    "request_finished": "tokens-cold",
    "take_events": "tokens-cold",
    "get_finished_count": "tokens-cold",
    "shutdown": "tokens-cold",
    "reset_cache": "reset-forgets",
}
"""Hook -> a property whose scenario calls it."""


def check(cls: type[KVConnectorBase_V1], *only: str, **options: Any) -> CheckReport:
    """With a script that saves, loads and holds."""
    extra = {"script": Script(default=HOLDING)}
    return check_connector(cls, extra, only=only or ("tokens-cold",), fail_fast=True, **options)


@pytest.mark.parametrize("hook", RAISED)
def test_a_hook_that_raises_is_named_with_its_own_traceback(hook: str) -> None:
    def broken(self: object, *args: object, **kwargs: object) -> None:
        raise LookupError("lost and gone")

    cls = type("Raising", (ScriptedConnector,), {hook: broken})
    report = check(cls, RAISED[hook])
    assert report.failed == ["hooks-do-not-raise"], "\n".join(report.lines())
    first, *frames = report.result("hooks-do-not-raise").detail.splitlines()
    assert first == f"Raising.{hook} raised LookupError: lost and gone"
    assert any("test_check_bad_input.py" in frame for frame in frames)
    assert not any("watch.py" in frame for frame in frames), "none of ours"


class NoMetadata(ScriptedConnector):
    """Has nothing to say."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None


class PlainMetadata(ScriptedConnector):
    """Says it in a dict."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return {}


class NoPair(ScriptedConnector):
    """Says only which loads have ended."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return finished_req_ids


class Numbers(ScriptedConnector):
    """Reports block ids as a list."""

    def get_block_ids_with_load_errors(self) -> Any:
        return []


class Perhaps(ScriptedConnector):
    """Does not say whether blocks stay."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return None


@pytest.mark.parametrize(
    ("cls", "hook"),
    [
        (NoMetadata, "build_connector_meta"),
        (PlainMetadata, "build_connector_meta"),
        (NoPair, "get_finished"),
        (Numbers, "get_block_ids_with_load_errors"),
        (Perhaps, "request_finished"),
    ],
)
def test_an_answer_of_the_wrong_form_is_named(cls: type[ScriptedConnector], hook: str) -> None:
    report = check(cls)
    assert report.failed == ["answers-lawful"], "\n".join(report.lines())
    assert f"{cls.__name__}.{hook} answered" in report.result("answers-lawful").detail


class ReportsStrangers(ScriptedConnector):
    """Reports an id and a block that nobody knows."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        super().get_finished(finished_req_ids)
        return {"nobody"}, None


class ReportsNowhere(ScriptedConnector):
    """Reports a block that is not in the pool."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {100_000}


@pytest.mark.parametrize(
    ("cls", "what"), [(ReportsStrangers, "nobody"), (ReportsNowhere, "100000")]
)
def test_ids_that_the_engine_does_not_know_are_named(
    cls: type[ScriptedConnector], what: str
) -> None:
    report = check(cls)
    assert report.failed == ["reports-known-ids"], "\n".join(report.lines())
    assert what in report.result("reports-known-ids").detail
    assert cls.__name__ in report.result("reports-known-ids").detail


class Sleeps(ScriptedConnector):
    """Waits in `start_load_kv`."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        threading.Event().wait(10.0)


def test_a_hook_that_does_not_return_is_named_and_ends_the_check() -> None:
    report = check(Sleeps, "tokens-cold", "tokens-hit", deadline_s=0.5)
    assert report.failed == ["bounded-time"]
    assert "Sleeps.start_load_kv did not return" in report.result("bounded-time").detail
    assert "did not return" in report.result("tokens-hit").detail


class Refuses(ScriptedConnector):
    """Cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no such device")


class BadSetup(ScriptedConnector):
    """Cannot say how it wants to be run."""

    @classmethod
    def check_setup(cls, scratch: Any) -> CheckSetup:
        raise OSError("no such device")


class NoSetup(ScriptedConnector):
    """Says nothing of how it wants to be run."""

    @classmethod
    def check_setup(cls, scratch: Any) -> Any:
        return None


class NoOptions(ScriptedConnector):
    """Says nothing of the engine."""

    @classmethod
    def check_setup(cls, scratch: Any) -> Any:
        return CheckSetup({"script": Script()}, engine_options=None)  # type: ignore[arg-type]


class SetupExits(ScriptedConnector):
    """Gives up for the whole process."""

    @classmethod
    def check_setup(cls, scratch: Any) -> CheckSetup:
        raise SystemExit(0)


class ExitsWhenMade(ScriptedConnector):
    """The same, a moment later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SystemExit(0)


class NoLayout(ScriptedConnector):
    """Cannot say how its pages have to lie."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        raise OSError("no such device")


class Unfinished(KVConnectorBase_V1):
    """Lacks most of it."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ("NoSuchConnector", "there is no KV connector 'NoSuchConnector'"),
        ("no.such.module:Connector", "no.such.module"),
        ("json:JSONDecoder", "JSONDecoder"),
        ("json:NoSuchName", "NoSuchName"),
        (":Connector", "neither a NAME nor a MODULE:CLASS"),
        (dict, "not a KV connector"),
        (Unfinished, "lacks"),
        (Refuses, "no such device"),
        (BadSetup, "check_setup raised OSError"),
        (NoSetup, "check_setup answered None"),
        (NoOptions, "engine_options must be a dict"),
        (SetupExits, "check_setup raised SystemExit"),
        (ExitsWhenMade, "constructor raised SystemExit"),
        (NoLayout, "get_required_kvcache_layout raised OSError"),
    ],
)
def test_what_cannot_be_checked_is_refused(connector: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_connector(connector)


def test_a_configuration_that_the_connector_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass a Script object"):
        check_connector(ScriptedConnector, {})


def test_a_pool_that_is_too_small_for_the_prompts_is_refused() -> None:
    options = {"num_gpu_blocks_override": 3}
    with pytest.raises(ConfigError, match="room for 8 tokens"):
        check(ScriptedConnector, engine_options=options)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="the seed is"):
        check(ScriptedConnector, seed=seed)


class CountsWords(ScriptedConnector):
    """Says how many workers report in words, which the engine minds while it is opened."""

    def get_finished_count(self) -> Any:
        return "two"


def test_what_the_engine_minds_while_it_is_opened_is_a_violation() -> None:
    report = check(CountsWords)
    assert report.failed == ["answers-lawful"]
    assert "CountsWords.get_finished_count" in report.result("answers-lawful").detail


class ExitsOnALane(MemoryConnector):
    """Ends the process in work that is done for it."""

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        raise SystemExit(0)


@pytest.mark.parametrize("is_async", [False, True])
def test_work_on_a_lane_that_exits_is_a_violation(is_async: bool) -> None:
    extra = {"store": MemoryStore(), "load_async": is_async}
    report = check_connector(ExitsOnALane, extra, only=("tokens-hit",), fail_fast=True)
    assert report.failed == ["hooks-do-not-raise"]
    assert "SystemExit" in report.result("hooks-do-not-raise").detail


def test_an_unknown_property_is_refused() -> None:
    with pytest.raises(ConfigError, match="no property 'tokens'"):
        check_connector(ScriptedConnector, {"script": Script()}, only=("tokens",))
