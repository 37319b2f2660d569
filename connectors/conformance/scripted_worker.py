"""The worker side of a `ScriptedConnector`: copies blocks and reports, when and as scripted.

Device thread. Pages are torch tensors or numpy arrays whose first dimension is the block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from interlace.connectors.conformance.script import Pages, Script
from interlace.connectors.conformance.scripted_metadata import (
    LoadBlock,
    LoadJob,
    ScriptedMetadata,
    ScriptedWorkerMetadata,
)
from interlace.engine.block_hash import BlockHash


class _AsyncLoad:
    def __init__(self, job: LoadJob, steps_left: int | None) -> None:
        self.job = job
        self.steps_left = steps_left
        self.brought = job
        """What of it is not computed instead."""
        self._reported: set[int] = set()

    def leave_out(self, num_blocks: int) -> None:
        """So many of the first blocks are computed."""
        self.brought = dataclasses.replace(self.job, blocks=self.job.blocks[num_blocks:])

    def take_failing(self, most: int | None) -> list[int]:
        """At most so many of its failing blocks, in order of position, each of them once."""
        failing = [i for i in self.brought.failing_block_ids if i not in self._reported][:most]
        self._reported.update(failing)
        return failing


@dataclasses.dataclass(slots=True)
class _Echo:
    """What was reported and will be again."""

    items: set[Any]
    times: int


class _Reports:
    """Reports of one kind, and their repetitions in later steps."""

    def __init__(self) -> None:
        self._echoes: list[_Echo] = []

    def take(self, new: Sequence[tuple[Any, int]]) -> set[Any]:
        """This step's report: `new` items, each with how often to repeat it, and echoes."""
        reported = set().union(*(echo.items for echo in self._echoes))
        for echo in self._echoes:
            echo.times -= 1
        self._echoes += [_Echo({item}, times) for item, times in new]
        self._echoes = [echo for echo in self._echoes if echo.times > 0]
        return reported | {item for item, _ in new}

    def forget(self, items: Collection[Any]) -> None:
        """Repeat these no more."""
        for echo in self._echoes:
            echo.items.difference_update(items)


class ScriptedWorker:
    """Follows the script and the scheduler side's messages."""

    def __init__(self, script: Script, rank: int) -> None:
        self._script = script
        self._rank = rank
        self._pages: dict[str, Any] = {}
        self._index: dict[str, int] = {}  # layer name -> place in `Pages`
        self._sync: tuple[LoadJob, ...] = ()
        self._async: list[_AsyncLoad] = []
        self._copies: dict[BlockHash, dict[int, Any]] = {}  # hash -> layer index -> page
        self._sending: dict[str, int | None] = {}  # request id -> steps left
        self._sent, self._received, self._invalid = _Reports(), _Reports(), _Reports()
        self._new_invalid: list[tuple[int, int]] = []

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Remember the layers' pages, in their order."""
        self._pages = dict(kv_caches)
        self._index = {name: index for index, name in enumerate(kv_caches)}

    def begin(self, metadata: ScriptedMetadata) -> None:
        """Take the step's loads."""
        self._sync = tuple(job for job in metadata.loads if not job.is_async)
        self._copies = {}
        for job in self._sync:
            times = self._script.rule(job.req_id).repeat_invalid
            self._new_invalid += [(block_id, times) for block_id in job.failing_block_ids]
        begun = [job for job in metadata.loads if job.is_async]
        self._received.forget({job.req_id for job in begun})
        for job in begun:
            delay = self._script.rule(job.req_id).load_delay
            self._async.append(_AsyncLoad(job, delay))

    def lose_loads(self, metadata: ScriptedMetadata) -> None:
        """The step hands on blocks of these: nothing is copied to them any more."""
        self._async = [one for one in self._async if one.job.req_id not in metadata.lost_loads]

    def load_layer(self, layer_name: str) -> None:
        """Fill one layer of the step's synchronous loads."""
        for job in self._sync:
            self._fill(job, layer_name)

    def _fill(self, job: LoadJob, layer_name: str) -> None:
        for block in job.blocks:
            self._fill_block(block, layer_name)

    def _fill_block(self, block: LoadBlock, layer_name: str) -> None:
        pages = self._pages[layer_name]
        if block.pages is None:
            pages[block.block_id] = _paint_of(pages, self._script.paint)
        else:
            first = self._rank * len(self._pages)
            pages[block.block_id] = block.pages[first + self._index[layer_name]]

    def copy_layer(self, metadata: ScriptedMetadata, layer_name: str, pages: Any) -> None:
        """Copy one layer of the blocks that the step saves."""
        for block_hash, block_id in metadata.saves.items():
            layers = self._copies.setdefault(block_hash, {})
            layers[self._index[layer_name]] = _host_copy(pages[block_id])

    def finished(
        self, metadata: ScriptedMetadata, finished_req_ids: set[str]
    ) -> tuple[set[str], set[str]]:
        """Ids of (sends, loads) that end with this step, and repetitions."""
        assert metadata.held <= finished_req_ids, "the scheduler side names ended requests only"
        # Either kind of report would free a held request's blocks.
        self._received.forget(metadata.held)
        for req_id in metadata.held:
            self._sending[req_id] = self._script.rule(req_id).send_delay
        sent = self._sent.take(
            [(i, self._script.rule(i).repeat_sending) for i in self._end_sends()]
        )
        received = self._received.take(
            [(i, self._script.rule(i).repeat_recving) for i in self._end_loads(metadata)]
        )
        return sent, received

    def _end_sends(self) -> list[str]:
        ended = [req_id for req_id, left in self._sending.items() if left == 0]
        going_on = {i: left for i, left in self._sending.items() if left != 0}
        self._sending = {i: left and left - 1 for i, left in going_on.items()}
        return ended

    def _end_loads(self, metadata: ScriptedMetadata) -> list[str]:
        """Fill and drop the loads whose time has come; count down the others."""
        for load in self._async:
            load.leave_out(metadata.not_brought.get(load.job.req_id, 0))
        ended = [load for load in self._async if load.steps_left == 0]
        self._async = [load for load in self._async if load.steps_left != 0]
        for load in ended:
            for layer_name in self._pages:
                self._fill(load.brought, layer_name)
            self._report_invalid(load, None)
        for load in self._async:
            if load.steps_left is not None:
                load.steps_left -= 1
            if self._script.rule(load.job.req_id).report_early:
                self._report_invalid(load, 1)
        return [load.job.req_id for load in ended]

    def _report_invalid(self, load: _AsyncLoad, most: int | None) -> None:
        """Report at most so many of the load's failing blocks with this step."""
        times = self._script.rule(load.job.req_id).repeat_invalid
        self._new_invalid += [(block_id, times) for block_id in load.take_failing(most)]

    def take_invalid(self) -> set[int]:
        """Blocks that failed in this step, and repetitions."""
        new, self._new_invalid = self._new_invalid, []
        return self._invalid.take(new)

    def take_copies(self, metadata: ScriptedMetadata) -> ScriptedWorkerMetadata | None:
        """What the step has copied, if it was to copy anything: blocks with all layers only."""
        if not metadata.saves:
            return None
        whole: dict[BlockHash, Pages] = {
            block_hash: [layers[index] for index in sorted(layers)]
            for block_hash, layers in self._copies.items()
            if len(layers) == len(self._pages)
        }
        return ScriptedWorkerMetadata({metadata.step_id: {self._rank: whole}})

    @property
    def is_idle(self) -> bool:
        """Whether no load and no held request is left, whatever is still repeated."""
        return not (self._async or self._sending)


def _host_copy(page: Any) -> Any:
    if isinstance(page, torch.Tensor):
        return page.detach().to("cpu", copy=True)
    return page.copy()


def _paint_of(pages: Any, paint: float) -> float:
    """`paint` as the pages can hold it."""
    if isinstance(pages, torch.Tensor):
        fits = pages.is_floating_point()
    else:
        fits = np.issubdtype(pages.dtype, np.floating)
    if fits:
        return paint
    return -1 if math.isnan(paint) else int(paint)
