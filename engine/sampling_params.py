"""How one request wants its tokens chosen: vLLM's field names, checked at construction.

Knows nothing of logits; `layers/sampler.py` applies these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

from interlace.engine.errors import InterlaceError, SamplingError
from interlace.engine.options import Options

MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """Sampling options of one request. Immutable; unknown fields and bad values are refused.

    Order of effect on a row of raw logits: logit bias, `min_tokens` mask, penalties, then
    greedy choice if `temperature` is 0, else temperature, min-p, top-k, top-p, one draw.
    Logprobs are of the raw logits, before all of that.

    Raises: `SamplingError` at construction.
    """

    error: ClassVar[type[InterlaceError]] = SamplingError

    temperature: float = 1.0
    """0 is greedy (the lowest id wins a tie); above 0 divides the logits."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that the output already has; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output; in [-2, 2]."""
    seed: int | None = None
    """The draw at output position i depends on (seed, i) alone. None: the engine picks one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the answer; nothing of the one that matched is shown."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer; the id is reported, its text is not."""
    include_stop_str_in_output: bool = False
    """Show the text of the stop string or stop token that ended the answer."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the model's or the pool's limit."""
    min_tokens: int = 0
    """No end of sequence, stop id or stop string counts before this many tokens."""
    logprobs: int | None = None
    """Report the sampled token's log-probability and that many of the most likely ones."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its raw logit, in [-100, 100]."""
    detokenize: bool = True
    """False: token ids only, no text; stop strings are then refused."""
    skip_special_tokens: bool = True
    """Leave control tokens such as <|im_end|> out of the text."""

    def __post_init__(self) -> None:
        self.require_number("temperature", 0.0, 1e6)
        self.require_int("top_k", -1)
        self.require_number("top_p", 0.0, 1.0)
        self.require(self.top_p > 0, f"top_p must be above 0, not {self.top_p!r}.")
        self.require_number("min_p", 0.0, 1.0)
        self.require_number("repetition_penalty", 0.0, 1e6)
        self.require(self.repetition_penalty > 0, "repetition_penalty must be above 0.")
        self.require_number("presence_penalty", -2.0, 2.0)
        self.require_number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self.require_int("seed", 0, 2**64 - 1)
        if self.max_tokens is not None:
            self.require_int("max_tokens", 1)
        self.require_int("min_tokens", 0)
        if self.max_tokens is not None:
            self.require(
                self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens}).",
            )
        if self.logprobs is not None:
            self.require_int("logprobs", 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize"):
            self.require_choice(name, (True, False))
        self.require_choice("skip_special_tokens", (True, False))
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            self.require(
                value is None or isinstance(value, Sequence | Set),
                f"{name} must be a sequence, not {value!r}.",
            )
        stops = self.stop_strings
        self.require(
            len(stops) <= MAX_STOP_STRINGS, f"stop holds more than {MAX_STOP_STRINGS} strings."
        )
        for stop in stops:
            self.require(
                isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS,
                f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters, not {stop!r}.",
            )
        self.require(
            self.detokenize or not stops,
            "stop strings need detokenize=True; use stop_token_ids, or turn detokenize on.",
        )
        ids = self.stop_token_ids or ()
        self.require(
            not isinstance(ids, str | bytes)
            and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids),
            f"stop_token_ids must be a sequence of token ids, not {self.stop_token_ids!r}.",
        )
        # Own copies: a list that the caller changes later must not change this request.
        object.__setattr__(self, "stop", stops or None)
        object.__setattr__(self, "stop_token_ids", tuple(ids) or None)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        self.require(isinstance(self.logit_bias, Mapping), "logit_bias must map id -> number.")
        for token_id, bias in self.logit_bias.items():
            self.require(
                isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0,
                f"logit_bias has {token_id!r} where a token id belongs.",
            )
            self.require(
                isinstance(bias, int | float)
                and not isinstance(bias, bool)
                and -100 <= bias <= 100,
                f"logit_bias of token {token_id} must be from -100 to 100, not {bias!r}.",
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty if none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no draw."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether penalties read the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
