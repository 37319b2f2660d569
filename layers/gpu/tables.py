"""Block tables that stay on the device: a step uploads only what was added since the last one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.device_copies import to_device
from interlace.layers.gpu.inputs import IntArray
from interlace.layers.runner_state import RunnerRequest

NOTHING: IntArray = np.empty(0, dtype=np.int64)


class BlockTables:
    """A row for each request that runs, and each one's newest token.

    The last row is nobody's: it names the null block throughout, for padding.
    """

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        """`num_rows`: requests that may run at once; `num_columns`: blocks of one request."""
        self.nobody = num_rows
        """The row of padding."""
        self.tables = torch.zeros((num_rows + 1, num_columns), dtype=torch.int32, device=device)
        self._flat = self.tables.view(-1)
        self.newest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        """int64 [rows]: the token that was sampled last."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._num_uploaded: dict[str, int] = {}

    def follow(self, output: SchedulerOutput) -> None:
        """Give rows to requests that begin or resume, take those of ended and preempted ones."""
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            row = self._rows.pop(req_id, None)
            if row is not None:
                self._free.append(row)
                del self._num_uploaded[req_id]
        begun = [new.req_id for new in output.scheduled_new_reqs]
        for req_id in (*begun, *output.scheduled_cached_reqs.resumed_req_ids):
            self._rows[req_id] = self._free.pop()
            self._num_uploaded[req_id] = 0

    def row(self, req_id: str) -> int:
        """The request's row."""
        return self._rows[req_id]

    def take_additions(
        self, requests: Iterable[RunnerRequest], most: int
    ) -> tuple[IntArray, IntArray]:
        """Blocks that these requests got since their last step: places in `tables` as one row, and
        block ids. Noted as uploaded.

        More than `most` are uploaded here and now, and nothing is left to be.
        """
        places: list[IntArray] = []
        blocks: list[int] = []
        width = self.tables.shape[1]
        for request in requests:
            begin, end = self._num_uploaded[request.req_id], len(request.block_ids)
            if begin < end:
                places.append(self._rows[request.req_id] * width + np.arange(begin, end))
                blocks += request.block_ids[begin:]
                self._num_uploaded[request.req_id] = end
        if not places:
            return NOTHING, NOTHING
        taken = np.concatenate(places), np.array(blocks)
        if len(blocks) <= most:
            return taken
        device = self.tables.device
        self.add(*(to_device(numbers, torch.int64, device) for numbers in taken))
        return NOTHING, NOTHING

    def add(self, places: Tensor, block_ids: Tensor) -> None:
        """Queue: put these block ids, on the device, there. A place that comes twice gets the same
        id twice."""
        self._flat.index_copy_(0, places, block_ids.to(torch.int32))

    def note_sampled(self, rows: Tensor, token_ids: Tensor) -> None:
        """Queue: `token_ids` [N] are the newest tokens of `rows` [N], both on the device."""
        self.newest.index_copy_(0, rows, token_ids)
