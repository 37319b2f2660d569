"""What `interlace check` says where steps are CUDA graphs, without a GPU: the plain runner calls no
hooks of layers and says that each step is one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from check_kit import check_in
from graph_connectors import AtOnce, Unsaid

from interlace.connectors.conformance import ScriptedConnector
from interlace.connectors.conformance.checking import variants_of
from interlace.connectors.conformance.scenarios import SCENARIOS
from interlace.connectors.conformance.stage import Scenario, Variant
from interlace.connectors.conformance.subject import Subject, engine_config
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.decoder import Attend
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import KVHooks

FEW = ("tokens-cold", "tokens-full-hit", "shared-prefix")


def pretend_graphs(
    monkeypatch: pytest.MonkeyPatch, is_graph: Callable[[SchedulerOutput], bool]
) -> None:
    """Those steps are one graph each."""
    pre_forward, transfer = KVHooks.pre_forward, KVHooks.maybe_transfer_kv_layer

    def in_a_graph(
        self: KVHooks, output: SchedulerOutput, make_metadata: Any, mode: GraphMode = GraphMode.NONE
    ) -> None:
        is_one = make_metadata is not None and is_graph(output)
        pre_forward(self, output, make_metadata, GraphMode.FULL if is_one else mode)

    def no_hooks(self: KVHooks, attend: Attend, output: SchedulerOutput) -> Attend:
        return attend if is_graph(output) else transfer(self, attend, output)

    monkeypatch.setattr(KVHooks, "pre_forward", in_a_graph)
    monkeypatch.setattr(KVHooks, "maybe_transfer_kv_layer", no_hooks)


@pytest.fixture
def _full_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_graphs(monkeypatch, lambda output: True)


@pytest.fixture
def _graphs_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_graphs(monkeypatch, lambda output: set(output.num_scheduled_tokens.values()) == {1})


@pytest.mark.usefixtures("_full_graphs")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_whoever_needs_no_hooks_of_layers_passes(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_in(monkeypatch, FEW, AtOnce, dtype=dtype)
    report.raise_if_failed()
    assert report.result("layer-loads-complete").verdict == "ok"


def store_as_ever(self: Unsaid) -> None:
    """For one that saves without the hooks of layers, so that there is something to load."""
    for layer_name, pages in self._on_worker._pages.items():
        self._on_worker.copy_layer(self._step, layer_name, pages)


@pytest.mark.usefixtures("_full_graphs")
def test_whoever_loads_in_hooks_of_layers_is_told_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Unsaid, "wait_for_save", store_as_ever)
    report = check_in(monkeypatch, ("tokens-hit",), Unsaid, fail_fast=True)
    assert report.failed == ["layer-loads-complete"]
    detail = report.result("layer-loads-complete").detail
    assert "was needed when start_load_kv returned" in detail
    assert "requires_piecewise_for_cudagraph" in detail


@pytest.mark.usefixtures("_graphs_of_decodes")
def test_graphs_of_decodes_show_it_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored was computed in other steps; a request that lacks one token is a decode."""
    check_in(monkeypatch, FEW, AtOnce, quick=True).raise_if_failed()
    report = check_in(monkeypatch, ("tokens-cold", "tokens-full-hit"), Unsaid)
    assert report.failed == ["tokens-full-hit"], "\n".join(report.lines())
    assert "requires_piecewise_for_cudagraph" in report.result("tokens-full-hit").detail


def test_the_scripted_connector_says_so() -> None:
    assert ScriptedConnector.requires_piecewise_for_cudagraph({})


def test_only_a_gpus_engines_have_graphs() -> None:
    def mode(device: Any, **options: Any) -> str | None:
        subject = Subject(cls=ScriptedConnector, device=device)
        return engine_config(subject, options, "fail").cudagraph_mode

    assert mode("cpu") is None
    assert mode("cuda") == "NONE"
    assert mode("cuda", cudagraph_mode="PIECEWISE") == "PIECEWISE"


@pytest.mark.parametrize("uses_lanes", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: str(one.property_id))
def test_on_a_gpu_a_part_of_all_ways_has_graphs(scenario: Scenario, uses_lanes: bool) -> None:
    def modes(device: Any) -> list[str | None]:
        subject = Subject(cls=ScriptedConnector, device=device)
        ways = list(variants_of(scenario, subject, lambda: uses_lanes))
        assert {way.depth for way in ways} == {1, 2}
        return [way.cudagraph_mode for way in ways]

    assert set(modes("cpu")) == {None}
    on_gpu = modes("cuda")
    assert on_gpu[:2] == [None, "FULL_DECODE_ONLY"]
    assert ("FULL_AND_PIECEWISE" in on_gpu) is scenario.in_many_orders


def test_the_first_way_shows_whether_there_are_lanes() -> None:
    seen: list[str] = []
    subject = Subject(cls=ScriptedConnector)
    scenario = next(one for one in SCENARIOS if one.in_many_orders)
    ways = variants_of(scenario, subject, lambda: bool(seen))
    assert next(ways).lane_policy == "eager"
    seen.append("load")
    assert [way.lane_policy for way in ways] == ["lazy", "lazy", "seed"]


def test_a_variant_says_which_graphs_it_has() -> None:
    way = Variant(2, "lazy", cudagraph_mode="FULL")
    assert str(way) == "depth 2, lanes lazy, graphs FULL"
    assert str(Variant(2, "seed", 7)) == "depth 2, lanes seed7"
