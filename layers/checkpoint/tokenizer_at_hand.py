"""The tokenizer of a model that lies on this machine, without its weights. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from interlace.engine.errors import ModelError
from interlace.engine.tokenizer import Tokenizer
from interlace.layers.checkpoint.cache_folder import cache_folder
from interlace.layers.checkpoint.description import DEFAULT_MODEL, read_description


def tokenizer_at_hand(model: str) -> Tokenizer | None:
    """That of the default model if it was fetched before, of a folder or of a GGUF file; None if it
    cannot be had so: nothing is fetched, and nothing is raised for it. Reads files."""
    try:
        if model == DEFAULT_MODEL:
            return _of_default_model()
        path = Path(os.path.expanduser(model))  # noqa: PTH111 - a ~ of nobody stays as it is
        if os.path.isdir(path):  # noqa: PTH112 - Path's own raises for a name that is too long
            return Tokenizer.from_folder(path)
        if os.path.isfile(path):  # noqa: PTH113 - as above
            return _of_gguf(path)
    except (ModelError, OSError, ValueError):  # no file has a name with a zero in it
        return None
    return None


def _of_default_model() -> Tokenizer | None:
    """Of any layout of the weights: the tokenizer is the same."""
    from interlace.layers.checkpoint.gguf_tokenizer import tokenizer_from_gguf

    for folder in sorted(cache_folder().glob(f"{DEFAULT_MODEL}-*")):
        payload = read_description(folder)
        if payload is not None:
            return tokenizer_from_gguf(payload["fields"], DEFAULT_MODEL)
    return None


def _of_gguf(path: Path) -> Tokenizer:
    from interlace.layers.checkpoint.gguf_file import GGUFFile
    from interlace.layers.checkpoint.gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(GGUFFile(path).fields, path.name)
