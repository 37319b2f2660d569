"""Warnings stand above a line that is being typed, which stays as it is."""

from __future__ import annotations

import io

import pytest
from small_terminal import SmallTerminal

from interlace.cli.above_prompt import above, cells_of, rows_of
from interlace.cli.screen import PROMPT, Screen


def at_a_prompt(typed: str, *, rows_before: int) -> SmallTerminal:
    screen = SmallTerminal()
    screen.feed("".join(f"line {n}\r\n" for n in range(rows_before)) + PROMPT + typed)
    return screen


@pytest.mark.parametrize("rows_before", [0, 3, 22, 23, 40])
@pytest.mark.parametrize("typed", ["", "what is", "x" * 100])
def test_a_warning_stands_above_what_is_typed(rows_before: int, typed: str) -> None:
    screen = at_a_prompt(typed, rows_before=rows_before)
    cells = len(PROMPT + typed)
    for text in ("one", "two\n" + "w" * 100):
        screen.feed(above(rows_of(text, 80), cells, 80))
    screen.feed("!")
    lines = screen.shown
    shown = PROMPT + typed + "!"
    own = [shown[i : i + 80].rstrip() for i in range(0, len(shown), 80)]
    assert lines[-len(own) :] == own
    assert lines[: -len(own)][-4:] == ["one", "two", "w" * 80, "w" * 20]
    before = [line for line in lines if line.startswith("line")]
    assert before == [f"line {n}" for n in range(rows_before)][rows_before - len(before) :]


@pytest.mark.parametrize("columns", [5, 7, 80, 81])
@pytest.mark.parametrize("num_wide", [1, 40, 120, 160])
def test_a_warning_stands_above_wide_characters(columns: int, num_wide: int) -> None:
    """Of which an odd number of columns leaves one free at the end of each row."""
    if num_wide > 6 * columns:
        pytest.skip("more than a screen")
    screen, shown = SmallTerminal(columns), PROMPT + "\u6f22" * num_wide
    screen.feed("before\r\n" if columns > 6 else "b\r\n")
    screen.feed(shown)
    if cells_of(shown, columns) % columns == 0:
        screen.feed(" \r")  # as readline does
    screen.feed(above(["one"], cells_of(shown, columns), columns))
    assert screen.shown[1] == "one"
    assert "".join(screen.shown[2:]) == shown


def test_the_cursor_stays_in_the_midst_of_what_is_typed() -> None:
    screen = at_a_prompt("hello world", rows_before=23)
    screen.feed("\b" * 5)
    screen.feed(above(["careful"], len("> hello world"), 80))
    assert screen.shown[-2:] == ["careful", "> hello world"]
    assert (screen.column, screen.row) == (8, 23)


def test_rows() -> None:
    assert rows_of("a\tb\n\nc", 80) == ["a       b", "", "c"]
    assert rows_of("abcdef", 4) == ["abcd", "ef"]
    assert rows_of("a\u6f22\u5b57", 4) == ["a\u6f22", "\u5b57"], "two cells each"


@pytest.mark.parametrize(("num_rows", "is_above"), [(22, True), (23, False)])
def test_what_does_not_fit_above_what_is_typed_goes_below(
    num_rows: int, is_above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a screen of 24 rows, beside two of what is typed, whose first row would have gone."""
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(io.StringIO(), io.StringIO(), terminal=True)
    warning = "w\n" * num_rows
    with screen.asking(lambda: "x" * 100):
        placed = screen._placed(warning)
    assert (placed != f"\n{warning}{PROMPT}{'x' * 100}") == is_above
