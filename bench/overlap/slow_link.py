"""A link that is several times slower than the machine's: each load is copied so often.

That is what another machine, or a store that is slower than host memory, would be like to whoever
plans loads: the copy lane is busy for as long, and the same KV comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.layers.page_copies import Copied, Run, Runs


class RepeatedLoads:
    """`Copies` that load as often as `times` says when they begin, and count once. Lane's thread.

    Copies of one lane come one after the other, so the last one finds and leaves what the first
    one did.
    """

    def __init__(self, copies: Copies, times: Callable[[], int]) -> None:
        self._copies = copies
        self._times = times

    @property
    def num_layers(self) -> int:
        """See `Copies`."""
        return self._copies.num_layers

    @property
    def page_bytes(self) -> int:
        """See `Copies`."""
        return self._copies.page_bytes

    def prepare(self, runs: list[Run] | tuple[Run, ...]) -> Runs:
        """See `Copies`."""
        return self._copies.prepare(runs)

    def load(self, layer: int, runs: Runs) -> Copied:
        """See `Copies`."""
        for _ in range(self._times() - 1):
            self._copies.load(layer, runs)
        return self._copies.load(layer, runs)

    def save(self, layer: int, runs: Runs) -> Copied:
        """See `Copies`."""
        return self._copies.save(layer, runs)

    def load_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """See `Copies`."""
        for _ in range(self._times() - 1):
            for _ in self._copies.load_layers(layers, runs):
                pass
        yield from self._copies.load_layers(layers, runs)

    def save_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """See `Copies`."""
        return self._copies.save_layers(layers, runs)
