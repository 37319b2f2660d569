"""Holds each answer of a hook to the protocol, and tells of hooks that raise."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Set
from typing import Any

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorWorkerMetadata

_FRAMES = 3
"""Of a connector's traceback that are shown."""
_MAY_FAIL = ("start_load_kv", "wait_for_layer_load")
"""Hooks whose exception says that the step's loads have failed."""


class LawfulAnswers(Detector):
    """Checks what comes back, before the engine does."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.loads_may_raise = False
        """Whether a store was damaged, so that hooks of loading may raise."""

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if call.error is not None:
            self._raised(call, call.error)
            return
        check = _CHECKS.get(call.hook)
        rule = None if check is None else check(call)
        if rule is not None:
            self._watch.findings.add(
                "answers-lawful", f"{call.connector}.{call.hook} answered {call.answer!r}; {rule}."
            )

    def _raised(self, call: HookCall, error: BaseException) -> None:
        if call.hook in _MAY_FAIL and self.loads_may_raise:
            self._watch.evidence["failing loads raised"] += 1
            return
        self._watch.findings.add("hooks-do-not-raise", describe_error(call, error))


def describe_error(call: HookCall, error: BaseException) -> str:
    """Connector, hook, exception, and where the connector's own code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.endswith("conformance/watch.py")]
    lines = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in own[-_FRAMES:]
    ]
    told = f"{call.connector}.{call.hook} raised {type(error).__name__}: {error}"
    return "\n".join([told, *(f"  {line}" for line in lines)])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _match(call: HookCall) -> str | None:
    request, computed = call.args
    most = request.num_tokens - computed
    match call.answer:
        case (None, bool()):
            return None
        case (count, bool() as is_async) if _is_count(count):
            if not 0 <= count <= most:
                return f"{request.request_id} has {most} tokens beyond the computed ones"
            if is_async and count == 0:
                return "a load without tokens cannot be asynchronous"
            return None
    return "it must be (tokens or None, whether asynchronous)"


def _compute_end(call: HookCall) -> str | None:
    request = call.args[0]
    if call.answer is None or (_is_count(call.answer) and 0 <= call.answer < request.num_tokens):
        return None
    return f"it must be None or a number of tokens, below the {request.num_tokens} that there are"


def _meta(call: HookCall) -> str | None:
    if call.answer is None:
        return "return a KVConnectorMetadata in every step"
    if not isinstance(call.answer, KVConnectorMetadata):
        return "it must be a KVConnectorMetadata"
    return None


def _finished(call: HookCall) -> str | None:
    match call.answer:
        case (bool(), dict() | None):
            return None
    return "it must be (whether the blocks stay, a dict or None)"


def _ended(call: HookCall) -> str | None:
    match call.answer:
        case (Set() | None as sent, Set() | None as received):
            ids = [*(sent or ()), *(received or ())]
            return None if all(isinstance(i, str) for i in ids) else "ids must be strings"
    return "it must be (set or None, set or None)"


def _invalid(call: HookCall) -> str | None:
    if isinstance(call.answer, Set) and all(_is_count(i) for i in call.answer):
        return None
    return "it must be a set of block ids"


def _worker_meta(call: HookCall) -> str | None:
    if call.answer is None or isinstance(call.answer, KVConnectorWorkerMetadata):
        return None
    return "it must be a KVConnectorWorkerMetadata or None"


def _reset(call: HookCall) -> str | None:
    return None if call.answer in (None, True, False) else "it must be True, False or None"


def _nothing(call: HookCall) -> str | None:
    return None if call.answer is None else "it returns nothing"


_CHECKS: dict[str, Callable[[HookCall], Any]] = {
    "get_num_new_matched_tokens": _match,
    "get_compute_end": _compute_end,
    "build_connector_meta": _meta,
    "request_finished": _finished,
    "request_finished_all_groups": _finished,
    "get_finished": _ended,
    "get_block_ids_with_load_errors": _invalid,
    "build_connector_worker_meta": _worker_meta,
    "reset_cache": _reset,
    "update_state_after_alloc": _nothing,
}
