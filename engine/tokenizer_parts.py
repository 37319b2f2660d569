"""What a loaded tokenizer consists of, however it was stored.

Written by `tokenizer_folder` and `tokenizer_bpe`, read by `tokenizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tokenizers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The pieces that `Tokenizer` puts together."""

    backend: tokenizers.Tokenizer
    """Encodes; truncation and padding are off."""
    table: Sequence[bytes]
    """Token id -> the bytes it stands for."""
    strips_leading_space: bool = False
    """One space at the very start of a text is not shown (sentencepiece family)."""
    special_token_ids: frozenset[int] = frozenset()
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    """Jinja source."""
