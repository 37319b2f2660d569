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
"""Tokens of the prompt that is computed in one step, or cached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Most milliseconds for one model. Empty where nothing is asked."""

    decode_steps: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """By batch size."""
    long_prompt: float | None = None
    hits: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """First token behind `LONG_PROMPT` cached tokens, by the number of new ones."""
    layerwise_loads: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """The same, behind tokens that are loaded from host memory layer by layer."""
    hidden_shares: tuple[int, ...] = ()
    """Numbers of new tokens for which a load must be hidden nearly all."""

    def decode(self, batch_size: int, context: int) -> float | None:
        """For one step; `context` is tokens of each request."""
        return self.decode_steps.get(batch_size) if context in ABOUT_200 else None

    def prefill(self, batch_size: int, prompt_tokens: int) -> float | None:
        """For the first token of new prompts."""
        return self.long_prompt if (batch_size, prompt_tokens) == (1, LONG_PROMPT) else None

    def hit(self, cached: int, new: int) -> float | None:
        """For the first token of a prompt whose first tokens are cached."""
        return self.hits.get(new) if cached == LONG_PROMPT else None


NO_BARS: Final = Bars()
_BARS: Final[Mapping[str, Bars]] = {
    "dummy:llama-3.1-8b": Bars(
        decode_steps={1: 5.0, 8: 5.3, 32: 5.8},
        long_prompt=220.0,
        hits={16: 8.0, 128: 11.0, 688: 28.0, 1984: 66.0},
        layerwise_loads={16: 23.0, 128: 24.0, 688: 30.0, 1984: 68.0},
        hidden_shares=(688,),
    ),
    "dummy:qwen3-0.6b": Bars(decode_steps={1: 1.6, 32: 2.0}, long_prompt=34.0),
}


def bars_for(gpu: str | None, model: str, dtype: str) -> Bars:
    """The bars of `model` on the GPU of this name, None for no GPU."""
    if gpu is None or MACHINE not in gpu or dtype != "bfloat16":
        return NO_BARS
    return _BARS.get(model, NO_BARS)
