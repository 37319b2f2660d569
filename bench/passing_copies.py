"""`Copies` that somebody looks at: they pass everything on, and are there to be derived from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.layers.page_copies import Copied, Run, Runs


class PassingCopies:
    """`Copies` that do as others do. Whatever thread those allow."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

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
        return self._copies.load(layer, runs)

    def save(self, layer: int, runs: Runs) -> Copied:
        """See `Copies`."""
        return self._copies.save(layer, runs)

    def load_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """See `Copies`."""
        return self._copies.load_layers(layers, runs)

    def save_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """See `Copies`."""
        return self._copies.save_layers(layers, runs)


class HeldLoads(PassingCopies, ABC):
    """`Copies` whose loads are held up before they begin. Lane's thread."""

    @abstractmethod
    def _delay(self, num_layers: int, runs: Runs) -> None:
        """Hold up the load of so many layers of these."""

    def load(self, layer: int, runs: Runs) -> Copied:
        """See `Copies`."""
        self._delay(1, runs)
        return super().load(layer, runs)

    def load_layers(self, layers: range, runs: Runs) -> Iterable[Copied]:
        """See `Copies`."""
        self._delay(len(layers), runs)
        yield from super().load_layers(layers, runs)
