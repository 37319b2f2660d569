"""A terminal's screen as plain text: as much of a VT102 as what is tested needs, and no more."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"\x1b\[([?]?[0-9;]*)([A-Za-z@])|\x1b([DM78])|([\r\n\b\x07])|([^\x1b\r\n\b\x07])"
)


class VtScreen:
    """Rows of text, and where the cursor is."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.columns, self.lines = columns, lines
        self.rows = [[" "] * columns for _ in range(lines)]
        self.x = self.y = 0
        self._saved = (0, 0)

    @property
    def text(self) -> str:
        """Without blanks at the ends of lines, and of the screen."""
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n")

    def feed(self, sent: str) -> None:
        end = 0
        for match in _TOKEN.finditer(sent):
            assert match.start() == end, repr(sent[end:])
            end = match.end()
            numbers, final, escape, control, character = match.groups()
            if character:
                self._print(character)
            elif final:
                self._csi(numbers, final)
            else:
                self._move(escape or control)
        assert end == len(sent), repr(sent[end:])

    def _print(self, character: str) -> None:
        if self.x == self.columns:  # it wraps with the next character, and not before
            self.x = 0
            self._down()
        self.rows[self.y][self.x] = character
        self.x += 1

    def _down(self) -> None:
        if self.y < self.lines - 1:
            self.y += 1
        else:
            self.rows = [*self.rows[1:], [" "] * self.columns]

    def _move(self, what: str) -> None:
        match what:
            case "\r":
                self.x = 0
            case "\n" | "D":
                self._down()
            case "M":
                assert self.y > 0, "it would scroll the other way"
                self.y -= 1
            case "7":
                self._saved = (self.x, self.y)
            case "8":
                self.x, self.y = self._saved
            case "\b":
                self.x = max(0, self.x - 1)

    def _csi(self, numbers: str, final: str) -> None:
        if final in "mhl":  # colours and modes
            return
        count = int(numbers or 1)
        row = self.rows[self.y]
        match final:
            case "A":
                self.y = max(0, self.y - count)
            case "B":
                self.y = min(self.lines - 1, self.y + count)
            case "C":
                self.x = min(self.columns - 1, self.x + count)
            case "K":
                row[self.x :] = [" "] * (self.columns - self.x)
            case "L":
                blank = [[" "] * self.columns for _ in range(count)]
                self.rows[self.y :] = [*blank, *self.rows[self.y :]][: self.lines - self.y]
            case "@":
                row[self.x :] = [*" " * count, *row[self.x :]][: self.columns - self.x]
            case "P":
                row[self.x :] = [*row[self.x + count :], *" " * count]
            case _:
                raise AssertionError(f"CSI {numbers}{final}")
