"""Holds the hooks to the protocol's order: what runs when, and how often."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.engine.scheduler_output import SchedulerOutput

_STEP = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "layers",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
_PLACES = {hook: place for place, hook in enumerate(_STEP)}
_LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
_ONCE = frozenset(
    (
        "register_kv_caches",
        "register_cross_layers_kv_cache",
        "set_host_xfer_buffer_ops",
        "get_handshake_metadata",
        "get_finished_count",
        "bind_gpu_block_pool",
        "set_xfer_handshake_metadata",
    )
)


class CallOrder(Detector):
    """Engine and connector together: the hooks that ran, in which order, in every step."""

    def __init__(self, watch: Watch, layers: Sequence[str], num_ranks: int) -> None:
        """`layers` in order of depth."""
        self._watch = watch
        self._layers = list(layers)
        self._in_step: list[list[str]] = [[] for _ in range(num_ranks)]
        self._of_layers: list[list[tuple[str, str]]] = [[] for _ in range(num_ranks)]
        self._raised = False
        self._once: set[tuple[str, int, str]] = set()
        self._finished: set[str] = set()
        self._asked: set[str] = set()
        """Requests that were asked about and answered since their latest allocation."""

    def comes(self, request_id: str) -> None:
        """A request is queued. It may have the id of one that has ended, which ends again then."""
        self._finished.discard(request_id)
        self._asked.discard(request_id)

    def before(self, call: HookCall) -> None:
        """See `Detector`."""
        key = (call.role.name, call.rank, call.hook)
        if call.hook in _ONCE:
            if key in self._once:
                self._wrong(call, "ran twice")
            elif self._watch.step is not None:
                self._wrong(call, "ran after the first step")
            self._once.add(key)
        elif call.hook in ("request_finished", "request_finished_all_groups"):
            self._finish(call)
        elif call.hook == "update_state_after_alloc":
            self._allocate(call)
        elif call.is_on_worker:
            self._note_in_step(call)

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        self._raised |= call.error is not None
        if call.hook == "get_num_new_matched_tokens" and call.error is None:
            self._asked.add(call.args[0].request_id)

    def _wrong(self, call: HookCall, what: str) -> None:
        self._watch.findings.add("calls-in-order", f"{call.connector}.{call.hook} {what}.")

    def _finish(self, call: HookCall) -> None:
        request_id = call.args[0].request_id
        if request_id in self._finished:
            self._wrong(call, f"ran twice for {request_id}")
        self._finished.add(request_id)

    def _allocate(self, call: HookCall) -> None:
        request, _, num_tokens = call.args
        if num_tokens and request.request_id not in self._asked:
            self._wrong(call, f"ran for {request.request_id} without a match query before it")
        self._asked.discard(request.request_id)

    def _note_in_step(self, call: HookCall) -> None:
        if call.hook in _LAYER_HOOKS:
            self._of_layers[call.rank].append((call.hook, call.args[0]))
            self._place(call, "layers")
        elif call.hook in _PLACES:
            self._place(call, call.hook)

    def _place(self, call: HookCall, hook: str) -> None:
        so_far = self._in_step[call.rank]
        if not self._watch.step_is_running:
            self._wrong(call, "ran outside of a step")
        elif so_far and _PLACES[so_far[-1]] > _PLACES[hook]:
            self._wrong(call, f"ran after {so_far[-1]}")
        elif hook in so_far and hook != "layers":
            self._wrong(call, "ran twice in one step")
        if not so_far or so_far[-1] != hook:
            so_far.append(hook)

    # ---------------------------------------------------------------- at the end of a step

    def end_step(self, output: SchedulerOutput) -> None:
        """A step was executed: nothing may be missing."""
        for rank, so_far in enumerate(self._in_step):
            self._check_step(output, rank, so_far)
        self._in_step = [[] for _ in self._in_step]
        self._of_layers = [[] for _ in self._of_layers]
        self._raised = False
        self._watch.evidence["steps"] += 1

    def _check_step(self, output: SchedulerOutput, rank: int, so_far: list[str]) -> None:
        if output.kv_connector_metadata.is_idle:
            if so_far:
                self._add(f"{', '.join(so_far)} ran in step {output.step_id}, which is idle.")
            return
        has_tokens = output.total_num_scheduled_tokens > 0
        optional = {"layers", "wait_for_save"} if not has_tokens else {"layers"}
        wanted = [hook for hook in _STEP if hook not in optional]
        missing = [hook for hook in wanted if hook not in so_far]
        extra = [] if has_tokens else [hook for hook in optional if hook in so_far]
        if missing:
            self._add(f"{', '.join(missing)} did not run in step {output.step_id}.")
        if extra:
            self._add(f"{', '.join(extra)} ran in step {output.step_id}, which has no tokens.")
        self._check_layers(output, self._of_layers[rank])

    def _check_layers(self, output: SchedulerOutput, calls: list[tuple[str, str]]) -> None:
        """Wait and save of each layer, in order of depth; a failed wait ends the waits."""
        whole = [(hook, layer) for layer in self._layers for hook in _LAYER_HOOKS]
        saves = [call for call in whole if call[0] == "save_kv_layer"]
        is_whole = calls == whole
        if self._raised:
            is_whole = [call for call in calls if call[0] == "save_kv_layer"] == saves
        if calls and not is_whole:
            self._add(f"the layer hooks of step {output.step_id} were {calls}, not {whole}.")

    def _add(self, message: str) -> None:
        self._watch.findings.add("calls-in-order", message)
