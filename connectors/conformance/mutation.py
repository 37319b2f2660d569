"""Sees what hooks change that is not theirs, and metadata that outlives its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

_OUTPUT_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SchedulerOutput)
    if field.name != "kv_connector_metadata"
)
_REQUEST_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
)


class Mutation(Detector):
    """Compares scheduler outputs and requests before and after the hooks that get them."""

    hooks = frozenset(("build_connector_meta", *_REQUEST_HOOKS))

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._before: list[Any] = []
        self._outputs: dict[int, tuple[SchedulerOutput, object]] = {}
        """Step id -> its output and what that was like when it was planned."""

    def before(self, call: HookCall) -> None:
        """See `Detector`."""
        self._before.append(_picture(call))

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        before, now = self._before.pop(), _picture(call)
        if call.hook == "build_connector_meta":
            self._outputs[call.args[0].step_id] = (call.args[0], now)
            self._watch.evidence["outputs"] += 1
        if before == now:
            return
        name = f"{call.connector}.{call.hook}"
        if call.hook == "build_connector_meta":
            fields = [n for n, a, b in zip(_OUTPUT_FIELDS, before, now, strict=True) if a != b]
            self._add(f"{name} changed the scheduler's output: {', '.join(fields)}.")
        else:
            is_match = call.hook == "get_num_new_matched_tokens"
            property_id = "match-has-no-effects" if is_match else "output-not-mutated"
            message = f"{name} changed the request {call.args[0].request_id}."
            self._watch.findings.add(property_id, message)

    def end_step(self, step_id: int) -> None:
        """A step was executed: its output, which the connector may have kept, is as it was."""
        output, then = self._outputs.pop(step_id, (None, None))
        if output is not None and _freeze_output(output) != then:
            self._add(f"the scheduler's output of step {step_id} was changed after it was built.")

    def _add(self, message: str) -> None:
        self._watch.findings.add("output-not-mutated", message)


class MetadataCleared(Detector):
    """When `clear_connector_metadata` has run, nothing is bound."""

    hooks = frozenset(("clear_connector_metadata",))

    def __init__(self, watch: Watch, worker_of: Callable[[int], KVConnectorBase_V1]) -> None:
        """`worker_of`: rank -> the instance."""
        self._watch = watch
        self._worker_of = worker_of

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if call.error is not None:
            return
        self._watch.evidence["cleared"] += 1
        worker = self._worker_of(call.rank)
        if worker._connector_metadata is not None or worker.has_connector_metadata():
            self._watch.findings.add(
                "metadata-cleared",
                f"{call.connector}.{call.hook} left metadata bound: let it call super.",
            )


def _picture(call: HookCall) -> Any:
    if call.hook == "build_connector_meta":
        return _freeze_output(call.args[0])
    return _freeze_request(call.args[0])


def _freeze_output(output: SchedulerOutput) -> tuple[str, ...]:
    """As text, which is made fast and stays what it is."""
    return tuple(repr(getattr(output, name)) for name in _OUTPUT_FIELDS)


def _freeze_request(request: Request) -> tuple[object, ...]:
    """All but `kv_transfer_params`, which is the connector's to change."""
    return (
        request.request_id,
        request.prompt_token_ids,
        tuple(request.all_token_ids),
        tuple(request.block_hashes),
        tuple(block.block_id for block in request.blocks),
        request.num_computed_tokens,
        request.status,
        request.cache_salt,
    )
