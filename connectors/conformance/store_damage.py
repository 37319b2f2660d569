"""Lets a connector lose what it has stored, as it offers it to `interlace check`."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.watch import Watch


class StoreDamage:
    """For the stores of all workers of one engine. Asks instances, not the class: what a
    connector offers may depend on its configuration."""

    def __init__(self, watch: Watch, worker_sides: Sequence[KVConnectorBase_V1]) -> None:
        self._watch = watch
        self._worker_sides = worker_sides

    @property
    def kinds(self) -> tuple[str, ...]:
        """Ways in which the store can be damaged."""
        return self._worker_sides[0].store_fault_kinds

    def inject(self, kind: str, block_hash: bytes) -> set[bytes]:
        """Damage that block on each worker. Returns the hashes of all that is lost with it; none if
        it is not stored. Raises: `Violation`."""
        return set().union(*(self._lost_by(side, kind, block_hash) for side in self._worker_sides))

    def _lost_by(self, side: KVConnectorBase_V1, kind: str, block_hash: bytes) -> set[bytes]:
        try:
            return set(side.inject_store_fault(kind, block_hash))
        except Exception as error:
            name = f"{type(side).__name__}.inject_store_fault({kind!r})"
            message = f"{name} raised {type(error).__name__}: {error}"
            self._watch.findings.add("hooks-do-not-raise", message)
            self._watch.findings.raise_first()
            raise
