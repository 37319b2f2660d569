"""What the two sides of ExampleHiddenStatesConnector tell each other, and what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorWorkerMetadata
from interlace.engine.kv_connector_stats import CountingStats


@dataclasses.dataclass(frozen=True, slots=True)
class SaveOrder:
    """This step computes the last token of a prompt: save the states of all of it."""

    save_id: int
    request_id: str
    token_ids: tuple[int, ...]
    """The prompt."""
    block_ids: tuple[int, ...]
    """Its blocks, in order of position; the last one may hold more than the prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenStatesMetadata(KVConnectorMetadata):
    """One step's orders to the worker side."""

    saves: tuple[SaveOrder, ...] = ()
    withdrawn: frozenset[int] = frozenset()
    """Saves of earlier steps whose files must go: the request did not end well, or blocks turned
    out bad. Before this step's saves."""
    settled: frozenset[int] = frozenset()
    """Saves of earlier steps whose files stay: the caller knows the path."""


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenStatesReport(KVConnectorWorkerMetadata):
    """What became of a step's saves."""

    written: frozenset[int] = frozenset()
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Save -> why there is no file."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HiddenStatesReport:
        """Both reports."""
        assert isinstance(other, HiddenStatesReport)
        return HiddenStatesReport(self.written | other.written, {**self.failed, **other.failed})


class HiddenStatesStats(CountingStats):
    """Files: `written`, and `failed` to be."""

    def count(self, name: str) -> None:
        """One more."""
        self.data[name] = self.data.get(name, 0) + 1
