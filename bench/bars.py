"""What the project wants of one machine: an NVIDIA H200, bfloat16, random weights.

The figures are milliseconds, and are about vLLM 0.20.2's there. On any other machine, and for any
other model, dtype or shape of work, there is no bar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

MACHINE: Final = "H200"
"""Part of the name of the GPU that the bars are for."""
ABOUT_200 = range(100, 301)
"""Contexts, in tokens, for which the bars of a decode step hold."""
LONG_PROMPT: Final = 8192
"""Tokens of the prompt that is computed in one step, or cached, or loaded."""
OVERLAP_DECODERS: Final = 32
"""Requests that decode beside loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapBars:
    """What `interlace bench overlap` is held to; None where nothing is asked. Shares and ratios,
    unless a name says otherwise."""

    first_token_ms: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Most, behind `LONG_PROMPT` tokens that are loaded layer by layer, by the number of new ones.
    """
    hidden_new: frozenset[int] = frozenset()
    """Numbers of new tokens for which `hidden` is asked, beside where loading takes as long as
    computing."""
    hidden: float | None = None
    """Least share of a load, or of computing, that is hidden."""
    link_one_run: float | None = None
    """Least rate of a layer-wise load of one run, by that of one long copy."""
    link_full_pool: float | None = None
    """The same in a pool that was used for long."""
    submit_ms: float | None = None
    mixed: float | None = None
    """Most that a load within it stretches a step of a batch."""
    idle: float | None = None
    """Most that a connector with nothing to do stretches a step."""
    idle_host_us: float | None = None
    beside: float | None = None
    """Most that loads beside the steps stretch a batch's gaps, at the 99th percentile."""
    gap_steps: float | None = None
    """Decode steps, beside the longest stall, that the 99th percentile of gaps may take."""
    saving: float | None = None
    """Most that saving stretches a step."""
    split: float | None = None
    """Most that a request loaded from both ends takes by what the balanced split promises."""
    mode_usual: float | None = None
    """Most that the chosen mode takes by the best fixed one, nearly everywhere."""
    mode_worst: float | None = None
    """The same, everywhere."""


NO_OVERLAP_BARS: Final = OverlapBars()


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """For one model, most milliseconds unless `overlap` says otherwise. Empty where nothing is
    asked."""

    decode_steps: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """By batch size."""
    long_prompt: float | None = None
    hits: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """First token behind `LONG_PROMPT` cached tokens, by the number of new ones."""
    overlap: OverlapBars = NO_OVERLAP_BARS

    def decode(self, batch_size: int, context: int) -> float | None:
        """For one step; `context` is tokens of each request."""
        return self.decode_steps.get(batch_size) if context in ABOUT_200 else None

    def prefill(self, batch_size: int, prompt_tokens: int) -> float | None:
        """For the first token of new prompts."""
        return self.long_prompt if (batch_size, prompt_tokens) == (1, LONG_PROMPT) else None

    def hit(self, cached: int, new: int) -> float | None:
        """For the first token of a prompt whose first tokens are cached."""
        return self.hits.get(new) if cached == LONG_PROMPT else None

    def overlapping(self, cached: int, num_decoders: int) -> OverlapBars:
        """For loads of so many tokens, beside so many requests that decode."""
        is_asked = cached == LONG_PROMPT and num_decoders == OVERLAP_DECODERS
        return self.overlap if is_asked else NO_OVERLAP_BARS


NO_BARS: Final = Bars()
_OVERLAP: Final = OverlapBars(
    hidden=0.93,
    link_one_run=0.97,
    link_full_pool=0.85,
    submit_ms=1.0,
    mixed=1.05,
    idle=1.005,
    idle_host_us=20.0,
    beside=1.10,
    gap_steps=2.0,
    saving=1.01,
    split=1.10,
    mode_usual=1.05,
    mode_worst=1.15,
)
_BARS: Final[Mapping[str, Bars]] = {
    "dummy:llama-3.1-8b": Bars(
        decode_steps={1: 5.0, 8: 5.3, 32: 5.8},
        long_prompt=220.0,
        hits={16: 8.0, 128: 11.0, 688: 28.0, 1984: 66.0},
        overlap=dataclasses.replace(
            _OVERLAP,
            first_token_ms={16: 23.0, 128: 24.0, 688: 30.0, 1984: 68.0},
            hidden_new=frozenset({688}),
        ),
    ),
    "dummy:qwen3-0.6b": Bars(decode_steps={1: 1.6, 32: 2.0}, long_prompt=34.0, overlap=_OVERLAP),
}


def bars_for(gpu: str | None, model: str, dtype: str) -> Bars:
    """The bars of `model` on the GPU of this name, None for no GPU."""
    if gpu is None or MACHINE not in gpu or dtype != "bfloat16":
        return NO_BARS
    return _BARS.get(model, NO_BARS)
