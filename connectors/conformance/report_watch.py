"""Holds reports to what is awaited: each end once, and nothing that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.load_ledger import LoadLedger
from interlace.connectors.conformance.watch import Detector, Watch


class ReportWatch(Detector):
    """Ids and blocks that worker sides report. Told after the ledger, which knows what goes on."""

    hooks = frozenset(
        (
            "update_state_after_alloc",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_late_load_errors",
        )
    )

    def __init__(
        self,
        watch: Watch,
        ledger: LoadLedger,
        num_ranks: int,
        generation_of: Callable[[int], int],
    ) -> None:
        self._watch = watch
        self._ledger = ledger
        self._generation_of = generation_of
        self._told_of_end: list[set[str]] = [set() for _ in range(num_ranks)]
        """By rank: ids of whose end the worker was told."""
        self._reported: set[tuple[int, str, str]] = set()
        """(rank, kind, id) that were reported and awaited."""
        self._lost_blocks: set[tuple[int, int, int]] = set()
        """(rank, block id, generation) that were reported as lost."""

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if call.error is not None:
            return
        match call.hook:
            case "update_state_after_alloc":
                self._forget_earlier_load(call.args[0].request_id)
            case "get_finished":
                self._told_of_end[call.rank] |= call.args[0]
                self._check_sent(call, call.answer[0] or ())
                self._check_received(call, call.answer[1] or ())
            case "get_block_ids_with_load_errors" | "get_late_load_errors":
                self._check_invalid(call, call.answer)

    def _forget_earlier_load(self, request_id: str) -> None:
        """If another load of the request is ordered, its end may be reported too."""
        if any(load.request.request_id == request_id for load in self._ledger.loads):
            self._reported -= {
                (rank, "received", request_id) for rank in range(len(self._told_of_end))
            }

    def _check_sent(self, call: HookCall, ids: Iterable[str]) -> None:
        for request_id in sorted(ids):
            self._watch.evidence["reports"] += 1
            waiting = self._ledger.held.get(request_id, set())
            if call.rank not in waiting or request_id not in self._told_of_end[call.rank]:
                self._refuse(call, "sent", request_id, "which is not held")
                continue
            waiting.discard(call.rank)
            self._reported.add((call.rank, "sent", request_id))
            if not waiting:
                del self._ledger.held[request_id]

    def _check_received(self, call: HookCall, ids: Iterable[str]) -> None:
        for request_id in sorted(ids):
            self._watch.evidence["reports"] += 1
            if self._ledger.load_to_report(request_id, call.rank) is None:
                self._refuse(call, "received", request_id, "which is not being loaded")
            else:
                self._reported.add((call.rank, "received", request_id))

    def _refuse(self, call: HookCall, kind: str, request_id: str, why: str) -> None:
        name = f"{call.connector}.{call.hook} reported {request_id} as {kind}"
        if (call.rank, kind, request_id) in self._reported:
            self._watch.findings.add("reported-once", f"{name} again.")
        else:
            self._watch.findings.add("reports-known-ids", f"{name}, {why}.")

    def _check_invalid(self, call: HookCall, block_ids: Iterable[int]) -> None:
        name = f"{call.connector}.{call.hook} reported block"
        for block_id in sorted(block_ids):
            self._watch.evidence["reports"] += 1
            generation = self._generation_of(block_id)
            if (call.rank, block_id, generation) in self._lost_blocks:
                self._watch.findings.add("reported-once", f"{name} {block_id} again.")
                continue
            self._lost_blocks.add((call.rank, block_id, generation))
            loads = [one for one in self._ledger.running(call.rank) if block_id in one.block_ids]
            if loads:
                for load in loads:
                    load.invalid.add((call.rank, block_id))
            elif self._ledger.exists(block_id):
                where = self._ledger.describe(block_id)
                self._watch.findings.add(
                    "failures-exact", f"{name} {block_id}, {where}, which is not being loaded."
                )
            else:
                self._watch.findings.add(
                    "reports-known-ids", f"{name} {block_id}, which does not exist."
                )
