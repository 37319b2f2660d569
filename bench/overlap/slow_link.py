"""A link that is several times slower than the machine's: each load is preceded by useless copies.

That is what another machine, or a store that is slower than host memory, would be like to whoever
plans loads: the lane is busy for as long, and the same KV comes. Useless copies are long ones, so
that they cost the host next to nothing, and a driver takes as many as it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from interlace.bench.passing_copies import HeldLoads
from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.layers.page_copies import Runs

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 64 << 20
"""Of one useless copy, at most."""


class UselessCopies:
    """Copies from host records into a buffer on the device, on the current stream; on a CPU at
    once. One lane's thread."""

    def __init__(self, records: torch.Tensor, device: torch.device) -> None:
        """`records`: uint8, contiguous, pinned for a GPU."""
        import torch

        self._source = records.view(-1)[:PIECE_BYTES]
        self._target = torch.empty_like(self._source, device=device)
        self._is_host = device.type == "cpu"

    def copy(self, num_bytes: int) -> None:
        """So many bytes, in pieces."""
        while num_bytes > 0:
            count = min(num_bytes, len(self._source))
            source, target = self._source[:count], self._target[:count]
            if self._is_host:  # torch would start threads of its own here
                np.copyto(target.numpy(), source.numpy())
            else:
                target.copy_(source, non_blocking=True)
            num_bytes -= count


class SlowLoads(HeldLoads):
    """`Copies` that load as slowly as `times` says when they begin. Lane's thread."""

    def __init__(
        self, copies: Copies, times: Callable[[], int], waste: Callable[[int], None]
    ) -> None:
        """`waste` copies so many bytes to nowhere."""
        super().__init__(copies)
        self._times = times
        self._waste = waste

    def _delay(self, num_layers: int, runs: Runs) -> None:
        num_bytes = num_layers * runs.num_blocks * self.page_bytes
        self._waste((self._times() - 1) * num_bytes)
