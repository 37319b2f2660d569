"""Connectors that do not report what has happened, or report what has not."""

from __future__ import annotations

from memory_broken import Broken
from memory_connector import MemoryConnector
from memory_worker import Load


class NeverLetsGo(MemoryConnector):
    """Holds requests that end while a save is open, and never says that it is over."""

    def take_sent(self) -> set[str]:
        super().take_sent()
        return set()


class LetsGoWhenAnotherEnds(MemoryConnector):
    """Lets a held request go when the next one is held: the last one stays for ever."""

    def take_sent(self) -> set[str]:
        if len(self._sending) < 2:
            return set()
        kept = max(self._sending)
        self._sending.discard(kept)
        sent = super().take_sent()
        self._sending.add(kept)
        return sent


class ForgetsLoadsOfAborted(MemoryConnector):
    """Cancels the load of a request that was aborted, and says nothing of it: its blocks wait for
    a report for ever."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for load in self._background_loads:
            if load.order.req_id in finished_req_ids:
                for gate in load.gates:
                    self.await_gate(gate)
        self._background_loads = [
            load for load in self._background_loads if load.order.req_id not in finished_req_ids
        ]
        return super().get_finished(finished_req_ids)


class HidesFailures(MemoryConnector):
    """Reports no block that could not be loaded: whatever lies in it is served as right KV."""

    def blocks_to_report(self, load: Load) -> set[int]:
        return set()


class ReportsOneFailureOnly(MemoryConnector):
    """Gives up at the first lost block and reports that one, not the others that failed too."""

    def blocks_to_report(self, load: Load) -> set[int]:
        lost = [one.block_id for one in load.order.blocks if one.block_id in load.lost]
        return set(lost[:1])


class ReportsWholeLoads(MemoryConnector):
    """Reports all blocks of a load of which any failed: what is good is computed again."""

    def blocks_to_report(self, load: Load) -> set[int]:
        return {block.block_id for block in load.order.blocks} if load.lost else set()


class ReportsFailuresLate(MemoryConnector):
    """Reports the blocks of an asynchronous load that failed one step after its end: by then the
    request computes on them, and others are served from them."""

    _late: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = super().get_block_ids_with_load_errors()
        late, self._late = self._late, frozenset(invalid)
        return set(late)


class ReportsLoadsTwice(MemoryConnector):
    """Reports the end of each load in two steps: by then the id may load something else."""

    _again: frozenset[str] = frozenset()

    def take_received(self) -> set[str]:
        received = super().take_received()
        again, self._again = self._again, frozenset(received)
        return received | again


class LetsGoTwice(MemoryConnector):
    """Reports each held request in two steps."""

    _again: frozenset[str] = frozenset()

    def take_sent(self) -> set[str]:
        sent = super().take_sent()
        again, self._again = self._again, frozenset(sent)
        return sent | again


class LetsGoWhatItNeverHeld(MemoryConnector):
    """Reports every ended request as sent, also those that it did not hold."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        not_held = finished_req_ids - self._sending - self._step.held
        return (sent or set()) | not_held or None, received


class ReportsUnknownBlocks(MemoryConnector):
    """Reports a failed block by its position in the request, not by its id."""

    def blocks_to_report(self, load: Load) -> set[int]:
        return {
            place + 10_000
            for place, block in enumerate(load.order.blocks)
            if block.block_id in load.lost
        }


class OneRankKeepsQuiet(MemoryConnector):
    """Reports the end of loads from rank 0 alone, though every rank has to."""

    def take_received(self) -> set[str]:
        received = super().take_received()
        return received if self._rank == 0 else set()


_ASYNC = {"load_async": True}

BROKEN = [
    Broken(NeverLetsGo, "promises-kept", seen_in="tokens-cold"),
    Broken(NeverLetsGo, "promises-kept", {"save_async": True}, seen_in="tokens-cold"),
    Broken(LetsGoWhenAnotherEnds, "promises-kept", seen_in="tokens-cold"),
    Broken(ForgetsLoadsOfAborted, "promises-kept", _ASYNC, seen_in="aborted-in-every-state"),
    Broken(OneRankKeepsQuiet, "promises-kept", _ASYNC, workers=2, seen_in="tokens-hit"),
    Broken(HidesFailures, "failures-exact"),
    Broken(HidesFailures, "failures-exact", _ASYNC),
    Broken(ReportsOneFailureOnly, "failures-exact"),
    Broken(ReportsWholeLoads, "failures-exact"),
    Broken(ReportsFailuresLate, "failures-exact", _ASYNC),
    Broken(ReportsLoadsTwice, "reported-once", _ASYNC, seen_in="tokens-hit"),
    Broken(LetsGoTwice, "reported-once", seen_in="tokens-cold"),
    Broken(LetsGoWhatItNeverHeld, "reports-known-ids", seen_in="tokens-cold"),
    Broken(ReportsUnknownBlocks, "reports-known-ids", seen_in="failures-exact"),
]
