"""From what a user calls a model to an open checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.layers.checkpoint.checkpoint import Checkpoint
from interlace.layers.checkpoint.default_model import DEFAULT_MODEL, open_default_model
from interlace.layers.checkpoint.gguf_model import open_gguf
from interlace.layers.checkpoint.hf_folder import open_hf_folder
from interlace.layers.checkpoint.hub import fetch_from_hub

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_checkpoint(model: str, progress: Progress) -> Checkpoint:
    """Open the default model, a folder, a GGUF file or a hub id.

    Raises: `ModelError`; for an unknown name it lists what is possible.
    """
    if model == DEFAULT_MODEL:
        return open_default_model(progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_hf_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ModelError(f"{path} holds weights only; give the folder that it lies in.")
        return open_gguf(path)
    if _HUB_ID.fullmatch(model):
        return open_hf_folder(fetch_from_hub(model), name=model)
    raise ModelError(
        f"there is no model {model!r}. A model is {DEFAULT_MODEL!r}, the path of a .gguf file, "
        "the path of a folder in Hugging Face layout, or a hub id such as 'org/name'."
    )
