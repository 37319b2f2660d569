"""ExampleHiddenStatesConnector's scheduler side: which step completes which prompt.

On the event loop, no I/O. Block tables come from each step's message, so preemption, resumption
and prefix hits need no care. A request has at most one save that is not withdrawn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.connectors.example_hidden_states_files import path_of
from interlace.connectors.example_hidden_states_messages import (
    HiddenStatesMetadata,
    HiddenStatesReport,
    HiddenStatesStats,
    SaveOrder,
)
from interlace.connectors.step_tables import added_blocks, computed_before
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

PATH_KEY = "hidden_states_path"
ERROR_KEY = "hidden_states_error"
_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclasses.dataclass(slots=True, eq=False)
class _Save:
    """One order to save the states of a prompt."""

    save_id: int
    beneath: frozenset[int]
    """The blocks of the prompt."""
    error: str | None = None
    """Why there is no file."""
    ended: Request | None = None
    """The request, if it ended with the step that the report of this save comes with: it was told
    then that the file is there."""


@dataclasses.dataclass(slots=True, eq=False)
class _Tracked:
    """A request that was in a step and has not ended."""

    token_ids: tuple[int, ...]
    """Its prompt."""
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """All of its blocks, in order of position."""
    save: _Save | None = None


class HiddenStatesScheduler:
    """See the module's docstring. The methods are the protocol's, on the event loop."""

    def __init__(self, root: Path, *, block_size: int) -> None:
        """`root` is the folder of all files; `block_size` in tokens."""
        self._root = root
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._open: dict[int, _Save] = {}
        """Save -> one whose report has not come."""
        self._last_save_id = 0
        self._withdrawn: set[int] = set()
        self._settled: set[int] = set()
        self._stats = HiddenStatesStats()
        self._has_warned = False

    # ---------------------------------------------------------------- a step's message

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HiddenStatesMetadata:
        """Saves of the prompts that the step completes, and what became of earlier ones."""
        self._follow(scheduler_output)
        withdrawn, self._withdrawn = frozenset(self._withdrawn), set()
        settled, self._settled = frozenset(self._settled), set()
        return HiddenStatesMetadata(
            tuple(self._orders(scheduler_output)), withdrawn=withdrawn, settled=settled
        )

    def _follow(self, output: SchedulerOutput) -> None:
        """Keep the block tables."""
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.setdefault(new.req_id, _Tracked(new.prompt_token_ids))
            tracked.block_ids = list(new.block_ids[0])
        for req_id, added, resumed in added_blocks(output):
            table = self._tracked[req_id].block_ids
            if resumed:
                table.clear()
            table += added

    def _orders(self, output: SchedulerOutput) -> Iterator[SaveOrder]:
        before = computed_before(output)
        for req_id, num_new in output.num_scheduled_tokens.items():
            tracked = self._tracked[req_id]
            completes = before[req_id] < len(tracked.token_ids) <= before[req_id] + num_new
            if completes and (tracked.save is None or tracked.save.error is not None):
                yield self._order(req_id, tracked)

    def _order(self, req_id: str, tracked: _Tracked) -> SaveOrder:
        self._last_save_id += 1
        num_blocks = -(-len(tracked.token_ids) // self._block_size)
        block_ids = tuple(tracked.block_ids[:num_blocks])
        tracked.save = _Save(self._last_save_id, frozenset(block_ids))
        self._open[self._last_save_id] = tracked.save
        return SaveOrder(self._last_save_id, req_id, tracked.token_ids, block_ids)

    # ---------------------------------------------------------------- a step was applied

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bad blocks first: what was saved from them is withdrawn, and saved again when the
        prompt has been computed again."""
        invalid = connector_output.invalid_block_ids
        for tracked in self._tracked.values():
            if tracked.save is not None and not tracked.save.beneath.isdisjoint(invalid):
                self._withdraw(tracked.save)
                tracked.save = None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, HiddenStatesReport):
            self._take(report)

    def _take(self, report: HiddenStatesReport) -> None:
        """What is not open any more was withdrawn."""
        for save_id in report.written & self._open.keys():
            self._stats.count("written")
            if self._open.pop(save_id).ended is not None:
                self._settled.add(save_id)
        for save_id in report.failed.keys() & self._open.keys():
            self._fail(self._open.pop(save_id), report.failed[save_id])

    def _fail(self, save: _Save, error: str) -> None:
        self._stats.count("failed")
        if not self._has_warned:
            self._has_warned = True
            logger.warning("hidden states could not be saved, and that is told once: %s", error)
        save.error = error
        if save.ended is None:
            return
        # The answer goes out when the whole step is applied: there is still time to correct it.
        params = save.ended.response_kv_transfer_params
        save.ended = None
        if params is not None and params.pop(PATH_KEY, None) is not None:
            params[ERROR_KEY] = error

    def _withdraw(self, save: _Save) -> None:
        self._open.pop(save.save_id, None)
        self._withdrawn.add(save.save_id)

    # ---------------------------------------------------------------- the end of a request

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """The path of its file, or why there is none; None if it did not end well."""
        tracked = self._tracked.pop(request.request_id, None)
        save = None if tracked is None else tracked.save
        if save is None:
            return None
        if request.status not in _ENDED_WELL:
            self._withdraw(save)
            return None
        if save.error is not None:
            return {ERROR_KEY: save.error}
        if save.save_id in self._open:
            save.ended = request
        else:
            self._settled.add(save.save_id)
        return {PATH_KEY: str(path_of(self._root, request.request_id))}

    # ---------------------------------------------------------------- the rest

    def take_stats(self) -> HiddenStatesStats | None:
        """What was counted since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, HiddenStatesStats()
        return stats

    def __repr__(self) -> str:
        return f"<HiddenStatesScheduler requests={len(self._tracked)} open={sorted(self._open)}>"
