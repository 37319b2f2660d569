"""ExampleConnector's statistics: what a worker side has loaded, saved, dropped and failed."""

from __future__ import annotations

import dataclasses

from interlace.engine.kv_connector_stats import KVConnectorStats


@dataclasses.dataclass
class ExampleConnectorStats(KVConnectorStats):
    """`data` maps names of `KVFolderCounters`' fields to numbers, zeros left out. They add up, also
    over workers, each of which counts its part of a block."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> ExampleConnectorStats:
        """Add `other`'s numbers to these."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers as they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())
