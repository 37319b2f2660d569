"""How a slab file lies on the disk: header, index, records. Pure.

    0          header: magic, version, length, digest, and JSON in clear text, `HEADER_BYTES` in all
    index_at   an entry of 128 bytes for each record, zeros until the record is published
    data_at    records, each from a page on, so that they can be mapped and read without a cache

All numbers are little endian.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from interlace.engine.errors import InterlaceError

MAGIC = b"ILKVSLAB"
VERSION = 1
HEADER_BYTES = 8192
PAGE_BYTES = 4096
HASH_BYTES = 32
NO_PARENT = bytes(HASH_BYTES)
"""In an entry: the block is the first of its prompt."""
_PREFIX = struct.Struct("<8sIIQ")
_ENCODING = ("utf-8", "surrogatepass")
_MARK = b"KVRECORD"
_ENTRY = np.dtype(
    [
        ("mark", "S8"),
        ("record", "<u4"),
        ("num_tokens", "<u4"),
        ("block_hash", "V32"),
        ("parent_hash", "V32"),
        ("checksum", "<u8"),
        ("saved_ns", "<u8"),
        ("tokens", "u1", (8, 3)),
        ("digest", "<u8"),
    ]
)
ENTRY_BYTES = _ENTRY.itemsize
MOST_TOKENS, _MOST_TOKEN_ID = 8, 2**24 - 1
"""Of a block that an entry tells, for people who look at a store."""
_NUM_TOKENS_AT, _TOKENS_AT = (_ENTRY.fields[name][1] for name in ("num_tokens", "tokens"))  # type: ignore[index]
_DIGESTED = ENTRY_BYTES - 8


class DamagedSlabError(InterlaceError):
    """A file is not what was written: what it holds is computed again."""


class DamagedRecordError(DamagedSlabError):
    """A record is not what was written. The message names it and its file."""

    def __init__(self, file_name: str, record: int, reason: str) -> None:
        """`reason` is what "record 3 of FILE" is or has."""
        super().__init__(f"record {record} of {file_name} {reason}")
        self.reason = f"it {reason}"
        """For who names the record already."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlabShape:
    """Where things lie in a slab."""

    record_bytes: int
    num_records: int

    @property
    def pitch(self) -> int:
        """Bytes from one record to the next."""
        return _whole_pages(self.record_bytes)

    @property
    def data_at(self) -> int:
        """Of the first record."""
        return HEADER_BYTES + _whole_pages(self.num_records * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.data_at + self.num_records * self.pitch

    def record_at(self, record: int) -> int:
        """Of this record."""
        return self.data_at + record * self.pitch

    @staticmethod
    def entry_at(record: int) -> int:
        """Of this record's entry."""
        return HEADER_BYTES + record * ENTRY_BYTES

    @classmethod
    def within(cls, num_bytes: int, record_bytes: int) -> SlabShape:
        """As many records as fit into a file of so many bytes, one at least."""
        each = _whole_pages(record_bytes) + ENTRY_BYTES
        count = max(1, (num_bytes - HEADER_BYTES - PAGE_BYTES) // each)
        return cls(record_bytes, count)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


# -------------------------------------------------------------------- header


@dataclasses.dataclass(frozen=True, slots=True)
class SlabHeader:
    """Whose KV a slab holds."""

    space: Mapping[str, Any]
    """See `Space.facts`: model, dtype, layout, block size, and what else must be equal."""
    shape: SlabShape

    def to_bytes(self) -> bytes:
        """`HEADER_BYTES` of them. Raises: `ValueError` if the facts are too long."""
        document = {"space": dict(self.space), **dataclasses.asdict(self.shape)}
        # A model's name may be a path, and a path any bytes: surrogates in a str.
        text = json.dumps(document, ensure_ascii=False, sort_keys=True).encode(*_ENCODING)
        room = HEADER_BYTES - _PREFIX.size
        if len(text) > room:
            raise ValueError(
                f"what a slab holds takes {len(text)} bytes to say, and its header has room for"
                f" {room}: give the model a shorter name or path."
            )
        prefix = _PREFIX.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text))
        return (prefix + text).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> SlabHeader:
        """Raises: `DamagedSlabError`, also for another version."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise DamagedSlabError("it has no header of a slab")
        data = data[:HEADER_BYTES]
        _, version, length, digest = _PREFIX.unpack_from(data)
        if version != VERSION:
            raise DamagedSlabError(f"it has version {version}, and this Interlace reads {VERSION}")
        text = data[_PREFIX.size : _PREFIX.size + length]
        if len(text) != length or xxhash.xxh3_64_intdigest(text) != digest:
            raise DamagedSlabError("its header has another digest than it says")
        if data[_PREFIX.size + length :].strip(b"\0"):  # the digest is of the text alone
            raise DamagedSlabError("its header has something behind its end")
        try:
            document = json.loads(text.decode(*_ENCODING))
            shape = SlabShape(_size(document["record_bytes"]), _size(document["num_records"]))
            return cls(dict(document["space"]), shape)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedSlabError(f"its header cannot be read: {error}") from error


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value


# -------------------------------------------------------------------- index


class Entry(NamedTuple):
    """One published record."""

    record: int
    block_hash: bytes
    parent_hash: bytes
    """`NO_PARENT` if there is none."""
    checksum: int
    saved_ns: int
    """Since the epoch."""
    first_tokens: tuple[int, ...] = ()
    """`MOST_TOKENS` at most: what the prompt begins with, of a block without a parent, if that was
    told, and asked for."""


def pack_entries(entries: list[Entry]) -> bytes:
    """One after another."""
    packed = np.zeros(len(entries), _ENTRY)
    packed["mark"] = _MARK
    for place, entry in enumerate(entries):
        assert len(entry.block_hash) == len(entry.parent_hash) == HASH_BYTES
        row = packed[place]
        row["record"], row["checksum"] = entry.record, entry.checksum
        row["saved_ns"] = entry.saved_ns
        row["block_hash"], row["parent_hash"] = entry.block_hash, entry.parent_hash
        _pack_tokens(row, entry.first_tokens)
        row["digest"] = xxhash.xxh3_64_intdigest(row.tobytes()[:_DIGESTED])
    return packed.tobytes()


def _pack_tokens(row: np.void, token_ids: Sequence[int]) -> None:
    """Up to the first that takes more than three bytes."""
    told = list(itertools.takewhile(_MOST_TOKEN_ID.__ge__, token_ids[:MOST_TOKENS]))
    row["num_tokens"] = len(told)
    for place, token_id in enumerate(told):
        row["tokens"][place] = list(token_id.to_bytes(3, "little"))


def _tokens_of(raw: bytes) -> tuple[int, ...]:
    """Of a whole entry."""
    count = min(MOST_TOKENS, int.from_bytes(raw[_NUM_TOKENS_AT : _NUM_TOKENS_AT + 4], "little"))
    parts = (raw[_TOKENS_AT + 3 * i : _TOKENS_AT + 3 * i + 3] for i in range(count))
    return tuple(int.from_bytes(part, "little") for part in parts)


class Parsed(NamedTuple):
    """A part of an index."""

    entries: list[Entry]
    num_seen: int
    """Places at the beginning that need no further look."""


def parse_entries(
    data: bytes, first_record: int, *, is_sealed: bool, with_tokens: bool = False
) -> Parsed:
    """The entries in `data`, whole places from that of `first_record` on; `with_tokens`: with what
    they tell of first tokens.

    Of a sealed slab all places are looked at, and what is damaged is passed over. Of another one
    the first place that is empty or damaged ends it: that entry may be under way.
    """
    rows = np.frombuffer(data, _ENTRY)
    columns = [rows[name].tolist() for name in ("mark", "record", "checksum", "saved_ns", "digest")]
    entries: list[Entry] = []
    for place, (mark, record, checksum, saved_ns, digest) in enumerate(zip(*columns, strict=True)):
        raw = data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]
        is_whole = mark == _MARK and xxhash.xxh3_64_intdigest(raw[:_DIGESTED]) == digest
        if is_whole and record == first_record + place:
            tokens = _tokens_of(raw) if with_tokens else ()
            entries.append(Entry(record, raw[16:48], raw[48:80], checksum, saved_ns, tokens))
        elif not is_sealed:
            return Parsed(entries, place)
    return Parsed(entries, len(rows))
