"""Chat messages to one prompt text, by the model's own Jinja template.

Knows nothing of token ids; the template runs in `template_sandbox`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import jinja2

from interlace.engine.errors import PromptError
from interlace.engine.template_meter import MAX_CHARS, Meter
from interlace.engine.template_sandbox import METER_KEY, TemplateSandbox


def check_messages(messages: object) -> list[dict[str, str]]:
    """Own copies of the messages. Raises: `PromptError` if they are not what a chat is made of."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise PromptError("chat messages must be a list of {'role': ..., 'content': ...}.")
    if not messages:
        raise PromptError("the list of chat messages is empty; give at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"chat message {index} must be a mapping with role and content, "
                f"not {type(message).__name__}."
            )
        for key in ("role", "content", *message):
            if not isinstance(message.get(key), str):
                raise PromptError(
                    f"chat message {index}: {key!r} must be a string, "
                    f"not {type(message.get(key)).__name__}."
                )
    return [dict(message) for message in messages]


@final
class ChatTemplate:
    """One compiled template. Immutable, so any thread may render; does no I/O.

    `now` is the clock behind `strftime_now`, which Llama 3 uses to tell the model the date.

    Raises: `PromptError` at construction if `source` is not a Jinja template: only requests that
    use the template fail.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._constants: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: now().strftime(pattern),
        }
        for name, token in (("bos_token", bos_token), ("eos_token", eos_token)):
            if token is not None:
                self._constants[name] = token
        try:
            self._template = TemplateSandbox().metered_template(source)
        except Exception as error:  # a foreign program: anything may come out of it
            raise PromptError(f"the model's chat template is broken: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text. May take a while for long chats: call in a thread.

        Raises: `PromptError` for bad messages, and with the template's own message if it
        refuses them, fails, tries to leave the sandbox, or works or writes without end.
        """
        variables = {
            **self._constants,
            METER_KEY: Meter(),
            "messages": check_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._bounded_text(variables)
        except Exception as error:  # a foreign program: anything may come out of it
            reason = str(error) or type(error).__name__
            raise PromptError(
                f"the model's chat template refused the messages: {reason}"
            ) from error

    def _bounded_text(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(variables):
            length += len(piece)
            if length > MAX_CHARS:
                raise jinja2.TemplateError(f"it wrote more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
