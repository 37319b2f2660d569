"""`check_connector` with a connector that loads from the back while its requests are computed: what
is right passes, and what is not is found, on whichever worker."""

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
)
from interlace.connectors.conformance.scripted_metadata import ScriptedMetadata
from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorOutput
from interlace.engine.request import Request


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
