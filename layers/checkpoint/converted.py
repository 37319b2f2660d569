"""A cached conversion: the weights of one model as a safetensors file in the engine's own layout.

Two files in one folder: `weights.safetensors`, whose tensors are used in place, and
`model.json`, which holds the metadata and says what the first must look like. Both are written
under temporary names and renamed, the description last, so a crash or a second process at the
same work leaves nothing half done. Damage is found by size and by a digest of the header; the
weights themselves are not read at each start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.engine.file_access import replacing
from interlace.layers.checkpoint.description import DESCRIPTION, WEIGHTS

_ALIGNMENT = 64  # bytes, of the first tensor; a cache line


def write_converted(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[tuple[str, torch.Tensor]],
    payload: Mapping[str, Any],
    advance: Callable[[float], None],
) -> None:
    """Write float32 `weights`, which come in the order of `shapes`, and `payload` (plain JSON).

    `advance` is called with bytes written. Raises: `OSError`, with nothing changed.
    """
    header = _header(shapes)
    with replacing(folder / WEIGHTS) as file:
        file.write(header)
        for _, weight in weights:
            assert weight.dtype == torch.float32
            file.write(weight.contiguous().numpy().data)
            advance(weight.nbytes)
        num_bytes = file.tell()
    facts = {"num_bytes": num_bytes, "header_sha256": hashlib.sha256(header).hexdigest()}
    content = json.dumps({"weights": facts, "payload": payload}).encode()
    with replacing(folder / DESCRIPTION) as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The safetensors header: its length, then JSON padded with blanks."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * torch.float32.itemsize
        entries[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
