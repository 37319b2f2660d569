"""What may be served: blocks whose KV was computed in a step that was applied, on good ground."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


class StoredTruth:
    """Hashes of blocks that any engine of this check has computed, applied and found good."""

    def __init__(self) -> None:
        self.good: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        """Those that were good when the connector said that it has forgotten all."""
        self.paint_numbers = itertools.count(1)
        """Of all blocks that any engine hands out."""
        self.homes: dict[bytes, set[int]] = {}
        """Hash -> paint numbers of the blocks that such KV was to be computed in."""

    def forget(self) -> None:
        """The connector was reset."""
        self.forgotten |= self.good
        self.good.clear()


class Promises(Detector):
    """Holds match queries to the truth."""

    hooks = frozenset(("get_num_new_matched_tokens",))

    def __init__(
        self,
        watch: Watch,
        truth: StoredTruth,
        block_size: int,
        generation_of: Callable[[int], int],
    ) -> None:
        """`generation_of`: block id -> the number of its paint."""
        self._watch = watch
        self._generation_of = generation_of
        self._truth = truth
        self._block_size = block_size
        self._epochs: dict[int, list[tuple[Request, int, int]]] = {}
        """Step id -> (request, its epoch, tokens computed when the step has ended)."""
        self.unanswered: set[str] = set()
        """Requests about which the latest query was answered with "ask again"."""

    def planned(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """A step was planned: `requests` by id."""
        members = [requests[request_id] for request_id in output.num_scheduled_tokens]
        for request in members:
            for block, block_hash in zip(request.blocks, request.block_hashes, strict=False):
                home = self._generation_of(block.block_id)
                self._truth.homes.setdefault(block_hash, set()).add(home)
        self._epochs[output.step_id] = [
            (request, request.epoch, request.num_computed_tokens) for request in members
        ]

    def applied(self, output: SchedulerOutput) -> None:
        """It was applied: what it filled is good, unless KV beneath it was bad."""
        for request, epoch, num_tokens in self._epochs.pop(output.step_id):
            if request.epoch == epoch:
                hashes = request.block_hashes[: num_tokens // self._block_size]
                self._truth.good.update(hashes)
                self._truth.forgotten.difference_update(hashes)

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if call.error is not None:
            return
        request, computed = call.args
        count = call.answer[0]
        self.unanswered.discard(request.request_id)
        if count is None and not request.is_finished:
            self.unanswered.add(request.request_id)
        self._watch.evidence["queries"] += 1
        if not count:
            return
        end = min((computed + count) // self._block_size, len(request.block_hashes))
        for index in range(computed // self._block_size, end):
            if request.block_hashes[index] not in self._truth.good:
                self._refuse(call, index)
                return

    def _refuse(self, call: HookCall, index: int) -> None:
        request = call.args[0]
        block_hash = request.block_hashes[index]
        name = f"{call.connector}.{call.hook} promised block {index} of {request.request_id}"
        if block_hash in self._truth.forgotten:
            property_id, why = "reset-forgets", "though reset_cache had forgotten it"
        elif block_hash in self._truth.homes:
            property_id = "saves-visible-when-whole"
            why = "but no step that filled a block of that hash was applied and found good"
        else:
            property_id = "loaded-kv-right"
            why = "but nobody ever computed a block of that hash: it is another one's KV"
        self._watch.findings.add(property_id, f"{name}, {why}.")
