"""What every kind of checkpoint offers once it is open: a description, weights and a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from interlace.engine.ports import Progress
from interlace.engine.tokenizer import Tokenizer
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.file_digest import FileStamp


@dataclasses.dataclass(frozen=True, slots=True)
class WeightOrigin:
    """What determines the weights of a checkpoint; empty if nothing but the weights does."""

    files: tuple[FileStamp, ...] = ()
    """The files they are read from, as these were before reading, in an order that counts."""
    sha256: str | None = None
    """Digest of the one file that they were made of, where that is known beforehand."""
    recipe: str | None = None
    """How they are made, where they come from no file: equal recipes make equal weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint; weights are not read yet, so that a refusal costs nothing."""

    name: str
    architecture: Architecture
    eos_token_ids: tuple[int, ...]
    """From the model's files; the tokenizer may know more."""
    read_weights: Callable[[torch.dtype, torch.device, Progress], dict[str, torch.Tensor]]
    """Weights in the engine's layout. Raises: `ModelError`."""
    read_tokenizer: Callable[[], Tokenizer | None]
    """The checkpoint's own tokenizer, None if it has none by design. Raises: `ModelError`."""
    weight_origin: Callable[[], WeightOrigin]
    """To be asked before the weights are read. Raises: `ModelError`."""
