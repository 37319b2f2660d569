"""The picture of a timeline. Needs matplotlib, but for what is said without it."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ET

import pytest
from step_trace_kit import SHAPE, a_step, a_trace, both_ends_marks, facts, of_both_ends

from interlace.bench.step_trace.build import LayerLoad, StepMarks, build_trace
from interlace.bench.step_trace.device import marks_of
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.picture import draw_picture, short_name
from interlace.bench.step_trace.trace import StepTrace
from interlace.engine.errors import ConfigError


def of_a_device() -> StepTrace:
    return build_trace(marks_of(a_step().events, SHAPE), facts(1))


def test_equal_timelines_give_equal_svg_files() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    first = draw_picture(of_a_device(), "svg")
    assert draw_picture(of_a_device(), "svg") == first
    assert dict(matplotlib.rcParams) == before, "no settings are left changed"
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot, "it would keep a state of its own"
    text = first.decode()
    assert "<dc:date>" not in text
    root = ET.fromstring(text)
    assert root.get("width") == "648pt", "900 pixels"
    assert "<!-- head -->" in text, "labels of blocks, which are drawn as outlines"
    assert "<!-- 3 -->" in text
    assert "hatch" in text


def test_both_ends() -> None:
    pytest.importorskip("matplotlib")
    first = draw_picture(of_both_ends(), "svg")
    assert draw_picture(of_both_ends(), "svg") == first
    text = first.decode()
    for label in ("40-63", "24-39", "3"):
        assert f"<!-- {label} -->" in text
    assert "384 tokens computed, 640 loaded from the back, 8 more" in text
    assert "numbers are blocks of the prompt above, layers below" in text
    assert "<pattern" not in text, "nothing waits"
    png = draw_picture(of_both_ends(both_ends_marks((1,) * 40, (1,) * 9)), "png")
    assert struct.unpack(">II", png[16:24])[0] == 1800


def test_slices_have_colours_along_the_prompt() -> None:
    """Of two slices of other sizes that begin at the same block, one colour; of others, others."""
    pytest.importorskip("matplotlib")

    def colours(sizes: tuple[int, ...]) -> list[str]:
        trace = of_both_ends(both_ends_marks(sizes, (10,)))
        text = draw_picture(trace, "svg").decode()
        found = re.findall(r"fill: (#[0-9a-f]{6}); stroke: #ffffff", text)
        return found[: len(sizes)]

    first, second = colours((30, 10)), colours((20, 20))
    assert first[1] == second[1]
    assert len({*first, *second}) == 3


def test_png() -> None:
    pytest.importorskip("matplotlib")
    content = draw_picture(a_trace(32), "png")
    assert content.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", content[16:24])[0] == 1800
    assert draw_picture(a_trace(32), "png") == content


def test_a_step_that_took_no_time() -> None:
    pytest.importorskip("matplotlib")
    nothing = StepMarks((LayerLoad(5, 5, 0),), 5, (Interval(5, 5),), 5, 5)
    assert draw_picture(build_trace(nothing, facts(1)), "svg")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install interlace\[plot\]"):
        draw_picture(a_trace(), "png")


def test_folders_are_left_out() -> None:
    assert short_name("/home/me/models/tiny") == "tiny"
    assert short_name("dummy:/tmp/x/config.json") == "config.json"
    assert short_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert short_name("dummy:llama-3.1-8b") == "dummy:llama-3.1-8b"
