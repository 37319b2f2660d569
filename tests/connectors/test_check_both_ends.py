"""`check_connector` with a connector that loads from the back while its requests are computed: what
is right passes, and what is not is found, on whichever worker; also what takes a hole that is open
for long."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from interlace.connectors.conformance import (
    Async,
    CheckReport,
    Rule,
    Script,
    ScriptedConnector,
    check_connector,
    checking,
)
from interlace.connectors.conformance.scenarios import both_ends
from interlace.connectors.conformance.scripted_metadata import ScriptedMetadata
from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.connectors.pipeline.rates import LoadRate, StepTimes
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.kv_connector import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
)
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


class HalfConnector(ScriptedConnector):
    """Of what is promised the first half is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._starts: dict[str, int] = {}
        self._middles: dict[str, int | None] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        size = self._vllm_config.block_size
        middle = (num_computed_tokens + (num_tokens or 0) // 2) // size * size
        self._starts[request.request_id] = num_computed_tokens
        self._middles[request.request_id] = middle if middle > num_computed_tokens else None
        return num_tokens, is_async

    def get_compute_end(self, request: Request) -> int | None:
        self.script.rules[request.request_id] = dataclasses.replace(
            self.script.default, compute_ends=(self._middles[request.request_id],)
        )
        return super().get_compute_end(request)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._starts.pop(request.request_id, None)
        self._middles.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, ScriptedMetadata)
        super().bind_connector_metadata(self.changed(connector_metadata))

    def changed(self, metadata: ScriptedMetadata) -> ScriptedMetadata:
        """What the worker side makes of its orders."""
        return metadata

    @property
    def rank(self) -> int:
        return self._vllm_config.parallel_config.rank


class TakesOver(HalfConnector):
    """While it has not heard of a load's end, it gives the load more and more. Then it says what
    the worker side knew by the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._left_out: dict[str, int] = vars(self.script).setdefault("left_out", {})
        self._heard: set[str] = set()

    def get_compute_end(self, request: Request) -> int | None:
        request_id, size = request.request_id, self._vllm_config.block_size
        middle = self._middles[request_id]
        if request_id in self._heard:
            self._middles[request_id] = self._starts[request_id] + size * self._left_out[request_id]
        elif request.blocks and middle is not None and middle - size >= request.num_computed_tokens:
            self._middles[request_id] = middle - size
        return super().get_compute_end(request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for load in self._on_worker._async:
            if load.job.req_id in self._step.not_brought:
                self._left_out[load.job.req_id] = self._step.not_brought[load.job.req_id]
        return super().get_finished(finished_req_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._heard |= connector_output.finished_recving or set()
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._heard.discard(request.request_id)
        self._left_out.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class StartsTooHigh(HalfConnector):
    """One block is neither computed nor loaded."""

    bad_ranks: tuple[int, ...] = (0, 1)

    def changed(self, metadata: ScriptedMetadata) -> ScriptedMetadata:
        if self.rank not in self.bad_ranks:
            return metadata
        more = {request_id: count + 1 for request_id, count in metadata.not_brought.items()}
        return dataclasses.replace(metadata, not_brought=more)


class FirstRankStartsTooHigh(StartsTooHigh):
    bad_ranks = (0,)


class LastRankStartsTooHigh(StartsTooHigh):
    bad_ranks = (1,)


class LoadsAll(HalfConnector):
    """It writes to what is computed."""

    def changed(self, metadata: ScriptedMetadata) -> ScriptedMetadata:
        return dataclasses.replace(metadata, not_brought={})


def check(kind: type[HalfConnector], delay: int = 1, **options: Any) -> CheckReport:
    extra = {"script": Script(default=Rule(answers=(Async(),), load_delay=delay))}
    return check_connector(kind, extra, **options)


@pytest.mark.parametrize(("delay", "workers"), [(3, 1), (0, 2)])
def test_what_is_right_passes(delay: int, workers: int) -> None:
    only = ("tokens-hit", "tokens-chunked", "loads-write-only-their-blocks")
    report = check(HalfConnector, delay, workers=workers, only=only, quick=True)
    report.raise_if_failed()


def test_a_verdict_waits_until_the_connector_has_heard_of_the_end() -> None:
    """With two steps in flight it may say something else before."""
    report = check(TakesOver, 0, only=("tokens-hit", "tokens-chunked"))
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("kind", "workers", "property_id"),
    [
        (StartsTooHigh, 1, "loads-reported-when-done"),
        (FirstRankStartsTooHigh, 2, "loads-reported-when-done"),
        (LastRankStartsTooHigh, 2, "loads-reported-when-done"),
        (LoadsAll, 1, "loads-write-only-their-blocks"),
    ],
)
def test_what_is_wrong_is_found(kind: type[HalfConnector], workers: int, property_id: str) -> None:
    report = check(kind, workers=workers, only=("tokens-hit", property_id), fail_fast=True)
    assert property_id in report.failed, "\n".join(report.lines())


# ---------------------------------------------------------------- with the hole open for long

HYBRID = {"load_mode": "hybrid", "group_size": 1, "host_bytes": 128 << 10}


class WritesOn(PipelineConnector):
    """A load that a preemption ends writes on, though nobody waits for it any more."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, PipelineMetadata)
        for load in self._worker._bulk_loads:
            load.is_lost |= load.load.load_id in kv_connector_metadata.lost_loads
        super().handle_preemptions(
            dataclasses.replace(kv_connector_metadata, lost_loads=frozenset())
        )


class LosesNoLoads(PipelineConnector):
    """A preemption does not end a load at all."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, PipelineMetadata)
        super().handle_preemptions(
            dataclasses.replace(kv_connector_metadata, lost_loads=frozenset())
        )


class LetsGoAtOnce(PipelineConnector):
    """The load of an aborted request is reported with its end, whatever is still under way."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        for load in self._worker._bulk_loads:
            if load.load.request_id in finished_req_ids and not load.is_lost:
                load.is_lost = True
                received = (received or set()) | {load.load.request_id}
        return sent, received


class SlowLoads(PipelineConnector):
    """It believes that a block takes twice as long to load as to compute, so that the front is to
    take over what the load has not begun. That is right."""

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata(metadata)
        side = self._scheduler
        side.chooser.load_rate = LoadsIn(1.0 / side._record_bytes)
        side.chooser.step_times = ComputesIn(0.5 / side._block_size)


class LoadsIn(LoadRate):
    """So many seconds per byte."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1.0)
        self._seconds = seconds

    def seconds(self, num_bytes: int) -> float:
        return num_bytes * self._seconds


class ComputesIn(StepTimes):
    """So many seconds per token."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return num_tokens * self._seconds


class TakesUnasked(SlowLoads):
    """The front takes over before the load has answered."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        for share in metadata.shares:
            for split in self._scheduler._splits.values():
                if split.load_id == share.load_id and split._asks:
                    split._floor = split._end - share.num_blocks
        return metadata


def check_hybrid(kind: type[PipelineConnector], monkeypatch: pytest.MonkeyPatch) -> CheckReport:
    monkeypatch.setattr(checking, "SCENARIOS", both_ends.SCENARIOS)
    return check_connector(kind, HYBRID, fail_fast=True)


@pytest.mark.parametrize("kind", [PipelineConnector, SlowLoads])
def test_a_hole_that_is_open_for_long_is_played(
    kind: type[PipelineConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_hybrid(kind, monkeypatch)
    report.raise_if_failed()
    ok = {one.property.id for one in report.results if one.verdict == "ok"}
    assert {"tokens-preempted", "aborted-in-every-state", "promises-kept"} <= ok


@pytest.mark.parametrize(
    ("kind", "property_ids"),
    [
        (WritesOn, {"loads-write-only-their-blocks"}),
        (LosesNoLoads, {"loads-write-only-their-blocks"}),
        (LetsGoAtOnce, {"loads-write-only-their-blocks", "loads-reported-when-done"}),
        (TakesUnasked, {"loads-write-only-their-blocks", "answers-lawful"}),
    ],
)
def test_what_goes_wrong_with_a_hole_open_is_found(
    kind: type[PipelineConnector], property_ids: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_hybrid(kind, monkeypatch)
    assert property_ids & set(report.failed), "\n".join(report.lines())


@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
def test_who_loads_from_one_end_is_not_asked_for_more(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt shows it; no later play begins. Its lanes are held back then: it ends all the
    same."""
    monkeypatch.setattr(checking, "SCENARIOS", both_ends.SCENARIOS)
    report = check_connector(PipelineConnector, {**HYBRID, "load_mode": mode}, deadline_s=10.0)
    report.raise_if_failed()
    (preempted,) = [one for one in report.results if one.property.id == "tokens-preempted"]
    assert (preempted.verdict, preempted.detail) == ("skipped", "it never loaded from the back")
