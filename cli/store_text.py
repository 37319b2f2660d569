"""What `interlace store` prints: lines, columns, sizes and ages, or JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from interlace.cli.screen import harmless, is_terminal
from interlace.cli.store_arguments import SECONDS

if TYPE_CHECKING:
    from interlace.cli.store_words import Words
    from interlace.connectors.slab_store.inspection.reports import (
        Choices,
        Collected,
        FileReport,
        Listing,
        Prefix,
        Removal,
        Statistics,
        Verification,
    )

HASH_DIGITS = 12
_HEADS = (
    "HASH",
    "TOKENS",
    "CHAINS",
    "BLOCKS",
    "BYTES",
    "AGE",
    "USED",
    "HITS",
    "BLOCK",
    "DTYPE",
)
_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_BAD, _UNREAD, _REMOVED = "bad", "unread", "removed"


def safe(text: str) -> str:
    """Text on one line that cannot drive a terminal and can be encoded."""
    one_line = harmless(text).replace("\n", "^J").replace("\t", "^I")
    return one_line.encode("utf-8", "backslashreplace").decode("utf-8")


def print_lines(lines: Iterable[str]) -> None:
    """Print them, what went wrong in colour on a terminal."""
    in_colour = is_terminal(sys.stdout)
    for line in lines:
        shown = safe(line)
        if in_colour and line.startswith((f"{_BAD} ", f"{_UNREAD} ", "failed ")):
            word, _, rest = shown.partition(" ")
            shown = f"{typer.style(word, fg=typer.colors.RED)} {rest}"
        typer.echo(shown)


def print_json(**fields: Any) -> None:
    """One object; reports in it become objects too."""
    typer.echo(json.dumps(fields, indent=2, default=dataclasses.asdict))


def report_fields(report: Collected) -> dict[str, Any]:
    """Of a report, for `print_json`."""
    return dataclasses.asdict(report)


def verification_fields(found: Verification) -> dict[str, Any]:
    """Of a verification, with its counts."""
    return {
        **dataclasses.asdict(found),
        "num_bad_records": found.num_bad_records,
        "num_bad_files": found.num_bad_files,
        "num_unread_records": found.num_unread_records,
        "num_unread_files": found.num_unread_files,
    }


def removal_fields(removal: Removal) -> dict[str, Any]:
    """Of a removal, with the bytes that it made free."""
    return {**dataclasses.asdict(removal), "num_bytes": removal.num_bytes}


def count(number: int, noun: str) -> str:
    """As in "1 slab" or "2 slabs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_text(number: int) -> str:
    """In powers of 1000, as sizes of disks are."""
    for unit, factor in _UNITS:
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def age_text(since_ns: int, now_ns: int) -> str:
    """In the largest unit that there are two of, but no less than seconds."""
    seconds = max(0, now_ns - since_ns) // 10**9
    for unit in ("d", "h", "m"):
        if seconds >= 2 * SECONDS[unit]:
            return f"{seconds // SECONDS[unit]}{unit}"
    return f"{seconds}s"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines: the last column to the left, for names, and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, row[-1]])


def listing_fields(listing: Listing, words: Words) -> dict[str, Any]:
    """`ls`, for `print_json`: with the words that prefixes begin with, None where they cannot be
    told."""
    fields = dataclasses.asdict(listing)
    for prefix, one in zip(fields["prefixes"], listing.prefixes, strict=True):
        prefix["first_words"] = words.of(one)
    return fields


def listing_lines(listing: Listing, now_ns: int, words: Words) -> Iterator[str]:
    """`ls`: a table of the prefixes that are listed, and what it does not show."""
    shown = listing.prefixes
    with_rank = any(one.world_size > 1 for one in shown)
    begins = [words.of(one) for one in shown]
    with_words = any(begins)
    rank_head, words_head = ("RANK",) if with_rank else (), ("BEGINS",) if with_words else ()
    rows = [(*_HEADS, *rank_head, "MODEL", *words_head)]
    for one, text in zip(shown, begins, strict=True):
        rank = (f"{one.rank}/{one.world_size}",) if with_rank else ()
        last = (text or "-",) if with_words else ()
        rows.append((*_prefix_cells(one, now_ns), *rank, ", ".join(one.model_names), *last))
    if shown:
        yield from _columns(rows)
    num_more = listing.num_prefixes - len(shown)
    if num_more:
        yield f"{num_more} more that were used less recently: --limit shows them"
    if not listing.num_prefixes:
        yield "no prefixes are stored"
    if listing.num_lost_blocks:
        yield (
            f"{count(listing.num_lost_blocks, 'block')} beside these whose prefix has begun with"
            " blocks that are gone: found again once those are stored again"
        )


def _prefix_cells(one: Prefix, now_ns: int) -> tuple[str, ...]:
    return (
        one.first_hash[:HASH_DIGITS],
        str(one.num_tokens),
        str(one.num_leaves),
        str(one.num_blocks),
        size_text(one.num_bytes),
        age_text(one.saved_ns, now_ns),
        age_text(one.used_ns, now_ns),
        str(one.num_hits),
        str(one.block_size),
        one.dtype,
    )


def statistics_lines(one: Statistics, now_ns: int) -> Iterator[str]:
    """`stat`: of one space, or of all."""
    names = ", ".join(one.model_names)
    yield f"{one.folder or 'in all'}{f' ({names})' if one.folder and names else ''}"
    pairs = [("digest of the model", one.model[:16])] if one.model else []
    pairs += [
        ("slabs", f"{one.num_slabs}, {one.num_written} of them with a living writer"),
        ("records", f"{one.num_records}, {one.num_free_records} free in slabs that are written to"),
        ("bytes of files", _held_text(one)),
        ("bytes of records", size_text(one.record_bytes)),
        ("hits", count(one.num_hits, "load")),
    ]
    if one.oldest_ns is not None and one.newest_ns is not None:
        oldest, newest = age_text(one.oldest_ns, now_ns), age_text(one.newest_ns, now_ns)
        pairs.append(("oldest and newest", f"saved {oldest} and {newest} ago"))
    if one.num_being_made:
        pairs.append(("being made", count(one.num_being_made, "slab")))
    if one.num_leftovers:
        size = size_text(one.leftover_bytes)
        pairs.append(("leftovers", f"{one.num_leftovers}, {size}: interlace store gc removes them"))
    pairs += [("left out", f"{file.name}: {file.reason}") for file in one.left_out]
    for label, text in pairs:
        yield f"  {label:20}{text}"


def _held_text(one: Statistics) -> str:
    reserved = f", {size_text(one.reserved_bytes)} more reserved by writers"
    return f"{size_text(one.file_bytes)}{reserved if one.reserved_bytes else ''}"


def verification_lines(found: Verification) -> Iterator[str]:
    """`verify`: a line for each flaw, and one with the counts."""
    for one in found.flawed:
        for flaw in one.flaws:
            place = "" if flaw.record is None else f" record {flaw.record}"
            word = _UNREAD if flaw.is_unread else _BAD
            yield f"{word} {one.file.name}{place}: {flaw.reason}"
    bad = _counts(found.num_bad_records, found.num_bad_files)
    unread = _counts(found.num_unread_records, found.num_unread_files)
    yield (
        f"{count(found.num_slabs, 'slab')}, {count(found.num_records, 'record')},"
        f" {size_text(found.num_bytes)} read: {bad or 'none'} bad"
        f"{f'; {unread} could not be read' if unread else ''}"
    )


def _counts(num_records: int, num_files: int) -> str:
    counts = [count(num_records, "record")] if num_records else []
    counts += [count(num_files, "whole file")] if num_files else []
    return " and ".join(counts)


def removal_lines(removal: Removal, with_them: str) -> Iterator[str]:
    """`rm`, `verify --drop`: a line for each file, and one that ends with `with_them`."""
    for file in removal.removed:
        yield f"{_REMOVED} {file.name}"
    for file in removal.written:
        yield f"kept {file.name}: a process writes to it"
    for one in removal.failed:
        yield f"failed {one.file.name}: it cannot be removed ({one.reason})"
    num_removed = len(removal.removed)
    size = size_text(removal.num_bytes)
    if num_removed:
        yield f"{count(num_removed, 'file')} removed, {size}{with_them}"
    else:
        yield "nothing was removed"


def choices_line(
    there: Choices, now_ns: int, *, model: str | None, prefix: str | None, older_than: str | None
) -> str | None:
    """`rm` that chose nothing: what it could have chosen by the option that is not None; None
    without one."""
    from interlace.connectors.slab_store.inspection.removal import DIGEST_DIGITS

    if model is prefix is older_than is None:
        return None
    if there.used_ns is None:
        return "the store has no slabs"
    if model is not None:
        names = [f"{one.name} ({one.digest[:DIGEST_DIGITS]})" for one in there.models]
        known = _few(names, there.num_models, "stat")
        return f"no slab is of a model {model!r}: there {known or 'is none whose model is known'}"
    if prefix is not None:
        hashes = [one[:HASH_DIGITS] for one in there.first_hashes]
        known = _few(hashes, there.num_first_hashes, "ls")
        return f"no prefix has a hash that begins with {prefix}: there {known or 'is none'}"
    return f"no slab is as old: the least recent use was {age_text(there.used_ns, now_ns)} ago"


def _few(names: Sequence[str], number: int, command: str) -> str:
    """As in "are a, b and 3 more, which interlace store ls shows"; empty if there are none."""
    if not names:
        return ""
    more = number - len(names)
    listed = ", ".join(names)
    if more:
        listed += f" and {more} more, which interlace store {command} shows"
    return f"{'is' if number == 1 else 'are'} {listed}"


def collected_lines(done: Collected, now_ns: int, *, dry_run: bool) -> Iterator[str]:
    """`gc`: a line for each file that went, or would go, and one with the counts."""
    for file in done.removed:
        yield f"{'would go' if dry_run else _REMOVED} {file.name}: {_file_facts(file, now_ns)}"
    if done.removed:
        verb = "would go" if dry_run else "removed"
        yield f"{count(len(done.removed), 'file')} {verb}, {size_text(done.num_bytes)}"
    else:
        yield "nothing would go" if dry_run else "nothing was removed"


def _file_facts(file: FileReport, now_ns: int) -> str:
    what = "left over" if file.is_new else "used"
    return f"{size_text(file.num_bytes)}, {what} {age_text(file.used_ns, now_ns)} ago"
