"""Tokens to text as they come: nothing is shown twice, taken back or lost.

Knows nothing of stop strings. Works on bytes, so what it holds back is at most the 3 bytes of an
unfinished character, and a token costs the same however long the answer is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import final

from interlace.engine.tokenizer import Tokenizer

MAX_HELD_BYTES = 3
_MARK = "\ufffd"


@final
class IncrementalDetokenizer:
    """The new text of one answer, in pieces. Not thread-safe; used by the loop thread.

    What the pieces add up to: let `whole` be `decode(prompt + answer)`. If the prompt ends inside
    a character and the answer completes it, the answer's text is `whole` from that character on.
    In every other case it is `whole` less `decode(prompt)`, which is then its prefix; so a
    replacement mark of which a byte lies in the prompt is the prompt's and is not shown. The
    space that a sentencepiece tokenizer drops is the one at the start of `whole`: the answer
    loses it only if no byte of the prompt is visible.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_start = tokenizer.strips_leading_space and not tail
        # A lead byte starts a character whatever stood before it, so a decoder that sees the
        # last three bytes alone ends in the same state as one that has seen the whole prompt.
        self._decoder.decode(tail)
        self._owed = self._decoder.getstate()[0]
        """Bytes of the character that the prompt left unfinished, until its fate is known."""
        self._owed_marks = self._owed.decode("utf-8", "replace")
        """What stands for them if it is never finished; two marks for half of a surrogate."""

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The last visible bytes of a prompt, three if there are as many."""
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._tokenizer.visible_bytes((token_id,), self._skip) + tail
            if len(tail) >= MAX_HELD_BYTES:
                break
        return tail[-MAX_HELD_BYTES:]

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens of the answer make known."""
        data = self._tokenizer.visible_bytes(token_ids, self._skip)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._decode(data, final=False)

    def finish(self) -> str:
        """What was held back, at the end of the answer: a replacement mark or nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._owed:
            self._owed = (self._owed + data)[: MAX_HELD_BYTES + 1]
            if text:
                # Marks that come first are the prompt's, unless the bytes really spell one.
                genuine = self._owed.startswith(_MARK.encode())
                text = text if genuine else text.removeprefix(self._owed_marks)
                self._owed = b""
        return text
