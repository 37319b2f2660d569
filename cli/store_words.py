"""What prefixes in a store begin with, in words. Imports no torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from interlace.connectors.slab_store.inspection.reports import Prefix
    from interlace.engine.tokenizer import Tokenizer


class Words:
    """By the tokenizers of the models that slabs name, where these lie on this machine."""

    def __init__(self, model: str | None = None) -> None:
        """`model` stands for all that are named. Raises: `typer.BadParameter` if it has no
        tokenizer here."""
        self._model = model
        self._tokenizer = functools.cache(_tokenizer)
        if model is not None and self._tokenizer(model) is None:
            raise typer.BadParameter(
                f"there is no tokenizer of {model!r} on this machine: give smollm2-135m, if it was"
                " fetched before, a GGUF file, or a folder with tokenizer.json.",
                param_hint="--tokenizer",
            )

    def of(self, prefix: Prefix) -> str | None:
        """On one line, special tokens left out; None if nothing was told, or nobody here can read
        it."""
        names = prefix.model_names if self._model is None else (self._model,)
        for tokenizer in filter(None, map(self._tokenizer, names)):
            if prefix.first_tokens and max(prefix.first_tokens) < tokenizer.vocab_size:
                return " ".join(tokenizer.decode(prefix.first_tokens).split())
        return None


def _tokenizer(model: str) -> Tokenizer | None:
    from interlace.layers.checkpoint.tokenizer_at_hand import tokenizer_at_hand

    return tokenizer_at_hand(model)
