"""An engine that says what it was told to, for tests of all that talks with engines."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from interlace.engine.config import EngineConfig
from interlace.engine.errors import EngineDeadError
from interlace.engine.outputs import FinishReason, RequestOutput, Usage
from interlace.engine.sampling_params import SamplingParams

logger = logging.getLogger("interlace.fake_engine")

WAIT = "<wait until aborted>"
WARN = "<log a warning>"
DIE = "<raise EngineDeadError>"
WARNING = "the store is full"
DEATH = "the engine has died"
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass
class Script:
    """One answer: pieces of text (one token each), then how it ends."""

    pieces: Sequence[str] = ("Hel", "lo.")
    finish_reason: FinishReason = "stop"
    error: str | None = None
    refusal: Exception | None = None
    """Raised by `generate` in place of an answer."""
    refusal_at_first_item: Exception | None = None
    usage: Usage | None = None


@dataclasses.dataclass(frozen=True)
class FakeTokenizer:
    has_chat_template: bool = True


class FakeStream:
    def __init__(self, request_id: str, script: Script) -> None:
        self.request_id = request_id
        self.closed = False
        self.aborted = asyncio.Event()
        self._script = script
        self._items = self._run()

    async def _run(self) -> AsyncIterator[RequestOutput]:
        script, count = self._script, 0
        if script.refusal_at_first_item is not None:
            raise script.refusal_at_first_item
        for piece in script.pieces:
            if piece == WAIT:
                await self.aborted.wait()
            if piece == WARN:  # as lanes do, on a thread of their own
                await asyncio.to_thread(logger.warning, WARNING)
                continue
            if piece == DIE:
                raise EngineDeadError(DEATH)
            await asyncio.sleep(0)
            if self.aborted.is_set():
                break
            count += 1
            yield RequestOutput(self.request_id, text_delta=piece, token_ids=(100 + count,))
        yield RequestOutput(
            self.request_id,
            finish_reason="abort" if self.aborted.is_set() else script.finish_reason,
            error=script.error,
            usage=script.usage or Usage(10, 4, 1, count),
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        return await anext(self._items)

    async def aclose(self) -> None:
        self.closed = True


class FakeEngine:
    """Answers prompt number n with script number n, then with the last one again."""

    def __init__(self, *scripts: Script, has_template: bool = True, max_model_len: int = 100):
        self.config = EngineConfig(model="fake", max_model_len=max_model_len)
        self.tokenizer = FakeTokenizer(has_template)
        self.prompts: list[Prompt] = []
        self.params: list[SamplingParams] = []
        self.streams: list[FakeStream] = []
        self._scripts = scripts or (Script(),)

    def generate(self, prompt: Prompt, params: SamplingParams) -> FakeStream:
        script = self._scripts[min(len(self.prompts), len(self._scripts) - 1)]
        self.prompts.append(prompt)
        self.params.append(params)
        if script.refusal is not None:
            raise script.refusal
        self.streams.append(FakeStream(f"r{len(self.prompts)}", script))
        return self.streams[-1]

    def abort(self, request_id: str) -> bool:
        for stream in self.streams:
            if stream.request_id == request_id:
                stream.aborted.set()
        return True
