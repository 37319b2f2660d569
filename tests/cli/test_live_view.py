"""The pictures of a live view, as plain text: `tests/data/live/`. Written anew by
`python tests/cli/test_live_view.py`, to be looked at before they are kept."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from live_frames import FACTS, GPU, LOAD, PIPELINE, RATES, busy, idle, shown, snapshot, states
from rich.console import Console

from interlace.cli.live.shown import Shown
from interlace.cli.live.view import lines_of, render, summary
from interlace.engine.live_frame import frame_of
from interlace.layers.hardware.fact import Unknown

FOLDER = Path(__file__).parents[1] / "data" / "live"
FAILING = dataclasses.replace(
    LOAD,
    layers=states(computed=9, failed=23),
    error="of 1 of 2 requests: nothing was copied on lane 'load' for 30 s",
)
DEAD = frame_of(
    9, FACTS, RATES, snapshot(connectors=(PIPELINE,), dead="the step loop failed: OSError: no disk")
)
SCREENS: dict[str, tuple[Shown, int, int, bool]] = {
    "80x24": (shown(), 80, 24, True),
    "160x48": (shown(), 160, 48, True),
    "beside": (shown(), 60, 24, True),  # a chat under tmux, which has the other half
    "below": (shown(), 80, 13, True),
    "narrow": (shown(), 39, 24, True),
    "narrow-idle": (shown(idle(), gpu=None, flow={}), 39, 16, True),
    "ascii": (shown(), 80, 24, False),
    "failing-load": (shown(busy(FAILING)), 80, 24, True),
    "idle": (shown(idle(), gpu=None, flow={}), 80, 24, True),
    "gone": (shown(gone="the engine has closed", is_paused=True, flow={}), 80, 24, True),
    "dead": (shown(DEAD, flow={}), 80, 24, True),
    "requests": (shown(page=1, num_lost=3, note="saved interlace-4711-17.json"), 100, 24, True),
    "stores": (shown(page=2, gpu=Unknown("no NVIDIA driver found")), 80, 24, True),
}


def drawn(name: str) -> str:
    one, width, height, unicode = SCREENS[name]
    rows = lines_of(one, width, height, unicode=unicode)
    return "".join(row.plain.rstrip() + "\n" for row in rows)


@pytest.mark.parametrize("name", SCREENS)
def test_it_looks_as_it_did(name: str) -> None:
    assert drawn(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


@pytest.mark.parametrize("page", range(3))
@pytest.mark.parametrize("width", [20, 40, 79, 80, 119, 120, 161, 300])
@pytest.mark.parametrize("height", [4, 10, 24, 70])
def test_each_size_is_filled_and_never_left(width: int, height: int, page: int) -> None:
    for frame in (busy(), busy(FAILING), busy(None), idle()):
        rows = lines_of(shown(frame, page=page), width, height)
        assert [row.cell_len for row in rows] == [width] * height


@pytest.mark.parametrize("page", range(3))
def test_ascii_is_ascii_whatever_names_are(page: int) -> None:
    frame = busy()
    odd = dataclasses.replace(frame.snapshot.running[0], request_id="Größe-日本\x1b[2J")
    held = dataclasses.replace(frame.snapshot, running=(odd, *frame.snapshot.running[1:]))
    one = shown(dataclasses.replace(frame, snapshot=held), page=page)
    for unicode in (False, True):
        text = "".join(row.plain for row in lines_of(one, 80, 40, unicode=unicode))
        assert "\x1b" not in text
        assert unicode or text.isascii()


def test_states_differ_without_colour() -> None:
    for unicode in (False, True):
        rows = lines_of(shown(), 80, 24, unicode=unicode)
        signs = set(rows[5].plain[6:].replace(" ", ""))
        assert len(signs) == 4  # computed, arrived, copying, waiting


def test_what_is_rendered_is_as_large_as_the_screen() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=False)
    console.print(render(shown(), 80, 24), end="")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [len(row) for row in text.split("\n")] == [80] * 24


def test_what_does_not_fit_is_left_out_whole() -> None:
    def words_at(width: int) -> set[str]:
        rows = lines_of(shown(), width, 24)[1:]  # the first one has a name, which may be cut
        return {word.strip(",") for row in rows for word in row.plain.split()}

    whole = {word for width in (80, 300) for word in words_at(width) if word.isalpha()}
    for width in range(36, 80):
        assert {word for word in words_at(width) if word.isalpha()} <= whole, width


def test_a_line_says_what_matters() -> None:
    line = summary(shown())
    assert line.startswith("4711  1,204 tokens/s  step 24.1 ms")
    assert "\n" not in line
    assert "gpu 97%" in line
    assert GPU.busy_share == 0.97


def test_every_layer_of_a_deep_model_has_its_place() -> None:
    deep = dataclasses.replace(LOAD, layers=states(computed=100, waiting=26))
    text = [row.plain for row in lines_of(shown(busy(deep)), 80, 24)]
    assert sum(row.count("█") for row in text[5:7]) == 100
    assert text[6].lstrip().startswith("74")


if __name__ == "__main__":
    for each in SCREENS:
        (FOLDER / f"{each}.txt").write_text(drawn(each), "utf-8")
        sys.stdout.write(f"{each}\n{drawn(each)}")
