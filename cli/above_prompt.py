"""Lines above one that is being typed, by what every terminal since the VT102 can do. Pure.

What is typed is moved down as it stands, with the cursor in it: nobody needs to know it, and
readline need not be told.
"""

from __future__ import annotations

from rich.cells import cell_len

_DOWN, _UP = "\x1bD", "\x1bM"
"""By a row in the same column; at the edge of the screen it scrolls."""
_SAVE, _RESTORE = "\x1b7", "\x1b8"


def rows_of(text: str, columns: int) -> list[str]:
    """`text` as it is broken into rows of a terminal. No control characters but tabs and ends of
    lines."""
    rows = []
    for line in text.expandtabs().splitlines():
        row, width = "", 0
        for character in line:
            cells = cell_len(character)
            if width + cells > columns:
                rows.append(row)
                row, width = "", 0
            row += character
            width += cells
        rows.append(row)
    return rows


def cells_of(typed: str, columns: int) -> int:
    """That `typed` takes, with those at the ends of rows that were too narrow for what came."""
    total = 0
    for character in typed:
        cells, left = cell_len(character), columns - total % columns
        total += cells if cells <= left else left + cells
    return total


def above(rows: list[str], typed_cells: int, columns: int) -> str:
    """What to send to a terminal, at once, so that `rows` stand above the prompt and what is typed
    behind it, `typed_cells` together. Of a text that takes several rows the cursor is taken to be
    in the last one. There are fewer rows than the screen has, with those above the cursor's.
    """
    count, before = len(rows), typed_cells // columns
    make_room = _DOWN * count + _UP * count
    to_first_row = (f"\x1b[{before}A" if before else "") + "\r"
    insert = f"\x1b[{count}L" + "\r\n".join(rows)
    return f"{make_room}{_SAVE}{to_first_row}{insert}{_RESTORE}\x1b[{count}B"
