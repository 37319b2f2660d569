"""How a slab lies on the disk: what was packed is what is parsed, and damage is never believed."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import SPACE, block_hash, header

from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    MAGIC,
    NO_PARENT,
    PAGE_BYTES,
    VERSION,
    DamagedSlabError,
    Entry,
    SlabHeader,
    SlabShape,
    pack_entries,
    parse_entries,
)

HASHES = st.binary(min_size=32, max_size=32)
NAMES = st.text(st.characters())
"""Surrogates too: a path need not be text."""
PREFIX_BYTES = 24


# ---------------------------------------------------------------- shapes


@given(record_bytes=st.integers(1, 10**7), num_records=st.integers(1, 10**5))
def test_records_lie_on_pages_one_behind_the_other(record_bytes: int, num_records: int) -> None:
    shape = SlabShape(record_bytes, num_records)
    last = num_records - 1
    assert shape.data_at % PAGE_BYTES == shape.pitch % PAGE_BYTES == 0
    assert shape.entry_at(0) == HEADER_BYTES
    assert shape.entry_at(last) + ENTRY_BYTES <= shape.data_at == shape.record_at(0)
    assert record_bytes <= shape.pitch < record_bytes + PAGE_BYTES
    assert shape.record_at(last) + shape.pitch == shape.file_bytes


@given(num_bytes=st.integers(0, 10**8), record_bytes=st.integers(1, 10**6))
def test_a_slab_fits_what_it_was_made_for(num_bytes: int, record_bytes: int) -> None:
    shape = SlabShape.within(num_bytes, record_bytes)
    assert shape.num_records >= 1
    assert shape.num_records == 1 or shape.file_bytes <= num_bytes
    bigger = SlabShape(record_bytes, shape.num_records + 2)
    assert bigger.file_bytes > num_bytes, "little is wasted"


# ---------------------------------------------------------------- the header


@settings(deadline=None)
@given(name=NAMES, record_bytes=st.integers(1, 2**40), num_records=st.integers(1, 2**32 - 1))
def test_a_header_comes_back(name: str, record_bytes: int, num_records: int) -> None:
    facts = {**SPACE.facts, "model_name": name[:600]}
    written = SlabHeader(facts, SlabShape(record_bytes, num_records))
    data = written.to_bytes()
    assert len(data) == HEADER_BYTES
    assert SlabHeader.from_bytes(data) == written
    assert SlabHeader.from_bytes(data + b"whatever follows") == written


@pytest.mark.parametrize(
    "name", ["", "\0", "\ud800", "\udcff/\udc80", "\ud83d\ude00", "\U0001f600", '"\\\n', "\ufeff"]
)
def test_b62_names_with_odd_characters_come_back(name: str) -> None:
    facts = {**SPACE.facts, "model_name": name}
    data = SlabHeader(facts, SlabShape(8, 1)).to_bytes()
    assert SlabHeader.from_bytes(data).space["model_name"] == name


def test_a_header_is_clear_text() -> None:
    text = header().to_bytes()[PREFIX_BYTES:].rstrip(b"\0")
    assert json.loads(text)["space"]["model_name"] == "toy"


@pytest.mark.parametrize("character", ["x", "\u00e4", "\udc80"])
def test_facts_that_are_too_long_are_an_error_with_a_remedy(character: str) -> None:
    facts = {**SPACE.facts, "model_name": character * HEADER_BYTES}
    with pytest.raises(ValueError, match=r"has room for 8168: give the model a shorter name"):
        SlabHeader(facts, SlabShape(8, 1)).to_bytes()


def test_facts_that_just_fit_fit() -> None:
    facts = {**SPACE.facts, "model_name": ""}
    used = len(SlabHeader(facts, SlabShape(8, 1)).to_bytes().rstrip(b"\0"))
    full = SlabHeader({**facts, "model_name": "x" * (HEADER_BYTES - used)}, SlabShape(8, 1))
    assert SlabHeader.from_bytes(full.to_bytes()) == full
    with pytest.raises(ValueError):
        SlabHeader({**facts, "model_name": "x" * (HEADER_BYTES - used + 1)}, full.shape).to_bytes()


def test_b62_every_flipped_bit_of_a_header_is_found() -> None:
    """In the zeros behind its text too: all of it is what was written, or none of it counts."""
    data = bytearray(header().to_bytes())
    for bit in range(8 * HEADER_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedSlabError):
            SlabHeader.from_bytes(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    assert SlabHeader.from_bytes(bytes(data)) == header()


def test_b65_a_header_that_was_cut_off_is_found() -> None:
    data = header().to_bytes()
    for length in range(HEADER_BYTES):
        with pytest.raises(DamagedSlabError):
            SlabHeader.from_bytes(data[:length])


def test_another_version_is_named() -> None:
    data = bytearray(header().to_bytes())
    struct.pack_into("<I", data, len(MAGIC), 4711)
    with pytest.raises(DamagedSlabError, match=f"version 4711, .* reads {VERSION}"):
        SlabHeader.from_bytes(bytes(data))


def with_text(text: bytes) -> bytes:
    """A header whose digest is right."""
    prefix = struct.pack("<8sIIQ", MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text))
    return (prefix + text).ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[" * 8000,
        b'{"space":' * 800,
        b"\xff\xfe",
        b"{}",
        b'{"space": 1, "record_bytes": 8, "num_records": 1}',
        b'{"space": {}, "record_bytes": Infinity, "num_records": 1}',
        b'{"space": {}, "record_bytes": 8, "num_records": 0}',
        b'{"space": {}, "record_bytes": -8, "num_records": 1}',
        b'{"space": {}, "record_bytes": "8", "num_records": 1}',
        b'{"space": {}, "record_bytes": 8, "num_records": NaN}',
        b'{"space": {}, "record_bytes": 8, "num_records": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_header_that_says_nonsense_is_damaged(text: bytes) -> None:
    with pytest.raises(DamagedSlabError):
        SlabHeader.from_bytes(with_text(text))


@settings(deadline=None)
@given(data=st.binary(max_size=200), is_ours=st.booleans())
def test_what_is_no_header_is_damaged(data: bytes, *, is_ours: bool) -> None:
    data = (MAGIC * is_ours + data).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(DamagedSlabError):
        SlabHeader.from_bytes(data)


# ---------------------------------------------------------------- the index


def entry(number: int) -> Entry:
    return Entry(number, block_hash(number + 7), block_hash(number + 6), 10**15 + number, number)


@settings(deadline=None)
@given(
    facts=st.lists(
        st.tuples(HASHES, HASHES, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
        max_size=20,
    ),
    first=st.integers(0, 2**31),
    is_sealed=st.booleans(),
)
def test_entries_come_back(
    facts: list[tuple[bytes, bytes, int, int]], first: int, *, is_sealed: bool
) -> None:
    """Hashes with zeros at their end too."""
    entries = [Entry(first + place, *one) for place, one in enumerate(facts)]
    data = pack_entries(entries)
    assert len(data) == len(entries) * ENTRY_BYTES
    assert parse_entries(data, first, is_sealed=is_sealed) == (entries, len(entries))


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ((), ()),
        ((0, 1, 49_151), (0, 1, 49_151)),
        (tuple(range(9)), tuple(range(8))),
        ((7, 2**24 - 1, 2**24, 5), (7, 2**24 - 1)),
    ],
)
def test_first_tokens_come_back_if_they_are_asked_for(
    told: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    """Eight at most, up to one that takes more than three bytes."""
    data = pack_entries([entry(0)._replace(first_tokens=told)])
    assert parse_entries(data, 0, is_sealed=False).entries == [entry(0)]
    (found,) = parse_entries(data, 0, is_sealed=False, with_tokens=True).entries
    assert found.first_tokens == kept


def test_hashes_that_end_with_zeros_stay_whole() -> None:
    one = Entry(0, b"\1" + bytes(31), NO_PARENT, 0, 0)
    assert parse_entries(pack_entries([one]), 0, is_sealed=False).entries == [one]


def test_b62_a_flipped_bit_loses_that_entry_and_makes_no_other() -> None:
    entries = [entry(number) for number in range(3)]
    data = bytearray(pack_entries(entries))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        hit = bit // 8 // ENTRY_BYTES
        sealed = parse_entries(bytes(data), 0, is_sealed=True)
        assert sealed == ([one for one in entries if one.record != hit], 3)
        live = parse_entries(bytes(data), 0, is_sealed=False)
        assert live == (entries[:hit], hit), "and it is looked at again"
        data[bit // 8] ^= 1 << bit % 8


def test_an_entry_counts_in_its_own_place_only() -> None:
    data = pack_entries([entry(0), entry(1)])
    swapped = data[ENTRY_BYTES:] + data[:ENTRY_BYTES]
    assert parse_entries(swapped, 0, is_sealed=True).entries == []
    assert parse_entries(data, 1, is_sealed=True).entries == []
    assert parse_entries(data[ENTRY_BYTES:], 1, is_sealed=True).entries == [entry(1)]


@settings(max_examples=100, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["whole", "empty", "torn", "random"]), max_size=12),
    seed=st.binary(min_size=ENTRY_BYTES, max_size=ENTRY_BYTES),
    cut=st.integers(1, ENTRY_BYTES - 1),
    is_sealed=st.booleans(),
)
def test_a_live_index_ends_at_its_first_hole_and_a_sealed_one_does_not(
    kinds: list[str], seed: bytes, cut: int, *, is_sealed: bool
) -> None:
    packed = [pack_entries([entry(place)]) for place in range(len(kinds))]
    torn = [whole[:cut] + bytes(ENTRY_BYTES - cut) for whole in packed]
    others = {"empty": bytes(ENTRY_BYTES), "random": seed}
    data = [
        {**others, "torn": torn[place], "whole": packed[place]}[kind]
        for place, kind in enumerate(kinds)
    ]
    is_whole = [one == whole for one, whole in zip(data, packed, strict=True)]
    end = len(kinds) if is_sealed or all(is_whole) else is_whole.index(False)
    parsed = parse_entries(b"".join(data), 0, is_sealed=is_sealed)
    assert parsed == ([entry(place) for place in range(end) if is_whole[place]], end)


# ---------------------------------------------------------------- the space


def test_b72_b71_a_folder_for_each_of_model_type_layout_size_group_rank_layers_and_pages() -> None:
    changes = {
        "model": "cd" * 32,
        "dtype": "bfloat16",
        "layout": "other",
        "block_size": 8,
        "group": 1,
        "rank": 1,
        "world_size": 2,
    }
    identities = [
        dataclasses.replace(SPACE.identity, **{name: value})  # type: ignore[arg-type]
        for name, value in changes.items()
    ]
    spaces = [dataclasses.replace(SPACE, identity=identity) for identity in identities]
    spaces += [dataclasses.replace(SPACE, num_layers=4), dataclasses.replace(SPACE, page_bytes=704)]
    assert len({one.folder_name for one in (SPACE, *spaces)}) == len(spaces) + 1
    assert len(changes) == len(dataclasses.fields(SPACE.identity))
    for one in (SPACE, *spaces):
        assert len(bytes.fromhex(one.folder_name)) == 8


def test_two_names_of_a_model_share_a_folder() -> None:
    other = dataclasses.replace(SPACE, model_name="/models/\udcff")
    assert other.folder_name == SPACE.folder_name
    assert other.facts != SPACE.facts
