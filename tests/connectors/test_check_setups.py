"""What a check asks of a connector anew for each run, and of instances in place of the class."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from memory_connector import MemoryConnector
from memory_store import FAULTS, LostBlockError, MemoryStore
from multi_kit import multi_config, multi_side, scripted

from interlace.connectors.base import CheckSetup
from interlace.connectors.conformance import (
    Harness,
    Script,
    ScriptedConnector,
    check_connector,
    checking,
)
from interlace.connectors.conformance.scenarios import SCENARIOS
from interlace.connectors.conformance.stage import Stage
from interlace.connectors.multi_connector import MultiConnector
from interlace.engine.kv_connector import KVConnectorRole

WORKER = KVConnectorRole.WORKER


def memory(store: MemoryStore | None = None) -> dict[str, Any]:
    """The configuration of a child that keeps KV in a store."""
    return {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": "memory_connector",
        "kv_connector_extra_config": {"store": store or MemoryStore()},
    }


SYNTHETIC = {"kv_connector": "DecodeBenchConnector"}

# --- runs are set up anew ------------------------------------------------------------------------


class Remembering(ScriptedConnector):
    """Remembers the folders that it was given."""

    folders: list[Path]

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """See the base class."""
        assert not list(scratch.iterdir())
        cls.folders.append(scratch)
        return CheckSetup({"script": Script()})


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Those that `Remembering` was given since."""
    given: list[Path] = []
    monkeypatch.setattr(Remembering, "folders", given, raising=False)
    return given


def test_each_run_has_an_empty_folder_of_its_own(folders: list[Path]) -> None:
    check_connector(Remembering, only=("reset-forgets", "plan-reset")).raise_if_failed()
    assert len(set(folders)) == len(folders) == 4, "two scenarios, each at two depths"
    assert not any(folder.exists() for folder in folders)


def test_what_is_given_is_what_all_runs_get(folders: list[Path]) -> None:
    extra = {"script": Script()}
    report = check_connector(Remembering, extra, engine_options={}, only=("plan-reset",))
    report.raise_if_failed()
    assert not folders


# --- lanes, however few properties are asked for -------------------------------------------------


@pytest.mark.parametrize("only", ["transfers-in-any-order", "tokens-full-hit"])
def test_one_property_alone_is_seen_in_all_orders_of_lanes(only: str) -> None:
    played: list[str] = []
    extra = {"store": MemoryStore(), "load_async": True, "save_async": True}
    report = check_connector(MemoryConnector, extra, only=(only,), progress=played.append)
    assert report.result(only).verdict == "ok", "\n".join(report.lines())
    assert len(played) == {"transfers-in-any-order": 2, "tokens-full-hit": 4}[only]


@pytest.mark.parametrize(("seed", "depths"), [(0, [1, 2]), (1, [2, 1])])
def test_a_quick_check_plays_each_scenario_once_in_turns(
    seed: int, depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [one for one in SCENARIOS if one.property_id in ("plan-reset", "reset-forgets")]
    played: list[int] = []

    def note(stage: Stage) -> None:
        played.append(stage.variant.depth)

    few = [dataclasses.replace(one, play=note) for one in few]
    monkeypatch.setattr(checking, "SCENARIOS", tuple(few))
    report = check_connector("ScriptedConnector", quick=True, seed=seed)
    assert played == depths
    assert report.result("plan-reset").verdict == "ok"
    assert any("in one way only" in note for note in report.notes)


def test_a_connector_without_lanes_has_one_order() -> None:
    report = check_connector("ScriptedConnector", only=("transfers-in-any-order",))
    result = report.result("transfers-in-any-order")
    assert (result.verdict, result.detail) == (
        "skipped",
        "it uses no lanes, so its transfers have one order",
    )


# --- what was waited for in vain is not waited for again -----------------------------------------


class LeavesThreads(MemoryConnector):
    """A thread for each worker that ever was, and one more step to forget a request."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        wait = threading.Event().wait
        threading.Thread(target=wait, args=(15.0,), name="left-behind", daemon=True).start()


def test_threads_that_are_left_behind_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [one for one in SCENARIOS if one.property_id in ("reset-forgets", "plan-reset")]
    monkeypatch.setattr(checking, "SCENARIOS", tuple(few))
    began_s = time.monotonic()
    report = check_connector(LeavesThreads, {"store": MemoryStore()})
    took_s = time.monotonic() - began_s
    assert report.failed == ["shutdown-releases"]
    assert "threads go on after shutdown: left-behind" in report.result("shutdown-releases").detail
    assert took_s < 3.9, "one wait of two seconds, not one for each of four engines"


# --- a MultiConnector is what its children are ---------------------------------------------------


def test_it_can_lose_what_all_children_can_lose() -> None:
    side = multi_side(multi_config([memory(), memory()]), WORKER)
    assert side.store_fault_kinds == tuple(FAULTS)
    assert not side.kv_is_synthetic
    side = multi_side(multi_config([memory(), scripted(Script())]), WORKER)
    assert side.store_fault_kinds == ()


def test_it_loses_a_block_in_every_store() -> None:
    stores = [MemoryStore(), MemoryStore()]
    extra = {"connectors": [memory(store) for store in stores]}
    with Harness.of(MultiConnector, extra) as engine:
        prompt = list(range(9))
        request = engine.add("saves", prompt)
        engine.run()
        first, second, *_ = request.block_hashes
        assert engine.store_fault_kinds == tuple(FAULTS)
        assert engine.damage("missing", prompt, 0)
        assert engine.lost_hashes == {first}
        lost = set(engine.parts.worker_sides[0].inject_store_fault("missing", second))
        assert lost == {second}
        for store, block_hash in itertools.product(stores, (first, second)):
            with pytest.raises(LostBlockError):
                store.get(block_hash, 0).read(0)
        assert not engine.damage("missing", list(range(20, 29)), 0), "nobody has that"


@pytest.mark.parametrize("workers", [1, 2])
def test_what_its_children_lose_is_reported_exactly(workers: int) -> None:
    extra = {"connectors": [memory(), memory()]}
    report = check_connector(MultiConnector, extra, only=("failures-exact",), workers=workers)
    assert report.result("failures-exact").verdict == "ok", "\n".join(report.lines())


def test_it_invents_kv_if_a_child_does() -> None:
    children = [scripted(Script()), SYNTHETIC]
    assert multi_side(multi_config(children), WORKER).kv_is_synthetic
    only = ("tokens-full-hit", "shared-prefix")
    report = check_connector(MultiConnector, {"connectors": children}, only=only)
    report.raise_if_failed()
    assert any("its KV is synthetic" in note for note in report.notes)
    assert all("synthetic" in report.result(one).detail for one in only)
