"""A tokenizer from GGUF metadata: byte-level BPE only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interlace.engine.errors import ModelError
from interlace.engine.tokenizer import Tokenizer

_REMEDY = "pass --tokenizer DIR with the model's tokenizer.json"
_NORMAL = 1  # token type


def tokenizer_from_gguf(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """Build it from a file's metadata; `where` names the file.

    Raises: `ModelError` naming a tokenizer kind, pre-tokenizer or field that is not supported.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{where}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2'; {_REMEDY}."
        )
    if fields.get("tokenizer.ggml.add_eos_token"):
        raise ModelError(f"{where}: tokenizer.ggml.add_eos_token is not supported; {_REMEDY}.")
    tokens = _texts(fields, "tokens", where)
    pre = fields.get("tokenizer.ggml.pre")
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    template = fields.get("tokenizer.chat_template")
    return Tokenizer.from_bpe(
        tokens,
        _texts(fields, "merges", where),
        pre=str(pre),
        token_types=_types(fields, len(tokens), where),
        bos_token_id=_token_id(fields, "bos_token_id"),
        eos_token_id=_token_id(fields, "eos_token_id"),
        # Files that leave it out mean what their family does.
        add_bos=pre == "llama-bpe" if add_bos is None else bool(add_bos),
        chat_template=template if isinstance(template, str) else None,
    )


def _texts(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelError(f"{where}: tokenizer.ggml.{name} is missing or malformed; {_REMEDY}.")
    return values


def _types(fields: Mapping[str, Any], count: int, where: str) -> list[int]:
    values = fields.get("tokenizer.ggml.token_type")
    if values is None:
        return [_NORMAL] * count
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ModelError(f"{where}: tokenizer.ggml.token_type is malformed; {_REMEDY}.")
    return values


def _token_id(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
