"""What a cached conversion says of itself: see `converted`. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DEFAULT_MODEL: Final = "smollm2-135m"
WEIGHTS, DESCRIPTION = "weights.safetensors", "model.json"


def read_description(folder: Path) -> Mapping[str, Any] | None:
    """The payload, or None if there is no conversion or it is damaged in any way."""
    try:
        digest, _, content = (folder / DESCRIPTION).read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            return None
        described = json.loads(content)
        weights = described["weights"]
        if not _is_whole(folder / WEIGHTS, weights["num_bytes"], weights["header_sha256"]):
            return None
    except FileNotFoundError:
        return None
    payload: Mapping[str, Any] = described["payload"]
    return payload


def _is_whole(file: Path, num_bytes: int, header_sha256: str) -> bool:
    if file.stat().st_size != num_bytes:
        return False
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if length > num_bytes:
            return False
        return hashlib.sha256(prefix + opened.read(length)).hexdigest() == header_sha256
