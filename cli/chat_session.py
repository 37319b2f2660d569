"""One conversation: its messages, one turn at a time, and what the turns cost.

Knows nothing of terminals. Every turn sends the whole conversation, and the engine's prefix cache
finds all of it that was sent before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence

from interlace.cli.chat_engine import AnswerStream, ChatEngine, Message
from interlace.engine.errors import ConfigError, PromptError, RequestError
from interlace.engine.outputs import FinishReason, RequestOutput, Usage
from interlace.engine.sampling_params import SamplingParams

Show = Callable[[str], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    tokens_per_second: float | None
    """Of generated tokens from the first one on; None if there were fewer than two."""
    context_is_full: bool
    """Whether prompt and answer together have reached `max_model_len`."""


@dataclasses.dataclass(slots=True)
class _Answer:
    """An answer that is still growing."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    last: RequestOutput | None = None
    first_s: float = 0.0
    first_tokens: int = 0
    """Tokens in the first delta that had any: they arrived at `first_s`."""
    last_s: float = 0.0

    def add(self, output: RequestOutput, now_s: float) -> None:
        if output.token_ids:
            if not self.token_ids:
                self.first_s, self.first_tokens = now_s, len(output.token_ids)
            self.last_s = now_s
        self.text += output.text_delta
        self.token_ids += output.token_ids
        self.last = output

    @property
    def tokens_per_second(self) -> float | None:
        later, seconds = len(self.token_ids) - self.first_tokens, self.last_s - self.first_s
        return later / seconds if later > 0 and seconds > 0 else None


class ChatSession:
    """A conversation with one engine. All methods are called on the event loop's thread.

    Without a chat template there is no conversation: every turn is a completion of its own text.
    Raises: `ConfigError` if a system message is given and there is no template for it.
    """

    def __init__(
        self,
        engine: ChatEngine,
        params: SamplingParams,
        *,
        system: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self.params = params
        self._now = now
        self._current: AnswerStream | None = None
        self._stopping = False
        self.has_template = engine.tokenizer is not None and engine.tokenizer.has_chat_template
        if system is not None and not self.has_template:
            raise ConfigError(
                "This model has no chat template, so there is no place for a system message; "
                "leave --system out and write it into the prompt."
            )
        self._opening: list[Message] = [] if system is None else [_message("system", system)]
        self.messages: list[Message] = list(self._opening)
        self.turns: list[Usage] = []
        """What each turn cost, in order."""

    @property
    def model(self) -> str:
        """Name or path of the model."""
        return self._engine.config.model

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together."""
        return self._engine.config.max_model_len

    def clear(self) -> None:
        """Forget the conversation, but not the system message."""
        self.messages = list(self._opening)

    def resume(self, messages: Sequence[Message]) -> None:
        """Go on with another conversation, its system message included if it has one.

        Raises: `ConfigError` if there is no chat template; nothing has changed then.
        """
        if not self.has_template:
            raise ConfigError(
                "This model has no chat template, so there is no conversation to go on with; "
                "take another model for it."
            )
        self._opening = [m for m in messages[:1] if m["role"] == "system"]
        self.messages = list(messages)

    def stop(self) -> bool:
        """Abort the answer that is being given. False if there is none or it is ending already."""
        if self._current is None or self._stopping:
            return False
        self._stopping = True
        self._engine.abort(self._current.request_id)
        return True

    async def turn(self, text: str, show: Show) -> Turn:
        """Send `text`, pass the answer to `show` piece by piece, and remember both.

        An answer that `stop` has cut short is remembered as far as it came. A turn that failed, or
        was stopped before its first piece of text, leaves the conversation as it was.
        Raises: `RequestError` and whatever else the engine or `show` raises.
        Cancellation: aborts the request; the conversation stays as it was.
        """
        if not text.strip():
            raise PromptError("The prompt is empty; write something for the model to answer.")
        asked = _message("user", text)
        prompt = [*self.messages, asked] if self.has_template else text
        turn = self._finished(await self._stream(prompt, show))
        self.turns.append(turn.usage)
        if turn.text or turn.finish_reason != "abort":
            self.messages += [asked, _message("assistant", turn.text)]
        return turn

    async def _stream(self, prompt: str | Sequence[Message], show: Show) -> _Answer:
        answer = _Answer()
        stream = self._engine.generate(prompt, self.params)
        self._current, self._stopping = stream, False
        try:
            async for output in stream:
                answer.add(output, self._now())
                if output.text_delta:
                    await show(output.text_delta)
        finally:
            self._current = None
            await stream.aclose()
        return answer

    def _finished(self, answer: _Answer) -> Turn:
        last = answer.last
        if last is not None and last.finish_reason == "error":
            raise RequestError(last.error or "The engine could not answer this; try again.")
        usage = last.usage if last is not None else None
        usage = usage or Usage(0, 0, 0, len(answer.token_ids))
        context = usage.num_prompt_tokens + usage.num_generated_tokens
        return Turn(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=(last.finish_reason if last is not None else None) or "abort",
            usage=usage,
            tokens_per_second=answer.tokens_per_second,
            context_is_full=self.max_model_len is not None and context >= self.max_model_len,
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
