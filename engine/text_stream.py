"""The text side of one request: tokens in, text to show and the stop string that ended it out.

Joins `detokenizer` and `stop_strings`; knows nothing of queues or scheduling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

from interlace.engine.detokenizer import IncrementalDetokenizer
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.stop_strings import StopStrings
from interlace.engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added to the text."""

    text: str
    """New text to show; may be empty while a character or a possible stop is unfinished."""
    stop: str | None
    """The stop string that is complete now, ending the answer."""
    num_tokens_used: int
    """How many of the tokens belong to the answer: all, or those up to the stop's last."""


@final
class TextStream:
    """Shows an answer piece by piece. Not thread-safe; used by the loop thread.

    Stop strings are looked for in the text of the tokens after the first `min_tokens`: text
    before that is shown as it comes and is never part of a match.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._shows_stop = params.include_stop_str_in_output
        self._unwatched = params.min_tokens
        """Tokens still to come whose text no stop string may match."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int], *, hide_last: bool = False) -> TextDelta:
        """Add tokens of the answer, in order; not after a stop or `finish`.

        `hide_last` says that the last of them is an end-of-sequence or stop token: its text is
        shown only with `include_stop_str_in_output`. It counts as used like any other.
        """
        pieces: list[str] = []
        last_shown = len(token_ids) - (hide_last and not self._shows_stop)
        for used, token_id in enumerate(token_ids[:last_shown], start=1):
            pieces.append(self._one(token_id))
            if self._stops.matched is not None:
                return TextDelta("".join(pieces), self._stops.matched, used)
        return TextDelta("".join(pieces), None, len(token_ids))

    def _one(self, token_id: int) -> str:
        text = self._detokenizer.push((token_id,))
        if self._unwatched > 0:
            self._unwatched -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The text still held back, at the end of the answer; nothing after a stop string.

        An unfinished character becomes a replacement mark here. Should that complete a stop
        string, `matched` says so and the stop is treated as any other.
        """
        if self._stops.matched is not None:
            return ""
        text = self._detokenizer.finish()
        if self._unwatched > 0:
            return text
        shown = self._stops.push(text)
        return shown + self._stops.finish()
