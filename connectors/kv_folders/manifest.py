"""The manifest of a folder: whose KV it holds, of which blocks, and what its files must be."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.tensor_file import DamagedFileError, TensorFile

FILE_NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 16 << 20
"""Nothing that we write comes near it; a longer file is not read to its end."""
_HASH_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One folder's content."""

    identity: KVIdentity
    parent_hash: bytes
    """The hash before the run's first block."""
    block_hashes: tuple[bytes, ...]
    """Of the run's blocks in order; at least one, no two equal."""
    block_shape: tuple[int, ...]
    """Of one block of one layer: (2, block_size, kv heads, head size)."""
    layer_names: tuple[str, ...]
    files: tuple[TensorFile, ...]
    """One per layer, in the same order."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        layers = zip(self.layer_names, self.files, strict=True)
        document = {
            "version": VERSION,
            "identity": dataclasses.asdict(self.identity),
            "parent_hash": self.parent_hash.hex(),
            "block_hashes": [block_hash.hex() for block_hash in self.block_hashes],
            "block_shape": self.block_shape,
            "layers": [{"name": name, **dataclasses.asdict(file)} for name, file in layers],
        }
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises: `DamagedFileError` for whatever `to_bytes` would not have written."""
        try:
            return cls._from_document(json.loads(data))
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise DamagedFileError(f"{FILE_NAME} is damaged: {error!r}") from error

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Manifest:
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']!r}, not {VERSION}")
        layers = document["layers"]
        manifest = cls(
            identity=KVIdentity(**document["identity"]),
            parent_hash=bytes.fromhex(document["parent_hash"]),
            block_hashes=tuple(bytes.fromhex(text) for text in document["block_hashes"]),
            block_shape=tuple(int(size) for size in document["block_shape"]),
            layer_names=tuple(str(layer.pop("name")) for layer in layers),
            files=tuple(TensorFile(**layer) for layer in layers),
        )
        lengths = {len(block_hash) for block_hash in manifest.block_hashes}
        if lengths != {_HASH_BYTES} or not manifest.files:
            raise ValueError("no blocks, no layers, or a hash of another length")
        if len(set(manifest.block_hashes)) < len(manifest.block_hashes):
            raise ValueError("the same block twice")
        return manifest


def layer_file_name(index: int) -> str:
    """The file of the manifest's layer number `index`."""
    return f"layer_{index:03d}.safetensors"
