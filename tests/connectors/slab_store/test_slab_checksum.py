"""The checksum of a record: what it adds up, what it finds, and that it is the same everywhere."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import said, start

from interlace.connectors.slab_store.checksum import COLUMNS, checksum

Bytes = npt.NDArray[np.uint8]
ROW_BYTES = 4 * COLUMNS
PAGE_BYTES = 1400
"""Of a layer: no whole words."""
SIZES = (0, 1, 7, 8, 9, 511, 4088, 4095, 4096, 4097, 8192, 12289, 5 * ROW_BYTES + 333)


def some_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# ---------------------------------------------------------------- a twin, in plain Python


def splitmix64(number: int) -> int:
    """The number of that place in the sequence that begins at 0."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def twin(data: bytes) -> int:
    total = 0
    for number in range(-(-len(data) // 4)):
        word = int.from_bytes(data[4 * number : 4 * number + 4].ljust(4, b"\0"), "little")
        row, column = divmod(number, COLUMNS)
        total += word * ((splitmix64(COLUMNS + row) | 1) + (splitmix64(column) & ~1))
    return total % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_it_adds_up_what_it_says(size: int) -> None:
    data = some_bytes(size, seed=size)
    assert checksum(data) == twin(data.tobytes())


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 3 * ROW_BYTES + 9), seed=st.integers(0, 99), fill=st.booleans())
def test_any_size_and_any_content(size: int, seed: int, *, fill: bool) -> None:
    data = np.full(size, 0xFF, np.uint8) if fill else some_bytes(size, seed)
    assert checksum(data) == twin(data.tobytes())


def test_shape_and_place_in_memory_do_not_matter() -> None:
    data = some_bytes(4 * ROW_BYTES)
    expected = checksum(data)
    assert checksum(data.reshape(4, 8, -1)) == expected
    moved = np.empty(len(data) + 3, np.uint8)[3:]  # at an odd address
    moved[:] = data
    assert checksum(moved) == expected


# ---------------------------------------------------------------- what it finds


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 3 * ROW_BYTES + 9),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    seed=st.integers(0, 9),
)
def test_b62_one_flipped_bit_always_changes_it(
    size: int, place: float, bit: int, seed: int
) -> None:
    data = some_bytes(size, seed)
    before = checksum(data)
    data[int(place * size)] ^= 1 << bit
    assert checksum(data) != before


@pytest.mark.parametrize("size", [1, 9, ROW_BYTES + 1])
def test_no_single_bit_weighs_nothing(size: int) -> None:
    for bit in range(8 * size):
        data = np.zeros(size, np.uint8)
        data[bit // 8] = 1 << bit % 8
        assert checksum(data) != 0


@settings(max_examples=200, deadline=None)
@given(
    words=st.sets(st.integers(0, 2 * COLUMNS - 1), min_size=2, max_size=4),
    bit=st.integers(24, 31),
    seed=st.integers(0, 9),
)
def test_the_same_high_bit_of_several_words_does_not_cancel_out(
    words: set[int], bit: int, seed: int
) -> None:
    """As a line of memory that is stuck would flip it."""
    data = some_bytes(2 * ROW_BYTES, seed)
    before = checksum(data)
    for word in words:
        data.view(np.uint32)[word] ^= np.uint32(1 << bit)
    assert checksum(data) != before


def parts(data: Bytes, size: int) -> list[Bytes]:
    return [data[at : at + size] for at in range(0, len(data) - size + 1, size)]


@pytest.mark.parametrize("size", [8, 512, PAGE_BYTES, ROW_BYTES, 2 * ROW_BYTES])
def test_swapped_parts_are_found(size: int) -> None:
    """Pages of layers, rows, sectors, words."""
    data = some_bytes(6 * size + 5)
    before = checksum(data)
    for first in range(6):
        for second in range(first):
            swapped = data.copy()
            swapped[first * size : (first + 1) * size] = parts(data, size)[second]
            swapped[second * size : (second + 1) * size] = parts(data, size)[first]
            assert checksum(swapped) != before


@pytest.mark.parametrize("size", [1, 512, PAGE_BYTES, ROW_BYTES])
def test_one_part_in_the_place_of_another_is_found(size: int) -> None:
    data = some_bytes(6 * size + 5)
    before = checksum(data)
    for first in range(6):
        for second in range(6):
            copied = data.copy()
            copied[first * size : (first + 1) * size] = parts(data, size)[second]
            assert (checksum(copied) != before) == bool((copied != data).any())


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 3 * ROW_BYTES), length=st.integers(1, 2 * ROW_BYTES))
def test_zeroed_ranges_are_found(first: int, length: int) -> None:
    data = some_bytes(3 * ROW_BYTES + 100) | np.uint8(1)
    before = checksum(data)
    data[first : first + length] = 0
    assert checksum(data) != before


@settings(max_examples=60, deadline=None)
@given(by=st.one_of(st.integers(1, 64), st.sampled_from([512, PAGE_BYTES, ROW_BYTES, 8192])))
def test_shifted_data_is_found(by: int) -> None:
    data = some_bytes(3 * ROW_BYTES + 100)
    before = checksum(data)
    assert checksum(np.roll(data, by)) != before
    assert checksum(np.concatenate([np.zeros(by, np.uint8), data[:-by]])) != before
    assert checksum(np.concatenate([data[by:], np.zeros(by, np.uint8)])) != before


# ---------------------------------------------------------------- everywhere the same

FIXED = {
    0: 0x0000000000000000,
    1: 0x0000000000000000,
    9: 0x32A9128641A1F40C,
    4096: 0x4B8458E5A43882E9,
    10000: 0xE412FFB15E7E4228,
}
CODE = """
import numpy as np
from interlace.connectors.slab_store.checksum import checksum
for size in (0, 1, 9, 4096, 10000):
    print(checksum((np.arange(size) * 7 % 251).astype(np.uint8)))
"""


def test_b78_it_is_equal_in_every_process_and_for_ever() -> None:
    processes = [start(CODE, seed=seed) for seed in ("1", "2")]
    for process in processes:
        assert [int(line) for line in said(process).split()] == list(FIXED.values())


def test_threads_do_not_disturb_each_other() -> None:
    """Of many sizes: more than there are tables of factors for."""
    expected = {size: checksum(some_bytes(size)) for size in range(0, 16 * ROW_BYTES, ROW_BYTES)}
    wrong: list[int] = []

    def check() -> None:
        for size, value in list(expected.items()) * 3:
            if checksum(some_bytes(size)) != value:
                wrong.append(size)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
