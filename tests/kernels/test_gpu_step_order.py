"""What a step does first: a load within it begins before anything else of it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_model import plain_answer, tiny_model

from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.layers.forward_context import ForwardContext, TritonAttentionMetadata
from interlace.layers.gpu.forward import Answer
from interlace.layers.gpu.graphs import StepToReplay
from interlace.layers.gpu.inputs import StepSize
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kernels import matvec
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
BLOCK = 4
MODEL = tiny_model(dtype=torch.float32)
TOKENS = (5, 9, 2, 7, 1, 1, 8, 3, 4)
BEHIND = ["wait_for_save", "advance_transfers"]
HOOKS = ["wait_for_layer_load", "save_kv_layer"] * MODEL.architecture.num_layers


@pytest.fixture(autouse=True)
def _products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for few rows has tests of its own, and takes most of the time interpreted."""
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)


class Metadata(KVConnectorMetadata):
    """Says nothing."""


class Gates:
    """Armed for one step."""

    armed_for = 0

    def wait_here(self, layer: int) -> None:
        """Nothing is captured."""

    def are_armed(self, step_id: int) -> bool:
        return step_id == self.armed_for


class LateGates(Gates):
    """The rest is armed when that is asked for."""

    num_first_layers = 1
    first_armed_for = 0

    def __init__(self, log: list[str], rest_armed_for: int | Exception = 1) -> None:
        self.log = log
        self.rest_armed_for = rest_armed_for

    def are_first_armed(self, step_id: int) -> bool:
        return step_id == self.first_armed_for

    def arm_rest(self, step_id: int) -> None:
        self.log.append("arm_rest")
        if isinstance(self.rest_armed_for, Exception):
            raise self.rest_armed_for
        self.armed_for = self.rest_armed_for


class Watched:
    """A connector's worker side that notes each call, and may do something in `start_load_kv`."""

    def __init__(self, log: list[str], gates: Gates | None = None) -> None:
        self.log = log
        self.gates = gates
        self.on_start: Callable[[ForwardContext], None] = lambda context: None
        self.advances: list[object] = []
        """What `advance_transfers` answers, before it has nothing more to do."""
        self.late: Any = set()
        """What `get_late_load_errors` answers."""
        self.num_late_questions = 0

    def get_layer_gates(self) -> Gates | None:
        return self.gates

    def start_load_kv(self, context: ForwardContext) -> None:
        self.log.append("start_load_kv")
        self.on_start(context)

    def has_connector_metadata(self) -> bool:
        return True

    def get_finished(self, finished: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_late_load_errors(self) -> Any:
        assert "advance_transfers" in self.log, "the step is waited for first"
        self.num_late_questions += 1
        return self.late

    def advance_transfers(self) -> Any:
        self.log.append("advance_transfers")
        return self.advances.pop(0) if self.advances else False

    def __getattr__(self, hook: str) -> Any:
        def call(*_: Any) -> None:
            if hook in ("handle_preemptions", "wait_for_save", *HOOKS):
                self.log.append(hook)

        return call


class Kit:
    """A runner whose preparations are noted too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gates: Gates | None = None) -> None:
        self.log: list[str] = []
        self.connector = Watched(self.log, gates)
        a = MODEL.architecture
        pages = KVPages(
            num_layers=a.num_layers,
            num_blocks=12,
            block_size=BLOCK,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        connector: Any = self.connector
        self.runner = GpuRunner(
            MODEL.decoder, pages, (), [connector],
            max_num_seqs=2, max_num_batched_tokens=16, num_sms=4, sleep=self._sleep,
        )  # fmt: skip
        for owner, name in (
            (pages, "zero_blocks"),
            (pages, "copy_blocks"),
            (self.runner.state, "update"),
            (self.runner._inputs, "upload"),
        ):
            monkeypatch.setattr(owner, name, self._noted(name, getattr(owner, name)))
        self.log.clear()

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds < 0.001
        self.log.append("sleep")

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.log.append(name)
            return call(*args)

        return noted

    def step(self, **fields: Any) -> Any:
        """A prompt's one step."""
        new = NewRequestData("r", TOKENS, SamplingParams(temperature=0), 0, ([1, 2, 3],), 0)
        output = SchedulerOutput(
            step_id=1,
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=CachedRequestData(),
            num_scheduled_tokens={"r": len(TOKENS)},
            total_num_scheduled_tokens=len(TOKENS),
            finished_req_ids=frozenset(),
            preempted_req_ids=frozenset(),
            sampling_req_ids=frozenset({"r"}),
            kv_connector_metadata=Metadata(),
            **fields,
        )
        return self.runner.execute(output)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(monkeypatch)


LOADS: dict[str, Any] = {"loading_block_ids": frozenset({1}), "zeroed_block_ids": (1,)}


def test_a_load_begins_behind_what_may_write_to_its_blocks_and_before_all_else(kit: Kit) -> None:
    kit.step(**LOADS)
    assert kit.log == [
        "handle_preemptions", "zero_blocks", "copy_blocks", "start_load_kv", "update", "upload",
        *HOOKS, "wait_for_save", "advance_transfers",
    ]  # fmt: skip


def test_a_step_without_a_load_is_prepared_first(kit: Kit) -> None:
    """Its connector may measure from there how long the device computes."""
    output = kit.step()
    assert kit.log[:5] == [
        "handle_preemptions", "copy_blocks", "update", "upload", "start_load_kv"
    ]  # fmt: skip
    assert output.sampled_token_ids["r"] == tuple(plain_answer(MODEL, list(TOKENS), 1))


def test_who_asks_for_the_attention_metadata_gets_all_of_it(kit: Kit) -> None:
    """The step is prepared then, once."""
    seen: list[Any] = []

    def look(context: ForwardContext) -> None:
        by_layer = context.attn_metadata
        assert by_layer is not None
        seen.extend(by_layer.values())

    kit.connector.on_start = look
    output = kit.step(**LOADS)
    assert kit.log[3:6] == ["start_load_kv", "update", "upload"]
    assert kit.log.count("upload") == 1
    assert len(seen) == MODEL.architecture.num_layers
    metadata = seen[0]
    assert isinstance(metadata, TritonAttentionMetadata)
    assert metadata.slot_mapping.tolist() == [*range(4, 13)]
    assert metadata.seq_lens.tolist() == [9]
    assert metadata.query_start_loc.tolist() == [0, 9]
    assert metadata.block_table.tolist() == [[1, 2, 3]]
    assert output.sampled_token_ids["r"] == tuple(plain_answer(MODEL, list(TOKENS), 1))


def test_a_load_that_cannot_begin_does_not_hide_that_nothing_was_prepared(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector asks, the upload fails: that is no failed load, but the end."""

    def fail(*_: Any) -> None:
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(kit.runner._inputs, "upload", fail)
    kit.connector.on_start = lambda context: [*(context.attn_metadata or ())].clear()
    with pytest.raises(MemoryError):
        kit.step(**LOADS)


def test_a_load_that_raises_leaves_its_blocks_invalid_and_the_step_goes_on(kit: Kit) -> None:
    def refuse(context: ForwardContext) -> None:
        raise ConnectorError("not today")

    kit.connector.on_start = refuse
    output = kit.step(**LOADS)
    assert output.kv_connector_output is not None
    assert output.kv_connector_output.invalid_block_ids == {1}
    assert kit.log.count("upload") == 1


def test_what_turns_out_bad_when_the_tokens_have_come_is_reported_with_them(kit: Kit) -> None:
    kit.connector.late = {1, 3}
    output = kit.step(**LOADS)
    assert output.kv_connector_output is not None
    assert output.kv_connector_output.invalid_block_ids == {1, 3}
    assert kit.connector.num_late_questions == 1


def test_nobody_asks_for_late_errors_of_a_step_that_loads_nothing(kit: Kit) -> None:
    kit.step()
    assert kit.connector.num_late_questions == 0


@pytest.mark.parametrize("answer", [None, {0}, {99}, [1], {"1"}])
def test_late_errors_that_are_no_blocks_are_refused(answer: Any, kit: Kit) -> None:
    kit.connector.late = answer
    with pytest.raises(ConnectorError, match="get_late_load_errors answered"):
        kit.step(**LOADS)


class Graph:
    """A full graph of nine tokens."""

    runtime_mode = GraphMode.FULL
    size = StepSize(len(TOKENS), 1)

    def __init__(self, log: list[str], *, is_cut: bool = False) -> None:
        self.log = log
        self.is_cut = is_cut

    def replay(self, step: StepToReplay) -> Answer | None:
        assert step.hooks is None
        self.log.append("replay" if step.arm_rest is None else "gated replay")
        if self.is_cut and step.arm_rest is not None:
            if not step.arm_rest():
                return None
            self.log.append("second part")
        return Answer(torch.zeros(1, 8), torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("armed_for", [1, 0])
def test_between_the_copies_and_a_full_graph_nothing_runs_for_each_layer(
    armed_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates()
    kit = Kit(monkeypatch, gates)
    monkeypatch.setattr(kit.runner._graphs, "find", lambda *_, **__: Graph(kit.log))

    def arm(context: ForwardContext) -> None:
        assert context.cudagraph_runtime_mode is GraphMode.FULL
        gates.armed_for = armed_for

    kit.connector.on_start = arm
    kit.step(**LOADS)
    forward = ["gated replay"] if armed_for == 1 else HOOKS
    assert kit.log[3:] == ["start_load_kv", "update", "upload", *forward, *BEHIND]


REPLAYED = ["gated replay", "arm_rest", "second part"]


@pytest.mark.parametrize(
    ("is_cut", "first_for", "rest_for", "forward"),
    [
        (True, 1, 1, REPLAYED),
        (True, 0, 1, HOOKS),
        (True, 1, 0, [*REPLAYED[:2], *HOOKS]),
        (False, 1, 1, ["arm_rest", "gated replay"]),
        (False, 1, 0, ["arm_rest", *HOOKS]),
    ],
)
def test_late_gates_are_armed_when_the_first_layers_are_launched(
    is_cut: bool, first_for: int, rest_for: int, forward: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not armed by then runs with its hooks, from its begin; a graph that is not cut waits
    until all are."""
    log: list[str] = []
    gates = LateGates(log, rest_for)
    kit = Kit(monkeypatch, gates)
    gates.log = kit.log
    monkeypatch.setattr(kit.runner._graphs, "find", lambda *_, **__: Graph(kit.log, is_cut=is_cut))

    def arm(context: ForwardContext) -> None:
        gates.first_armed_for = first_for

    kit.connector.on_start = arm
    output = kit.step(**LOADS)
    assert kit.log[3:] == ["start_load_kv", "update", "upload", *forward, *BEHIND]
    if forward[-1] == "save_kv_layer":
        assert output.sampled_token_ids["r"] == tuple(plain_answer(MODEL, list(TOKENS), 1))


def test_gates_that_raise_when_the_rest_is_to_be_armed_are_a_failed_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gates = LateGates([], ConnectorError("no more streams"))
    kit = Kit(monkeypatch, gates)
    monkeypatch.setattr(kit.runner._graphs, "find", lambda *_, **__: Graph(kit.log, is_cut=True))
    kit.connector.on_start = lambda context: setattr(gates, "first_armed_for", 1)
    output = kit.step(**LOADS)
    assert "LateGates.arm_rest raised ConnectorError: no more streams" in caplog.text
    assert output.kv_connector_output is not None
    assert output.kv_connector_output.invalid_block_ids == {1}
    assert output.sampled_token_ids["r"] == tuple(plain_answer(MODEL, list(TOKENS), 1))


def test_a_step_that_loads_nothing_asks_no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = LateGates([])
    kit = Kit(monkeypatch, gates)
    gates.log = kit.log
    monkeypatch.setattr(kit.runner._graphs, "find", lambda *_, **__: Graph(kit.log, is_cut=True))
    kit.step()
    assert "replay" in kit.log
    assert "arm_rest" not in kit.log


class End:
    """Of a step, which comes when it has been asked for that so many times."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks

    @property
    def has_come(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput()


@pytest.mark.parametrize(
    ("advances", "num_looks", "expected"),
    [
        ([], 9, ["advance_transfers"]),
        ([True, True], 9, ["advance_transfers", "sleep"] * 2 + ["advance_transfers"]),
        ([True] * 9, 0, ["advance_transfers"]),
        ([True] * 9, 1, ["advance_transfers", "sleep", "advance_transfers"]),
    ],
)
def test_transfers_go_on_until_the_step_has_ended_or_they_have(
    advances: list[object], num_looks: int, expected: list[str], kit: Kit
) -> None:
    kit.connector.advances = advances
    kit.runner._advance_transfers(End(num_looks))
    assert kit.log == expected


def test_a_connector_that_does_not_say_whether_there_is_more_is_named(kit: Kit) -> None:
    kit.connector.advances = [None]
    with pytest.raises(ConnectorError, match=r"advance_transfers answered None.*True or False"):
        kit.step()


def test_an_idle_connector_is_not_asked_to_move_anything_on(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Metadata, "is_idle", True)
    kit.step()
    assert kit.log == ["copy_blocks", "update", "upload"]
