"""What must be equal for stored KV to be usable, and the folder that follows from it. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from interlace.connectors.kv_folders.identity import KVIdentity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Records of one model, type, layout, block size, group and rank: equal for equal hashes."""

    identity: KVIdentity
    model_name: str
    """For people; it is no part of the identity."""
    num_layers: int
    page_bytes: int
    """Of one block of one layer."""

    @property
    def record_bytes(self) -> int:
        """Of one block over all layers."""
        return self.num_layers * self.page_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """As the header of each slab has them, in clear text."""
        return {**self._decisive, "model_name": self.model_name}

    def is_named_by(self, facts: Mapping[str, Any]) -> bool:
        """Whether a header's facts are these; a model may go by several names."""
        return facts == {**self.facts, "model_name": facts.get("model_name")}

    @property
    def _decisive(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.identity),
            "num_layers": self.num_layers,
            "page_bytes": self.page_bytes,
        }

    @property
    def folder_name(self) -> str:
        """16 hex digits."""
        text = json.dumps(self._decisive, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
