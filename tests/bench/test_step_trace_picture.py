"""The picture of a timeline. Needs matplotlib, but for what is said without it."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ET

import pytest
from step_trace_kit import SHAPE, a_step, a_trace, facts

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
