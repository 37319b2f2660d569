"""Text to token ids and back, for one model.

Knows nothing of requests; `detokenizer` turns its bytes into text piece by piece.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from interlace.engine.chat_template import ChatTemplate
from interlace.engine.errors import PromptError
from interlace.engine.tokenizer_parts import TokenizerParts


@final
class Tokenizer:
    """A tokenizer whose text is the concatenation of its tokens' bytes.

    Immutable, so any thread may call any method; `encode` lets other threads run meanwhile.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._table = parts.table
        self._bos_token = parts.bos_token
        self._eos_token = parts.eos_token
        self._template_source = parts.chat_template
        self.strips_leading_space: bool = parts.strips_leading_space
        """Whether one space at the very start of a whole text is not shown."""
        self.special_token_ids: frozenset[int] = parts.special_token_ids
        """Ids that `skip_special_tokens` leaves out of the text."""
        self.eos_token_ids: tuple[int, ...] = parts.eos_token_ids
        """Ids that end an answer, the one that the model's files call eos first."""

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a folder in Hugging Face layout; `tokenizer.json` must be there.

        Raises: `ModelError` if a file is missing or damaged, or if its decoder's text is not a
        concatenation of token bytes.
        """
        from interlace.engine.tokenizer_folder import parts_from_folder

        return cls(parts_from_folder(path))

    @classmethod
    def from_bpe(
        cls,
        tokens: Sequence[str],
        merges: Sequence[str],
        *,
        pre: str,
        token_types: Sequence[int],
        bos_token_id: int | None,
        eos_token_id: int | None,
        add_bos: bool,
        chat_template: str | None,
    ) -> Tokenizer:
        """Build from GGUF metadata: one type per token, merges as "left right".

        `pre` is `tokenizer.ggml.pre`: `smollm`, `llama-bpe` or `qwen2`. Control and user-defined
        tokens are found in text; only control and unknown ones are special. `eos_token_ids` is
        `eos_token_id` and the tokens that end an answer in that family: `<|im_end|>` (smollm);
        `<|eot_id|>`, `<|eom_id|>`, `<|end_of_text|>` (llama-bpe); `<|im_end|>`, `<|endoftext|>`
        (qwen2). So SmolLM2 has (2,) alone: its `<|endoftext|>` only separates documents.

        Raises: `ModelError` for any other `pre`, or if the lists contradict each other.
        """
        from interlace.engine.tokenizer_bpe import parts_from_bpe

        return cls(
            parts_from_bpe(
                tokens,
                merges,
                pre=pre,
                token_types=token_types,
                bos_token_id=bos_token_id,
                eos_token_id=eos_token_id,
                add_bos=add_bos,
                chat_template=chat_template,
            )
        )

    def __repr__(self) -> str:
        """Size and ends, for logs."""
        return f"Tokenizer(vocab_size={self.vocab_size}, eos_token_ids={self.eos_token_ids})"

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that it knows."""
        return len(self._table)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be laid out as a prompt."""
        return self._template_source is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, whose special tokens are parsed. Takes a while: call in a thread.

        `add_special_tokens` adds what the model wants around a text, such as a bos token.

        Raises: `PromptError` if `text` is not a string that can be written as UTF-8.
        """
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise PromptError(
                f"the text cannot be tokenised ({error}); pass a string without lone surrogates."
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; b"" for an id that it does not know."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def visible_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes of `token_ids` one after another, leading space included."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in hidden)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The visible bytes as UTF-8, less the artificial space at the start if there is one.

        Bytes that are not UTF-8 become one replacement mark per broken sequence.
        """
        data = self.visible_bytes(token_ids, skip_special_tokens)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        # Compiled at first use: it takes a while, and a broken one must not stop plain prompts.
        if self._template_source is None:
            raise PromptError(
                "the model has no chat template; pass the prompt as text or token ids."
            )
        return ChatTemplate(
            self._template_source, bos_token=self._bos_token, eos_token=self._eos_token
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Lay out chat messages as one prompt, ready for the assistant's turn if asked so.

        Encode the result with `add_special_tokens=False`, or use `encode_chat`: a template
        writes its own bos token.

        Raises: `PromptError` if there is no template, if a message is not a mapping with the
        strings `role` and `content`, or with the template's message if that refuses or fails.
        """
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of chat messages, ready for the assistant's turn. As slow as `encode`.

        Raises: `PromptError`, as `apply_chat_template` does.
        """
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)
