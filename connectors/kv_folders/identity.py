"""What must be equal for stored KV to be usable, and the names that follow from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from interlace.engine.config import EngineConfig

LAYOUT = "[block][K,V][token][kv head][head size]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Two engines whose identities are equal compute, and lay out, equal KV for equal hashes."""

    model: str
    """Hex digest of configuration and weights."""
    dtype: str
    block_size: int
    """Tokens."""
    layout: str = LAYOUT
    group: int = 0
    """KV-cache group."""
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> KVIdentity:
        """Of a resolved configuration; a model without a digest goes by its name."""
        model = config.model_config
        name = model.model if model else config.model
        digest = model.model_identity if model else ""
        parallel = config.parallel_config
        return cls(
            model=digest or hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest(),
            dtype=model.dtype if model else config.dtype,
            block_size=config.block_size,
            rank=parallel.rank,
            world_size=parallel.world_size,
        )

    def of_rank(self, rank: int) -> KVIdentity:
        """Of another worker of the same engine."""
        return dataclasses.replace(self, rank=rank)

    def folder_name(self, first_hash: bytes) -> str:
        """64 hex digits: the folder whose first block has this hash."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        return hashlib.sha256(hashlib.sha256(fields).digest() + first_hash).hexdigest()
