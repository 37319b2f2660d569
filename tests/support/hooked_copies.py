"""Copies in host memory that a test looks at, holds up and fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from interlace.layers.page_copies import Copied, PageCopies, Runs
from interlace.layers.record_space import RecordSpace


class HookedCopies(PageCopies):
    """Calls `before(layer, runs)` before each copy, on its lane; it may raise, and wait. Several
    layers are copied there one by one, by `load` and `save`."""

    def __init__(
        self,
        records: Tensor | RecordSpace,
        layers: Sequence[Tensor],
        before: Callable[[int, Runs], None] = lambda layer, runs: None,
    ) -> None:
        super().__init__(records, layers)
        self.before = before

    def load(self, layer: int, runs: Runs) -> Copied:
        self.before(layer, runs)
        return super().load(layer, runs)

    def save(self, layer: int, runs: Runs) -> Copied:
        self.before(layer, runs)
        return super().save(layer, runs)
