"""Judges what loads have brought, at the moments that the protocol names."""

from __future__ import annotations

from collections.abc import Iterable

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.load_examiner import LoadExaminer, Suspect
from interlace.connectors.conformance.load_ledger import Load, LoadLedger
from interlace.connectors.conformance.pages import Content, Pages
from interlace.connectors.conformance.stored_truth import StoredTruth
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.layers.graph_mode import GraphMode

_NO_HOOKS = (
    "the step was replayed as one CUDA graph, which calls no hooks of layers"
    " (requires_piecewise_for_cudagraph)"
)


class LoadJudge(Detector):
    """Within a step when `wait_for_layer_load` returns, or when `start_load_kv` does if the step is
    one CUDA graph; else when the load is reported as received.

    Verdicts fall when the worker has said which blocks are lost, of a load within the step when it
    has been asked for late ones; of a load from the back, when the
    connector has heard of its end too, and has told the engine where it began.
    """

    hooks = frozenset(
        (
            "start_load_kv",
            "wait_for_layer_load",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_late_load_errors",
            "get_compute_end",
            "update_connector_output",
            "build_connector_meta",
        )
    )

    def __init__(
        self,
        watch: Watch,
        pages: Pages,
        ledger: LoadLedger,
        examiner: LoadExaminer,
        truth: StoredTruth,
    ) -> None:
        self._truth = truth
        self._watch = watch
        self._pages = pages
        self._ledger = ledger
        self._examiner = examiner
        self._suspects: dict[tuple[Load, int, int], Suspect] = {}
        """(load, rank, block id) -> what was wrong with it first."""
        self._received: dict[int, list[Load]] = {}
        """Rank -> loads that the last `get_finished` reported."""
        self._undecided: dict[str, list[tuple[HookCall, Load]]] = {}
        """Request id -> its load from the back, and the calls that said so, of each worker that has
        reported it as received."""
        self._heard: set[str] = set()
        """Of these, whose end the scheduler side has heard of."""
        self.lost_hashes: set[bytes] = set()
        """Of blocks that were damaged in the connector's store."""

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        match call.hook:
            case "wait_for_layer_load" if call.error is None:
                self._end_of_wait(call.rank, call.args[0])
            case "start_load_kv" if call.error is None:
                self._start_of_step(call)
            case "wait_for_layer_load" | "start_load_kv":
                self._failed_wait(call)
            case "get_finished" if call.error is None:
                self._end_of_async(call)
            case "get_block_ids_with_load_errors" if call.error is None:
                self._verdict(call, self._received.pop(call.rank, []))
            case "get_late_load_errors" if call.error is None:
                self._verdict(call, self._ledger.running_step_loads(call.rank))
            case "update_connector_output":
                self._heard |= (call.args[0].finished_recving or set()) & self._undecided.keys()
            case "get_compute_end" if call.error is None:
                if call.args[0].request_id in self._heard:
                    self._late_verdict(call.args[0].request_id, call.answer)
            case "build_connector_meta" if call.error is None:
                for request_id in call.args[0].preempted_req_ids:
                    self._late_verdict(request_id, None)  # nobody will use what came

    def _end_of_wait(self, rank: int, layer: str) -> None:
        for load in self._ledger.running_step_loads(rank):
            load.waited.add((rank, layer))
            self._examine(load, rank, layer)

    def _start_of_step(self, call: HookCall) -> None:
        """A step that is one graph calls no more hooks: its loads are due."""
        if call.args[0].cudagraph_runtime_mode is not GraphMode.FULL:
            return
        for load in self._ledger.running_step_loads(call.rank):
            load.in_graph = True
        for layer in self._pages.attention_layers:
            self._end_of_wait(call.rank, layer)

    def _failed_wait(self, call: HookCall) -> None:
        """The engine takes all blocks of the step's loads for lost."""
        for load in self._ledger.running_step_loads(call.rank):
            load.invalid |= {(call.rank, block_id) for block_id in load.block_ids}

    def _end_of_async(self, call: HookCall) -> None:
        received = self._received[call.rank] = []
        for request_id in sorted(call.answer[1] or ()):
            load = self._ledger.load_to_report(request_id, call.rank)
            if load is None:
                continue
            received.append(load)
            for layer in self._pages.attention_layers:
                self._examine(load, call.rank, layer)

    def _examine(self, load: Load, rank: int, layer: str) -> None:
        for block_id, suspect in self._examiner.suspects(load, rank, layer):
            self._suspects.setdefault((load, rank, block_id), suspect)

    # ---------------------------------------------------------------- judging

    def _verdict(self, call: HookCall, loads: Iterable[Load]) -> None:
        """Of loads that end with this step on that worker: those beside the steps, or within it."""
        for load in loads:
            if load.is_from_the_back:
                self._undecided.setdefault(load.request.request_id, []).append((call, load))
                self._ledger.end(load, call.rank, is_complete=False)
                continue
            if not load.request.is_finished:
                self._judge(call, load)
            is_complete = not load.invalid and not self._has_suspects(load)
            self._ledger.end(load, call.rank, is_complete=is_complete)
            self._forget_suspects(load, call.rank)
            if is_complete and not load.open_ranks:
                self._pages.nudge(load.block_ids)

    def _late_verdict(self, request_id: str, compute_end: int | None) -> None:
        """What was received is used from `compute_end` on; not at all if that is None."""
        self._heard.discard(request_id)
        for call, load in self._undecided.pop(request_id, ()):
            if compute_end is not None and not load.request.is_finished:
                self._watch.evidence["loads from the back"] += 1
                self._judge(call, load, compute_end)
            self._forget_suspects(load, call.rank)

    def _forget_suspects(self, load: Load, rank: int) -> None:
        for block_id in load.block_ids:
            self._suspects.pop((load, rank, block_id), None)

    def _has_suspects(self, load: Load) -> bool:
        return any(suspected is load for suspected, _, _ in self._suspects)

    def _judge(self, call: HookCall, load: Load, first: int = 0) -> None:
        """`first`: tokens before it are not the load's."""
        self._check_waits(load, call.rank)
        parts = load.parts(self._ledger.block_size)
        for (block_id, begin, _), block_hash in zip(parts, load.hashes, strict=True):
            if begin < first:
                continue
            suspect = self._suspects.get((load, call.rank, block_id))
            is_told = (call.rank, block_id) in load.invalid
            is_lost = block_hash in self.lost_hashes
            if is_told:
                self._watch.evidence["lost blocks reported"] += 1
                self._watch.evidence["unprovoked failures"] += not is_lost
                if suspect is None and not is_lost:
                    self._over_reported(call, load, block_id)
            elif suspect is not None:
                self._not_right(load, block_id, suspect, is_lost=is_lost, rank=call.rank)

    def _check_waits(self, load: Load, rank: int) -> None:
        """A layer that nobody waited for was computed from whatever was there."""
        layers = set(self._pages.attention_layers)
        missing = layers - {layer for of_rank, layer in load.waited if of_rank == rank}
        blocks = {(rank, block_id) for block_id in load.block_ids}
        if load.is_async or not missing or blocks <= load.invalid:
            return
        self._watch.findings.add(
            "layer-loads-complete",
            f"{load.name} was due in this step, but has_connector_metadata said that there was"
            f" none, so that nobody waited for {', '.join(sorted(missing))}.",
        )

    def _over_reported(self, call: HookCall, load: Load, block_id: int) -> None:
        self._watch.findings.add(
            "failures-exact",
            f"block {block_id} of {load.name} was reported as lost, but nothing had failed and its"
            " KV is right.",
        )

    def _not_right(
        self, load: Load, block_id: int, suspect: Suspect, *, is_lost: bool, rank: int
    ) -> None:
        when = "was reported as received" if load.is_async else "had been waited for"
        if load.in_graph:
            when = f"was needed when start_load_kv returned, since {_NO_HOOKS}"
        what = f"block {block_id} of {load.name} {when}, but in {suspect.layer}"
        if is_lost:
            property_id, how = "failures-exact", "it is not right, and was not reported as lost"
        elif suspect.content is Content.UNTOUCHED:
            property_id = "loads-reported-when-done" if load.is_async else "layer-loads-complete"
            how = "not all of it was in place"
        elif suspect.content is Content.PAINTED:
            property_id, how = self._explain_paint(load, block_id, suspect)
        elif self._examiner.is_of_another_rank(load, block_id, suspect.layer, rank):
            property_id, how = "workers-agree", "it holds the KV heads of another worker"
        else:
            property_id, how = "loaded-kv-right", "it holds other KV than that of its tokens"
        self._watch.findings.add(property_id, f"{what} {how}.")

    def _explain_paint(self, load: Load, block_id: int, suspect: Suspect) -> tuple[str, str]:
        """Whether it was copied before its KV was there, or when that was there no more."""
        block_hash = load.hashes[load.block_ids.index(block_id)]
        homes = self._truth.homes.get(block_hash or b"", set())
        if suspect.painted <= homes:
            return "saves-visible-when-whole", "it holds what was saved before it was computed"
        return "saves-fenced", "it holds what was read from a block that had been handed on"
