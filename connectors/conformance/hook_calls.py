"""One call of a connector's hook, and how it reads in a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from interlace.engine.kv_connector import KVConnectorRole

SCHEDULER_HOOKS = frozenset(
    (
        "get_num_new_matched_tokens",
        "get_compute_end",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "request_finished_all_groups",
        "take_events",
        "get_finished_count",
        "bind_gpu_block_pool",
        "set_xfer_handshake_metadata",
        "reset_cache",
    )
)
WORKER_HOOKS = frozenset(
    (
        "register_kv_caches",
        "register_cross_layers_kv_cache",
        "set_host_xfer_buffer_ops",
        "get_handshake_metadata",
        "handle_preemptions",
        "bind_connector_metadata",
        "has_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "get_late_load_errors",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    )
)
BOTH_HOOKS = frozenset(("get_kv_connector_stats", "shutdown"))
_ROUTINE = frozenset(
    (
        "get_compute_end",
        "handle_preemptions",
        "bind_connector_metadata",
        "has_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "get_late_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "take_events",
    )
)
"""Calls of every step: they are told in a trace if they say something, or something ran in them."""


@dataclasses.dataclass(slots=True)
class HookCall:
    """A call that goes on or has ended."""

    role: KVConnectorRole
    rank: int
    connector: str
    """The class's name."""
    hook: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    answer: Any = None
    error: BaseException | None = None
    is_inherited: bool = False
    """Whether the base class's own method is called, which touches no pages."""
    has_line: bool = False
    """Whether a trace tells of its beginning."""

    @property
    def is_on_worker(self) -> bool:
        """Whether a worker side is called."""
        return self.role is KVConnectorRole.WORKER

    def arg(self, place: int, name: str) -> Any:
        """An argument, however it was passed."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    @property
    def is_worth_a_line(self) -> bool:
        """Whether the call, which has ended, is more than routine."""
        if self.hook not in _ROUTINE or self.error is not None:
            return True
        if self.hook in ("has_connector_metadata", "get_kv_connector_stats"):
            return False
        said = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return any(said)

    def describe(self) -> str:
        """Role, hook and arguments in short."""
        side = f"worker {self.rank}" if self.is_on_worker else "scheduler"
        return f"{side:9} {self.hook}({_describe_args(self)})"

    def describe_end(self) -> str:
        """What came of it, if that says anything."""
        if self.error is not None:
            return f" raised {type(self.error).__name__}: {self.error}"
        if self.answer is None or self.hook == "build_connector_meta":
            return ""
        return f" -> {_short(self.answer)}"


def _describe_args(call: HookCall) -> str:
    match call.hook:
        case "get_num_new_matched_tokens":
            return f"{_request(call.args[0])}, computed={call.args[1]}"
        case "get_compute_end":
            return _request(call.args[0])
        case "update_state_after_alloc":
            request, blocks, num_tokens = call.args
            return f"{_request(request)}, blocks={blocks.get_block_ids()[0]}, external={num_tokens}"
        case "build_connector_meta":
            return describe_step(call.args[0])
        case "request_finished" | "request_finished_all_groups":
            return f"{_request(call.args[0])}, blocks={call.args[1]}"
        case "update_connector_output":
            return _reports(call.args[0])
        case "wait_for_layer_load" | "save_kv_layer":
            return str(call.args[0]).removesuffix(".self_attn.attn")
        case "get_finished":
            return ", ".join(sorted(call.args[0]))
    return ""


def describe_step(output: Any) -> str:
    """A `SchedulerOutput` in short."""
    parts = [f"{i}: {n} tokens" for i, n in output.num_scheduled_tokens.items()]
    for name in ("preempted_req_ids", "finished_req_ids", "async_loading_req_ids"):
        ids = getattr(output, name)
        if ids:
            parts.append(f"{name.removesuffix('_req_ids')}={sorted(ids)}")
    return f"step {output.step_id}, {', '.join(parts) or 'no tokens'}"


def _request(request: Any) -> str:
    return str(getattr(request, "request_id", request))


def _reports(output: Any) -> str:
    said = {
        "sent": output.finished_sending and sorted(output.finished_sending),
        "received": output.finished_recving and sorted(output.finished_recving),
        "invalid": output.invalid_block_ids and sorted(output.invalid_block_ids),
    }
    return ", ".join(f"{name}={ids}" for name, ids in said.items() if ids)


def _short(answer: object) -> str:
    text = _plain(answer) or type(answer).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(answer: object) -> str:
    """The same text in every process: sets have no order of their own."""
    match answer:
        case str() | int() | float() | None:
            return str(answer)
        case set() | frozenset():
            return "{" + ", ".join(sorted(map(str, answer))) + "}"
        case tuple() | list():
            return "(" + ", ".join(_plain(one) or type(one).__name__ for one in answer) + ")"
    return ""
