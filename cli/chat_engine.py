"""What a chat asks of an engine, as Protocols, so that its logic is tested without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from interlace.engine.config import EngineConfig
from interlace.engine.outputs import RequestOutput
from interlace.engine.sampling_params import SamplingParams

Message = Mapping[str, str]
"""`role` ("system", "user" or "assistant") and `content`."""


class AnswerStream(Protocol):
    """The deltas of one answer."""

    @property
    def request_id(self) -> str:
        """The name by which the request is aborted."""
        ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None:
        """Free what the request holds; harmless when it has ended."""
        ...


class ChatTokenizer(Protocol):
    """The one thing that a chat wants to know of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        ...


class ChatEngine(Protocol):
    """The part of `AsyncEngine` that a chat uses."""

    @property
    def config(self) -> EngineConfig:
        """What was decided when the model was loaded."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """None if the engine takes token ids only."""
        ...

    def generate(
        self, prompt: str | Sequence[int] | Sequence[Message], params: SamplingParams, /
    ) -> AnswerStream:
        """Start an answer to a text or to the messages of a conversation."""
        ...

    def abort(self, request_id: str, /) -> object:
        """End a request in any state; its stream then ends with the reason "abort"."""
        ...
