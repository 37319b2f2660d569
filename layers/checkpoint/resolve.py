"""From what a user calls a model to an open checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.layers.checkpoint.checkpoint import Checkpoint
from interlace.layers.checkpoint.default_model import open_default_model
from interlace.layers.checkpoint.description import DEFAULT_MODEL
from interlace.layers.checkpoint.dummy import DUMMY_PREFIX, open_dummy
from interlace.layers.checkpoint.gguf_model import open_gguf
from interlace.layers.checkpoint.hf_folder import open_hf_folder
from interlace.layers.checkpoint.hub import fetch_from_hub

_MAX_SHOWN = 200  # characters of a wrong name
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_checkpoint(model: str, progress: Progress, *, seed: int = 0) -> Checkpoint:
    """Open the default model, a folder, a GGUF file, a hub id or a dummy model.

    `seed` counts for a dummy model alone. Raises: `ModelError`; for an unknown name it lists what
    is possible.
    """
    if model == DEFAULT_MODEL:
        return open_default_model(progress)
    if model.startswith(DUMMY_PREFIX):
        return open_dummy(model, seed)
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - a ~ of nobody stays as it is
    if os.path.isdir(path):  # noqa: PTH112 - Path's own raises for a name that is too long
        return open_hf_folder(path)
    if os.path.isfile(path):  # noqa: PTH113 - as above
        if path.suffix == ".safetensors":
            raise ModelError(f"{path} holds weights only; give the folder that it lies in.")
        return open_gguf(path)
    if _HUB_ID.fullmatch(model):
        return open_hf_folder(fetch_from_hub(model), name=model)
    raise ModelError(
        f"there is no model {_shortened(model)!r}. A model is {DEFAULT_MODEL!r}, the path of a "
        ".gguf file, the path of a folder in Hugging Face layout, a hub id such as 'org/name', or "
        "for measuring 'dummy:NAME', a shape with random weights."
    )


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
