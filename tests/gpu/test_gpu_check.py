"""`interlace check` on a GPU: what is right passes, in graphs too, and mistakes are found.

Each check has a time of its own, and so has each scenario within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from check_kit import check_in
from graph_connectors import BROKEN, AtOnce, Unsaid

from interlace.connectors.conformance import (
    Async,
    EngineShape,
    Harness,
    Rule,
    Script,
    ScriptedConnector,
    check_connector,
)
from interlace.connectors.conformance.deadline import call_within
from interlace.connectors.conformance.layer_pages import LayerPages
from interlace.connectors.conformance.number_format import FLOAT32
from interlace.engine.errors import ConfigError
from interlace.layers.graph_mode import GraphMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BUILT_IN = (
    "ScriptedConnector",
    "DecodeBenchConnector",
    "ExampleHiddenStatesConnector",
    "ExampleConnector",
    "MultiConnector",
    "PipelineConnector",
)
FEW = ("tokens-hit", "tokens-full-hit", "tokens-preempted", "aborted-in-every-state")
LIMIT_S = 110.0
T = TypeVar("T")


def within_limit(check: Callable[[], T]) -> T:
    """What it returns. Raises: `Overrun` after `LIMIT_S`; its thread is left behind."""
    found: list[T] = []
    call_within(lambda: found.append(check()), LIMIT_S)
    return found[0]


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("is_strided", [False, True])
def test_pages_are_copied_and_written_back(is_strided: bool) -> None:
    pages = torch.zeros(5, 2, 3, 4, 8, device="cuda")
    if is_strided:
        pages = pages.transpose(2, 3).contiguous().transpose(2, 3)
    layer = LayerPages(pages)
    layer.fill(1, FLOAT32.paint(7))
    assert pages[1].isnan().all()
    assert FLOAT32.numbers_of(layer.all()) == {7}
    assert not FLOAT32.is_paint(layer.block(0)).any()
    pages[2] = torch.arange(192.0, device="cuda").view(2, 3, 4, 8) + 1
    assert np.array_equal(FLOAT32.as_floats(layer.block(2)).ravel(), np.arange(192) + 1)
    layer.put(3, layer.block(2) ^ 1)
    assert (pages[3] != pages[2]).all()
    assert torch.allclose(pages[3], pages[2])


def test_what_other_streams_had_queued_is_seen() -> None:
    pages, side = torch.zeros(2, 2, 4, 2, 8, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    layer = LayerPages(pages)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        pages[1] = 2.5
    assert (FLOAT32.as_floats(layer.all())[1] == 2.5).all()


def test_a_computed_nan_is_no_paint() -> None:
    zeros = torch.zeros(1000, device="cuda")
    found = torch.cat([zeros / zeros, -(zeros / zeros), zeros - torch.inf + torch.inf])
    assert found.isnan().all()
    assert not FLOAT32.is_paint(found.cpu().numpy().view(np.int32)).any()


# ---------------------------------------------------------------- engines by hand
# These come first, since they compile the kernels.


class Noting(ScriptedConnector):
    """Notes in which mode each step runs, in its script's log."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        mode = forward_context.cudagraph_runtime_mode
        self._note("mode", mode.name)
        super().start_load_kv(forward_context, **kwargs)


def play_twice(mode: str, rule: Rule) -> Harness:
    """One prompt twice: its tokens and what is loaded are compared with what is right."""
    script = Script(default=rule)
    shape = EngineShape(depth=2, cudagraph_mode=mode)
    with Harness.of(Noting, {"script": script}, shape=shape, device="cuda") as engine:
        for name in ("first", "second"):
            engine.add(name, [7, 3, 9, 1, 4, 4, 2, 8, 5, 5], max_tokens=6)
            engine.run()
            assert engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("rule", [Rule(), Rule(answers=(Async(),), load_delay=2)])
def test_what_is_loaded_is_compared(rule: Rule, mode: str) -> None:
    """With graphs in pieces, since the connector needs its hooks of layers."""
    engine = within_limit(lambda: play_twice(mode, rule))
    assert engine.watch.evidence["loaded tokens"] >= 8
    assert engine.watch.evidence["compared blocks"] >= 6
    assert engine.watch.evidence["tokens"] == 12
    script = engine.subject.extra_config["script"]
    modes = {call.summary for call in script.calls if call.hook == "mode"}
    assert modes == ({"NONE"} if mode == "NONE" else {"NONE", "PIECEWISE"})


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_connector_passes(name: str) -> None:
    report = within_limit(lambda: check_connector(name, quick=True, device="cuda"))
    print("\n".join(report.lines()))
    report.raise_if_failed()
    assert report.result("idle-at-the-end").verdict == "ok"
    if name in ("ScriptedConnector", "ExampleConnector", "MultiConnector"):
        assert report.result("loaded-kv-right").verdict == "ok"
        assert report.result("layer-loads-complete").verdict == "ok"


def test_full_graphs_with_a_connector_that_needs_no_hooks_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[GraphMode] = []
    start_load_kv = AtOnce.start_load_kv

    def noting(self: AtOnce, forward_context: Any, **kwargs: Any) -> None:
        modes.append(forward_context.cudagraph_runtime_mode)
        start_load_kv(self, forward_context, **kwargs)

    monkeypatch.setattr(AtOnce, "start_load_kv", noting)
    report = within_limit(lambda: check_in(monkeypatch, FEW, AtOnce, device="cuda"))
    print(report.summary())
    report.raise_if_failed()
    assert report.result("layer-loads-complete").verdict == "ok"
    assert {GraphMode.NONE, GraphMode.FULL} <= set(modes)


# ---------------------------------------------------------------- what is not


@pytest.mark.parametrize("connector", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_connector_is_found(
    connector: type[ScriptedConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios = ("tokens-hit", "tokens-full-hit")
    report = within_limit(lambda: check_in(monkeypatch, scenarios, connector, device="cuda"))
    assert BROKEN[connector] in report.failed, "\n".join(report.lines())


def test_who_loads_in_hooks_that_a_graph_leaves_out_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What only lacks one token is a decode, and loads in vain; without graphs it is right."""
    report = within_limit(
        lambda: check_in(monkeypatch, ("tokens-cold", "tokens-full-hit"), Unsaid, device="cuda")
    )
    assert report.failed == ["tokens-full-hit"], "\n".join(report.lines())
    result = report.result("tokens-full-hit")
    assert "requires_piecewise_for_cudagraph" in result.detail
    assert "graphs FULL_DECODE_ONLY" in result.where


def test_several_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="share KV heads on a CPU only"):
        check_connector(ScriptedConnector, device="cuda", workers=2)
