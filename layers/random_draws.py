"""The random numbers of sampling: a function of (seed, output position) and of nothing else.

Knows nothing of logits. It is SplitMix64 read as a counter: the stream of `seed` starts at
`mix64(seed)`, and draw i is `mix64(start + (i + 1) * GAMMA)`, all modulo 2**64. Whole numbers
only, so every platform and device gives the same bits, and no state can be shared by accident.
"""

from __future__ import annotations

GAMMA = 0x9E3779B97F4A7C15
"""The step of the counter: 2**64 divided by the golden ratio, made odd."""
_MASK = 2**64 - 1


def mix64(value: int) -> int:
    """A bijection of [0, 2**64) that flips about half of the bits for any change of one.

    `value` is taken modulo 2**64. Any thread.
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, that decides the draw at one output position.

    `seed` is in [0, 2**64); `position` counts the request's output tokens from 0. Any thread.
    """
    # The seed is mixed first: neighbouring seeds must not give shifted copies of one stream.
    return (mix64(mix64(seed) + (position + 1) * GAMMA) >> 11) * 2.0**-53
