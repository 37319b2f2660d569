"""What a terminal shows of what was written to it, as plain text: enough of a terminal for that."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import get_character_cell_size

_TOKEN = re.compile(
    r"\x1b\[(?P<private>[?>=]?)(?P<numbers>[0-9;]*)[ -/]*(?P<verb>[@-~])"
    r"|\x1b(?P<escape>[78DM=>])"
    r"|(?P<plain>.)",
    re.DOTALL,
)
_BEGUN = re.compile(r"\x1b(\[[?>=]?[0-9;]*[ -/]*)?\Z")
_WIDE = "\0"
"""The second column of a character that has two."""


class SmallTerminal:
    """A grid of characters with a cursor. An escape that it does not know is an error."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.column = self.row = 0
        self._lines = [[" "] * columns for _ in range(rows)]
        self._saved = (0, 0)
        self._begun = ""
        self._left: list[list[str]] | None = None
        """The usual screen while the other one is shown."""
        self._verbs: dict[str, Callable[[int], None]] = {
            "A": lambda n: self._move(row=self.row - max(n, 1)),
            "B": lambda n: self._move(row=self.row + max(n, 1)),
            "C": lambda n: self._move(column=self.column + max(n, 1)),
            "D": lambda n: self._move(column=self.column - max(n, 1)),
            "G": lambda n: self._move(column=max(n, 1) - 1),
            "J": self._erase_down,
            "K": self._erase_right,
            "L": lambda n: self._insert_rows(max(n, 1)),
            "P": lambda n: self._shift(-max(n, 1)),
            "@": lambda n: self._shift(max(n, 1)),
            "m": lambda n: None,
        }

    def feed(self, text: str) -> None:
        """Text with escapes, of which the last one may be whole by the next call only."""
        text, self._begun = self._begun + text, ""
        if begun := _BEGUN.search(text):
            text, self._begun = text[: begun.start()], begun[0]
        for found in _TOKEN.finditer(text):
            if found["plain"]:
                self._put(found["plain"])
            elif found["escape"]:
                self._escape(found["escape"])
            elif found["private"]:
                self._mode(found["private"] + found["numbers"] + found["verb"])
            elif found["verb"] == "H":
                row, _, column = found["numbers"].partition(";")
                self._move(int(column or 1) - 1, int(row or 1) - 1)
            else:
                self._verbs[found["verb"]](int(found["numbers"].partition(";")[0] or 0))

    @property
    def shown(self) -> list[str]:
        """The rows without blanks at their ends, down to the last one that is not blank."""
        rows = ["".join(line).replace(_WIDE, "").rstrip() for line in self._lines]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self._move(self.column - 1)
        elif character == "\t":
            self._move(self.column // 8 * 8 + 8)
        elif character >= " ":
            width = get_character_cell_size(character)
            if self.column + width > self.columns:  # also where the cursor waits behind the end
                self.column = 0
                self._down()
            self._lines[self.row][self.column : self.column + width] = [character, _WIDE][:width]
            self.column += width

    def _escape(self, letter: str) -> None:
        if letter == "7":
            self._saved = (self.column, self.row)
        elif letter == "8":
            self.column, self.row = self._saved
        elif letter == "D":
            self._down()
        elif letter == "M":
            assert self.row > 0, "it would scroll the other way"
            self.row -= 1

    def _mode(self, mode: str) -> None:
        if mode == "?1049h":
            self._left = self._lines
            self._lines = [[" "] * self.columns for _ in range(self.rows)]
        elif mode == "?1049l" and self._left is not None:
            self._lines, self._left = self._left, None

    def _move(self, column: int | None = None, row: int | None = None) -> None:
        if column is not None:
            self.column = min(max(0, column), self.columns - 1)
        if row is not None:
            self.row = min(max(0, row), self.rows - 1)

    def _down(self) -> None:
        if self.row < self.rows - 1:
            self.row += 1
            return
        del self._lines[0]
        self._lines.append([" "] * self.columns)

    def _erase_right(self, how: int) -> None:
        first = 0 if how == 2 else self.column
        self._lines[self.row][first:] = [" "] * (self.columns - first)

    def _erase_down(self, how: int) -> None:
        if how == 2:
            self._lines = [[" "] * self.columns for _ in range(self.rows)]
            return
        self._erase_right(0)
        for row in range(self.row + 1, self.rows):
            self._lines[row] = [" "] * self.columns

    def _insert_rows(self, count: int) -> None:
        blank = [[" "] * self.columns for _ in range(count)]
        self._lines[self.row : self.row] = blank
        del self._lines[self.rows :]
        self.column = 0

    def _shift(self, by: int) -> None:
        line = self._lines[self.row]
        line[self.column : self.column + max(0, -by)] = [" "] * max(0, by)
        self._lines[self.row] = (line + [" "] * self.columns)[: self.columns]
