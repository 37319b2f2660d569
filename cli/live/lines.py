"""Lines of fixed width, and the signs that they are made of. Pure; knows no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from interlace.cli.screen import harmless


@dataclasses.dataclass(frozen=True, slots=True)
class Signs:
    """What is drawn with. Each is one column wide, and says without colour what it says."""

    full: str
    empty: str
    rule: str
    states: dict[str, str]
    is_ascii: bool


UNICODE = Signs(
    full="█",
    empty="·",
    rule="─",
    states={
        "waiting": "·",
        "reading": "░",
        "copying": "▒",
        "arrived": "▓",
        "computed": "█",
        "saved": "■",
        "failed": "X",
    },
    is_ascii=False,
)
ASCII = Signs(
    full="#",
    empty=".",
    rule="-",
    states={
        "waiting": ".",
        "reading": "r",
        "copying": "c",
        "arrived": "a",
        "computed": "#",
        "saved": "s",
        "failed": "X",
    },
    is_ascii=True,
)
STYLES = {
    "waiting": "dim",
    "reading": "magenta",
    "copying": "yellow",
    "arrived": "cyan",
    "computed": "green",
    "saved": "blue",
    "failed": "bold red",
}


def plain(text: str, signs: Signs) -> str:
    """A name from elsewhere, so that it can neither drive a terminal nor fail to be written."""
    text = harmless(text).replace("\n", " ").replace("\t", " ")
    return text.encode("ascii", "replace").decode() if signs.is_ascii else text


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` columns."""
    missing = width - cell_len(text)
    if missing >= 0:
        return " " * missing + text if right else text + " " * missing
    return set_cell_size(text, width)


def line(*parts: str | tuple[str, str]) -> Text:
    """Of texts, or (text, style)."""
    return Text.assemble(*parts, no_wrap=True, overflow="crop", end="")


def title(words: str, width: int, signs: Signs, *said: str) -> Text:
    """ "-- words -- said ----". Of several ways to say it the first that fits, or none."""
    head = f"{signs.rule * 2} {words} "
    for tail in (*(f" {one} " for one in said if one), ""):
        rest = width - cell_len(head) - cell_len(tail) - 2
        if rest >= 0:
            return line((head, "bold"), (signs.rule * rest, "dim"), tail, (signs.rule * 2, "dim"))
    return line((fitted(head, width), "bold"))


def fitting(pieces: Iterable[str], width: int, between: str = ", ") -> str:
    """As many of the pieces as fit, whole ones, from the first on."""
    said = ""
    for piece in pieces:
        longer = f"{said}{between}{piece}" if said else piece
        if cell_len(longer) > width:
            break
        said = longer
    return said


def bar(share: float | None, width: int, signs: Signs, style: str) -> list[tuple[str, str]]:
    """How much of the whole. Blank if that is not known."""
    if share is None:
        return [(" " * width, "")]
    filled = round(width * min(1.0, max(0.0, share)))
    if share and not filled:
        filled = 1  # a little is not nothing
    return [(signs.full * filled, style), (signs.empty * (width - filled), "dim")]


def crop(text: Text, width: int) -> Text:
    """In exactly `width` columns."""
    fitting = text.copy()
    fitting.truncate(width, overflow="crop", pad=True)
    fitting.no_wrap, fitting.end = True, ""
    return fitting


def beside(
    left: Sequence[Text], right: Sequence[Text], widths: tuple[int, int], gap: str
) -> list[Text]:
    """Two columns."""
    height = max(len(left), len(right))
    nothing = Text("")
    rows: list[Text] = []
    for i in range(height):
        row = crop(left[i] if i < len(left) else nothing, widths[0])
        row.append(gap)
        row.append_text(crop(right[i] if i < len(right) else nothing, widths[1]))
        row.no_wrap, row.end = True, ""
        rows.append(row)
    return rows


def wrapped(pieces: Iterable[str], width: int, between: str = "   ") -> list[str]:
    """As many of the pieces in a row as fit."""
    rows: list[str] = []
    for piece in pieces:
        joined = f"{rows[-1]}{between}{piece}" if rows else piece
        if rows and cell_len(joined) <= width:
            rows[-1] = joined
        else:
            rows.append(piece)
    return rows
