"""The checksum of a record: what a CPU adds up quickly, and a GPU in any order.

A record is seen as 32-bit words in rows of 1024, the last row filled up with zeros. The checksum is
the sum of word * (row factor + column factor), modulo 2^64: so numpy needs the sums of rows and of
columns only. Row factors are odd and column factors even, so their sum is odd, and one changed bit
always changes the checksum. Factors of 64 bits for words of 32: the same bit of two words, be it
the highest, still weighs different numbers. Factors come from splitmix64, so what is moved, or
swapped, weighs another number.

It finds damage, and is no proof against who makes some on purpose: two rows that are swapped are
not seen if their words add up to the same, for instance. (With words of 64 bits, which are added
three times as fast, two flipped highest bits would cancel out.)
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

COLUMNS = 1024
"""Words of a row: 4 KiB."""
_WORD_BYTES = 4

Words = npt.NDArray[np.uint64]


def _splitmix(first: int, count: int) -> Words:
    """Numbers `first` and following of the sequence that begins at 0."""
    with np.errstate(over="ignore"):
        x = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def factors(num_rows: int) -> tuple[Words, Words]:
    """(of so many rows, of columns): for who adds up the same elsewhere. Not to be changed."""
    columns = _splitmix(0, COLUMNS) & ~np.uint64(1)
    rows = _splitmix(COLUMNS, num_rows) | np.uint64(1)
    return rows, columns


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Of a record, uint8, contiguous, of any shape. Any thread; lets others run meanwhile."""
    flat = data.reshape(-1)
    num_whole = len(flat) // (COLUMNS * _WORD_BYTES)
    rows, columns = factors(num_whole + 1)
    body = flat[: num_whole * COLUMNS * _WORD_BYTES].view(np.uint32).reshape(num_whole, COLUMNS)
    rest = np.zeros(COLUMNS * _WORD_BYTES, np.uint8)
    rest[: len(flat) - body.nbytes] = flat[body.nbytes :]
    last = rest.view(np.uint32).astype(np.uint64)
    by_row = body.sum(axis=1, dtype=np.uint64)
    by_column = body.sum(axis=0, dtype=np.uint64) + last
    # Python's numbers where there is one: numpy warns if single ones overflow.
    parts = (by_row * rows[:-1]).sum(), (by_column * columns).sum()
    return (sum(map(int, parts)) + int(last.sum()) * int(rows[-1])) % 2**64
