"""What tells one model's KV from another's: a digest of configuration, dtype and all weights.

Names and places do not count. The weights are told by the digest of the files they are read from,
which is remembered, so that a second start reads nothing; by their recipe if they were made;
or by the tensors themselves, where these files have changed since the model was loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch

from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.file_digest import digests_of, unread_bytes
from interlace.layers.checkpoint.loading import LoadedModel, Silent

T = TypeVar("T")

_VERSION: Final = "interlace model 1"
"""Changes when the same weights and configuration are computed with differently."""
_NO_NUMBERS: Final = frozenset({"name", "max_position", "sliding_window"})
"""Of `Architecture`: a limit refuses sequences and changes no number of those it lets pass."""
_SHOWN_BYTES: Final = 64 << 20
"""Less than this takes no time that anyone would notice."""
_CHUNK_BYTES: Final = 8 << 20


def model_identity(
    loaded: LoadedModel, progress: Progress | None = None, *, memo: Path | None = None
) -> str:
    """The identity of `loaded`, 64 hex digits: models with the same one compute the same KV.

    Equal for the same files in another folder, and for the default model and its GGUF file. Reads
    all weights the first time, with `progress`, in seconds. `memo` is the file that remembers
    digests, by default in the cache folder; one that cannot be written is done without. Called on
    the device thread. Raises: what `progress` raises to end the work.
    """
    digest = hashlib.sha256(_VERSION.encode())
    for part in (
        normalised(loaded.architecture),
        str(loaded.decoder.dtype).removeprefix("torch."),
        _weights_digest(loaded, progress or Silent(), memo),
    ):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


def normalised(architecture: Architecture) -> str:
    """All fields of `architecture` that change a number, as JSON in a fixed order."""
    fields = dataclasses.asdict(architecture)
    return json.dumps({k: v for k, v in fields.items() if k not in _NO_NUMBERS}, sort_keys=True)


def _weights_digest(loaded: LoadedModel, progress: Progress, memo: Path | None) -> str:
    origin = loaded.weight_origin
    if origin.sha256 is not None:
        return f"files {origin.sha256}"
    if origin.recipe is not None:
        return f"made {origin.recipe}"
    if origin.files:
        num_bytes = unread_bytes(origin.files, memo=memo)
        digests = _shown(progress, num_bytes, lambda a: digests_of(origin.files, a, memo=memo))
        if digests is not None:
            return f"files {' '.join(digests)}"
    num_bytes = sum(weight.nbytes for weight in loaded.weights.values())
    return f"tensors {_shown(progress, num_bytes, lambda a: _of_tensors(loaded.weights, a))}"


def _shown(progress: Progress, num_bytes: int, work: Callable[[Callable[[float], None]], T]) -> T:
    """Do `work`, with progress in bytes if there is enough of it."""
    if num_bytes < _SHOWN_BYTES:
        return work(lambda _: None)
    with progress.task("Reading all weights once, to know this model's KV again", num_bytes) as a:
        return work(a)


def _of_tensors(weights: Mapping[str, torch.Tensor], advance: Callable[[float], None]) -> str:
    """Digest of names, types, shapes and bytes, whatever the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\0".encode())
        content = weight.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
