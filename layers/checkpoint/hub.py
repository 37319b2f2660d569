"""A model from the Hugging Face hub, by its id, into huggingface_hub's own cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from interlace.engine.errors import ModelError

_FILES = ["*.json", "*.jinja", "*.safetensors"]
_TIMEOUT_S = 5.0


def fetch_from_hub(repo_id: str) -> Path:
    """The folder of a snapshot of `repo_id`; fetches what the cache lacks.

    Raises: `ModelError` if the library is missing, or the model cannot be had.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{repo_id!r} looks like a model on the Hugging Face hub; to fetch it install "
            "'interlace[hub]', or give the path of a local folder or GGUF file."
        )
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=_FILES, etag_timeout=_TIMEOUT_S
        )
    except (OSError, ValueError) as error:  # its HTTP errors derive from these
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{repo_id!r} could not be fetched from the Hugging Face hub ({reason}); check its "
            "name and the network, or give the path of a local folder or GGUF file."
        ) from error
    return Path(folder)
