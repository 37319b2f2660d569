"""A run as a report, and the prefixes from which loading pays."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest
from grid_kit import a_run, loading, on_another

from interlace.bench.grid import pictures
from interlace.bench.grid.record import GridRun
from interlace.bench.grid.spec import parse_grid
from interlace.bench.grid.tables import crossings, report_of
from interlace.bench.grid.timelines import PlannedTimeline, timeline_plan
from interlace.bench.step_trace.setup import TimelinePlan
from interlace.engine.errors import ConfigError

PREFIXES = (32, 64, 96)


def lines(*series: tuple[str, Sequence[float]], connector: str = "PipelineConnector") -> GridRun:
    """One arm for each mode and prefix, that takes so many seconds."""
    return a_run(
        [
            ({**loading(mode, prefix), "connector": connector}, [seconds] * 3)
            for mode, of_mode in series
            for prefix, seconds in zip(PREFIXES, of_mode, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("loaded", "sentence"),
    [
        ([3.0, 3.5, 4.0], "bulk: sooner than computing again from about 53 tokens"),
        ([1.0, 1.0, 1.0], "bulk: sooner than computing again at every length measured"),
        ([9.0, 9.0, 9.0], "bulk: sooner than computing again at none measured"),
        ([1.0, 3.0, 9.0], "bulk: sooner than computing again up to about 72 tokens"),
        ([3.0, 3.0, 9.0], "bulk: sooner than computing again up to about 72 tokens"),
    ],
)
def test_where_loading_takes_as_long_as_computing(loaded: list[float], sentence: str) -> None:
    run = lines(("recompute", [2.0, 4.0, 6.0]), ("bulk", loaded))
    assert [str(one) for one in crossings(run)] == [sentence]


def test_without_computing_again_there_is_nothing_to_cross() -> None:
    assert crossings(lines(("bulk", [1, 2, 3]), ("cached", [1, 2, 3]))) == []


def test_a_report_has_what_was_measured() -> None:
    report = report_of(lines(("recompute", [2.0, 4.0, 6.0])))
    assert [row.case for row in report.rows] == [f"prefix {prefix}" for prefix in PREFIXES]
    figures = report.rows[0].figures
    assert figures["first token ms"].median == 2000
    assert figures["computed"].samples == (10.0,)
    assert "decode step ms" not in figures
    assert report.settings["rounds"] == 3


def test_a_partial_report_says_so() -> None:
    run = a_run([(loading("bulk", 32), [0.5])], repeats=3)
    report = report_of(run)
    assert report.notes == ("stopped: 1 of 3 rounds are whole",)
    assert report.settings["rounds"] == "1 of 3"


def test_no_pictures_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install\s+interlace\[plot\], or leave --plot out"):
        pictures.require_matplotlib()


def test_pictures() -> None:
    pytest.importorskip("matplotlib")
    run = lines(("recompute", [2.0, 4.0, 6.0]), ("bulk", [3.0, 3.5, 4.0]))
    for content in (pictures.draw_bars(run), pictures.draw_prefixes(run)):
        assert content is not None
        assert b"</svg>" in content
    assert pictures.draw_bars(run) == pictures.draw_bars(run)


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What is drawn, told to stand-ins, so that machines without matplotlib look too."""
    drawn = MagicMock()
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        monkeypatch.setitem(sys.modules, name, drawn)
    found: MagicMock = drawn.Figure.return_value.add_subplot.return_value
    return found


def test_a_picture_marks_where_lines_cross(axes: MagicMock) -> None:
    run = lines(("recompute", [2.0, 4.0, 6.0]), ("bulk", [3.0, 3.5, 4.0]))
    pictures.draw_prefixes(run)
    assert [call.kwargs["label"] for call in axes.errorbar.mock_calls if call.kwargs] == [
        "recompute",
        "bulk",
    ]
    (crossing,) = axes.axvline.call_args_list
    assert crossing.args == (pytest.approx(32 + 32 / 1.5),)
    pictures.draw_bars(run)
    (bars,) = axes.barh.call_args_list
    assert bars.args[1] == [2000, 4000, 6000, 3000, 3500, 4000]
    assert bars.kwargs["xerr"] == [[0] * 6, [0] * 6]
    assert "dotted" in axes.set_xlabel.call_args_list[0].args[0]


def test_bars_whose_names_begin_alike_stand_together(axes: MagicMock) -> None:
    pictures.draw_bars(lines(("recompute", [2.0, 4.0, 6.0]), ("bulk", [0.0093, 3.5, 4.0])))
    (bars,) = axes.barh.call_args_list
    assert bars.args[0] == pytest.approx([0, 1, 2, 3.6, 4.6, 5.6])
    first, *_, last = bars.kwargs["color"]
    assert bars.kwargs["color"] == [first] * 3 + [last] * 3
    assert first != last
    told = [call.args[0] for call in axes.annotate.call_args_list]
    assert told[:6] == ["2,000", "4,000", "6,000", "9.3", "3,500", "4,000"]


def test_bars_that_have_nothing_in_common_are_one_group(axes: MagicMock) -> None:
    pictures.draw_bars(lines(("bulk", [1.0, 2.0, 3.0])))
    (bars,) = axes.barh.call_args_list
    assert bars.args[0] == [0, 1, 2]
    assert len(set(bars.kwargs["color"])) == 1


def test_dashes_say_the_mode_and_colours_the_rest(axes: MagicMock) -> None:
    ways = [("recompute", 0), ("bulk", 10), ("bulk", 40), ("auto", 10), ("auto", 40)]
    run = a_run(
        [
            (loading(mode, prefix, delay_ms=delay), [float(place + 1)])
            for place, (mode, delay) in enumerate(ways)
            for prefix in PREFIXES
        ]
    )
    pictures.draw_prefixes(run)
    drawn = [call.kwargs for call in axes.errorbar.call_args_list]
    assert [one["label"] for one in drawn[:2]] == ["recompute", "bulk, delay 10 ms"]
    computed, bulk_10, bulk_40, auto_10, auto_40 = drawn
    assert (bulk_10["color"], bulk_40["color"]) == (auto_10["color"], auto_40["color"])
    assert bulk_10["color"] != bulk_40["color"]
    assert bulk_10["linestyle"] == bulk_40["linestyle"] != auto_10["linestyle"]
    assert computed["color"] not in (bulk_10["color"], bulk_40["color"])
    (legend,) = axes.legend.call_args_list
    assert legend.args[1][0] == "auto, delay 40 ms", "the line that ends highest comes first"


def test_modes_that_nothing_else_varies_have_colours(axes: MagicMock) -> None:
    pictures.draw_prefixes(lines(("bulk", [1, 2, 3]), ("auto", [3, 2, 1])))
    bulk, auto = (call.kwargs["color"] for call in axes.errorbar.call_args_list)
    assert bulk != auto
    assert "dotted" not in axes.set_xlabel.call_args.args[0]


def test_a_picture_says_where_it_was_measured(axes: MagicMock) -> None:
    run = lines(("bulk", [1, 2, 3]))
    pictures.draw_bars(on_another(run, torch_threads=1))
    assert axes.annotate.call_args.args[0] == (
        "smollm2-135m, float32, 2 cores of here, torch on 1 thread; 3 rounds"
    )
    resolved = {"device": "cuda", "dtype": "bfloat16"}
    arms = tuple(dataclasses.replace(arm, resolved=resolved) for arm in run.arms)
    pictures.draw_prefixes(dataclasses.replace(on_another(run, gpu="Card"), arms=arms, repeats=5))
    assert axes.annotate.call_args.args[0] == "smollm2-135m, bfloat16, Card; 3 of 5 rounds"


TIMELINES = """
[grid]
connector = "PipelineConnector"
load_mode = ["layerwise", "hybrid"]
prefix = [32, 64]
group_size = 3
"""


def planned(text: str) -> PlannedTimeline | str:
    spec = parse_grid(text.encode(), "my.toml")
    arms = [(point.facts(), [float(place)]) for place, point in enumerate(spec.points)]
    return timeline_plan(spec, a_run(arms))


def test_the_timeline_is_of_the_longest_prefix_and_the_fastest_way() -> None:
    found = planned(TIMELINES)
    assert not isinstance(found, str)
    assert (found.point.prefix, found.point.load_mode) == (64, "layerwise")
    assert found.plan == TimelinePlan(64, 16, 5, 3, "layerwise")
    found.plan.check()


@pytest.mark.parametrize("line", ["delay_ms = 5", 'store = "file"', "batch = 2"])
def test_what_cannot_be_recorded_says_why(line: str) -> None:
    assert str(planned(f"{TIMELINES}{line}\n")).startswith("it is of one request from host memory")


def test_no_picture_of_nothing() -> None:
    assert pictures.draw_prefixes(a_run([(loading("bulk", 32), [0.5])])) is None
    assert pictures.draw_bars(a_run([(loading("bulk", 32), [])], repeats=1)) is None
