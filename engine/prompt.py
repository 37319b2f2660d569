"""What a caller may give as a prompt, and how it becomes checked token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from interlace.engine.block_hash import TokenArray
from interlace.engine.errors import PromptError
from interlace.engine.tokenizer import Tokenizer

ChatMessages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | ChatMessages

_NOT_FLAT = "token ids must be one flat sequence of whole numbers."


def is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Whether `prompt` is a sequence of token ids, going by its first item.

    Raises: `PromptError` if it is nothing that a prompt can be, or empty.
    """
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}."
        )
    if getattr(prompt, "ndim", 1) != 1:  # a scalar array has no length
        raise PromptError(_NOT_FLAT)
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give it at least one character or token id.")
    return not isinstance(prompt, str) and not isinstance(prompt[0], Mapping)


def check_token_ids(token_ids: Sequence[int] | NDArray[np.integer], vocab_size: int) -> TokenArray:
    """An own, read-only copy of the ids, each in [0, vocab_size). Some 50 ns an id.

    Raises: `PromptError` naming the first id that is not.
    """
    if len(token_ids) == 0:
        return np.empty(0, dtype=np.int64)
    try:
        # `array` takes whole numbers one by one, twice as fast as numpy, which looks for all kinds.
        given = token_ids if isinstance(token_ids, np.ndarray) else array("q", token_ids)
        ids = np.array(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise PromptError(_NOT_FLAT) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or _has_bool(token_ids, ids):
        raise PromptError(_NOT_FLAT)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise PromptError(
            f"token id {ids[bad[0]]} at position {bad[0]} is outside the model's "
            f"vocabulary [0, {vocab_size})."
        )
    checked = ids.astype(np.int64, copy=False)
    checked.setflags(write=False)
    return checked


def _has_bool(token_ids: Sequence[object] | NDArray[np.integer], ids: NDArray[np.integer]) -> bool:
    """Whether a plain sequence hides a truth value, which numpy has taken for 0 or 1."""
    if isinstance(token_ids, np.ndarray):
        return False
    places: list[int] = np.flatnonzero(ids < 2).tolist()
    return any(isinstance(token_ids[place], bool | np.bool_) for place in places)


def own_copy(prompt: Prompt) -> str | ChatMessages:
    """Text or messages (not token ids) as they are now, whatever the caller changes later."""
    if isinstance(prompt, str):
        return prompt
    messages = cast(ChatMessages, prompt)
    return [dict(one) if isinstance(one, Mapping) else one for one in messages]


def check_length(num_tokens: int, max_total_tokens: int) -> None:
    """Raise `PromptError` unless a prompt of `num_tokens` leaves room for one more token."""
    if num_tokens == 0:
        raise PromptError("the prompt has no tokens; give it at least one character.")
    if num_tokens >= max_total_tokens:
        raise PromptError(
            f"the prompt has {num_tokens} tokens; with one token of answer at most "
            f"{max_total_tokens} fit (the smaller of max_model_len and the KV pool). "
            "Shorten it, or raise that limit."
        )


def tokenize(prompt: str | ChatMessages, tokenizer: Tokenizer) -> list[int]:
    """Encode text, or chat messages through the model's template. May take long: call it in a
    thread.

    Raises: `PromptError` for messages or a template that cannot be rendered.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat(prompt)
