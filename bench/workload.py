"""What the arms of a benchmark are given to do. Knows nothing of who does it."""

from __future__ import annotations

import dataclasses
import itertools
import random


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Prompts to run together, all of one length, and how many tokens to generate for each."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def batch_size(self) -> int:
        """Requests at once."""
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])


class WorkSource:
    """Makes prompts of random token ids; no two of one source begin alike.

    The same seed gives the same prompts in the same order. Nothing that a source made can hit
    the prefix cache of an engine that saw only its earlier prompts: the first tokens count up.
    """

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        """`vocab_size` is the number of token ids, at least 2."""
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._serial = itertools.count()

    def make(self, batch_size: int, prompt_tokens: int, output_tokens: int) -> Work:
        """Work never seen before: `batch_size` prompts of `prompt_tokens` ids each."""
        prompts = tuple(self._prompt(prompt_tokens) for _ in range(batch_size))
        return Work(prompts, output_tokens)

    def behind(self, prefix: Work, count: int, output_tokens: int = 1) -> Work:
        """Each prompt of `prefix` and `count` tokens that never followed it before."""
        prompts = tuple((*first, *self._prompt(count)) for first in prefix.prompts)
        return Work(prompts, output_tokens)

    def _prompt(self, length: int) -> tuple[int, ...]:
        # The serial number in base `vocab_size`, least digit first: unique, not just unlikely.
        high, low = divmod(next(self._serial), self._vocab_size)
        ids = self._random.choices(range(self._vocab_size), k=length)
        return (low, high % self._vocab_size, *ids)[:length]
