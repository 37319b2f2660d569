"""The options of `interlace store`, and what sizes, ages and choices of slabs in them come to.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from interlace.connectors.slab_store.inspection.reports import Selection
    from interlace.connectors.slab_store.inspection.survey import Survey

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Unit of an age -> its seconds."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AGE = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])", re.IGNORECASE | re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{1,64}")

Directory: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="The store's directory, as engines were given it.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Limit: TypeAlias = Annotated[
    int, typer.Option("--limit", min=1, help="Show at most so many, the most recently used ones.")
]
WordsOf: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL",
        help="Show first words by the tokenizer of this model: the default one, a GGUF file or a"
        " folder. Default: of the model that engines named, if it lies there.",
    ),
]
Drop: TypeAlias = Annotated[
    bool, typer.Option("--drop", help="Remove slabs that hold bad records, with their good ones.")
]
Capacity: TypeAlias = Annotated[
    str | None,
    typer.Option("--capacity", metavar="BYTES", help="The slabs' in all, as in 200GB or 1.5GiB."),
]
MinFree: TypeAlias = Annotated[
    str | None,
    typer.Option("--min-free", metavar="BYTES", help="That the file system is to keep free."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Slabs of this model: its name, or 8 digits of its digest."
    ),
]
FirstHash: TypeAlias = Annotated[
    str | None,
    typer.Option("--prefix", metavar="HEX", help="Slabs with blocks of prefixes: see ls's HASH."),
]
OlderThan: TypeAlias = Annotated[
    str | None,
    typer.Option("--older-than", metavar="AGE", help="Slabs not used for 30d, 12h or 15m."),
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All slabs.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def parse_size(option: str, text: str) -> int:
    """Bytes, of "4096", "200GB" or "1.5GiB". Raises: `typer.BadParameter` for the option."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(
            f"{text!r} is no size: give bytes, or one such as 200GB or 1.5GiB.", param_hint=option
        )
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** _POWERS[match[2].lower()])


def parse_age_ns(option: str, text: str) -> int:
    """Nanoseconds, of "30d" or "12h". Raises: `typer.BadParameter` for the option."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is no age: give one such as 30d, 12h or 15m.", param_hint=option
        )
    return int(Fraction(match[1]) * SECONDS[match[2].lower()] * 10**9)


def selector(
    now_ns: int,
    model: str | None,
    prefix: str | None,
    older_than: str | None,
    *,
    everything: bool,
) -> Callable[[Survey], Selection]:
    """What picks the slabs that are meant. Raises: `typer.BadParameter`."""
    from interlace.connectors.slab_store.inspection import removal

    if sum((model is not None, prefix is not None, older_than is not None, everything)) != 1:
        raise typer.BadParameter("give one of --model, --prefix, --older-than and --all.")
    if model is not None:
        if not model:
            raise typer.BadParameter("the name of the model is empty.", param_hint="--model")
        return lambda found: removal.select_model(found, model)
    if prefix is not None:
        if not _HEX.fullmatch(prefix):
            raise typer.BadParameter(
                f"{prefix!r} is no beginning of a hash: give hex digits.", param_hint="--prefix"
            )
        return lambda found: removal.select_prefix(found, prefix)
    if older_than is not None:
        before_ns = now_ns - parse_age_ns("--older-than", older_than)
        return lambda found: removal.select_older(found, before_ns)
    return removal.select_all
