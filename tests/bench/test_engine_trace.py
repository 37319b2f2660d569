"""Traces of engines as files, and what is told of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_kit import FACTS, problems_of, sample_trace

from interlace.bench.engine_trace.figures import rows_of, totals_of
from interlace.bench.engine_trace.parse import from_json, read_file
from interlace.bench.engine_trace.picture import draw_picture
from interlace.bench.engine_trace.shape import step_trace_of, timed_steps, window_of
from interlace.bench.engine_trace.text import lines, step_view, to_dict
from interlace.bench.step_trace.figures import figures_of
from interlace.engine.engine_trace import (
    EngineTrace,
    HostTimes,
    LeftOut,
    TracedRequest,
    TracedStep,
)
from interlace.engine.errors import ConfigError
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming
from interlace.engine.trace_file import FORMAT, check_target, to_json, write_trace

NUM_LAYERS = FACTS.num_layers


def text_of(trace: EngineTrace) -> str:
    return "".join(to_json(trace))


# -------------------------------------------------------------------- the file


def test_what_is_written_is_read_back() -> None:
    assert problems_of(sample_trace()) == []
    assert from_json(text_of(sample_trace())) == sample_trace()


names = st.text(max_size=12)
counts = st.integers(0, 10**12)
times_ns = st.integers(0, 10**13)
maybe = st.none() | times_ns.map(lambda ns: ns / 1e9)


@st.composite
def steps(draw: st.DrawFn, step_id: int) -> TracedStep:
    tokens = tuple(draw(st.dictionaries(names, counts, max_size=3)).items())
    host = HostTimes(*(draw(maybe) for _ in range(4)))
    if draw(st.booleans()):
        return TracedStep(step_id, tokens, host)
    has_layers = draw(st.booleans())
    num_times = 2 + (2 * NUM_LAYERS + 1) * has_layers
    times = [ns / 1e9 for ns in sorted(draw(times_ns) for _ in range(num_times))]
    begin, *inner, end = times
    layers = tuple(
        LayerTiming(i, *inner[2 * i : 2 * i + 3]) for i in range(NUM_LAYERS if has_layers else 0)
    )
    mode = draw(st.sampled_from(["NONE", "PIECEWISE", "FULL"]))
    timing = StepTiming(step_id, tokens, mode, draw(st.booleans()), begin, end, layers)
    return TracedStep(step_id, tokens, host, timing)


@st.composite
def transfers(draw: st.DrawFn) -> TransferTiming:
    first = draw(st.integers(0, NUM_LAYERS - 1))
    begin, end = sorted(draw(times_ns) for _ in range(2))
    return TransferTiming(
        draw(names),
        draw(st.sampled_from(["load", "save"])),
        tuple(draw(st.lists(names, max_size=2))),
        first,
        draw(st.integers(first + 1, NUM_LAYERS)),
        draw(counts),
        draw(counts),
        draw(names),
        begin / 1e9,
        end / 1e9,
        draw(st.none() | counts),
        draw(st.none() | names),
        tuple(draw(st.lists(names, max_size=2))),
        draw(names),
    )


requests = st.builds(
    TracedRequest,
    names,
    st.none() | counts,
    maybe,
    maybe,
    maybe,
    maybe,
    st.sampled_from([None, "stop", "length", "abort", "error"]),
    st.none() | counts,
    st.none() | counts,
    st.none() | counts,
    counts,
)


@st.composite
def traces(draw: st.DrawFn) -> EngineTrace:
    ids = sorted(draw(st.sets(st.integers(0, 10**9), max_size=4)))
    facts = dataclasses.replace(FACTS, model=draw(names), kv_connector=draw(st.none() | names))
    return EngineTrace(
        facts,
        tuple(draw(steps(step_id)) for step_id in ids),
        tuple(draw(st.lists(transfers(), max_size=4))),
        tuple(draw(st.lists(requests, max_size=3))),
        LeftOut(*(draw(counts) for _ in range(5))),
    )


@settings(deadline=None, max_examples=60)
@given(traces())
def test_any_trace_is_read_back_and_can_be_told(trace: EngineTrace) -> None:
    assert from_json(text_of(trace)) == trace
    assert lines(trace)
    json.dumps(to_dict(trace))
    totals = totals_of(trace)
    assert math.isfinite(totals.load.hidden_share)
    assert totals.load.hidden_share <= 1 + 1e-9
    if timed_steps(trace):
        window = window_of(trace)
        spans = [span for lane in window.lanes.values() for span in lane]
        assert all(0 <= span.begin_ns <= span.end_ns <= window.end_ns for span in spans)


def test_a_viewer_gets_blocks_that_nest() -> None:
    events = json.loads(text_of(sample_trace()))["traceEvents"]
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    steps_ = {e["args"]["step"]: e for e in compute if e["cat"] == "step"}
    for event in compute:
        outer = steps_[event["args"]["step"]]
        assert outer["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "load", "bulk", "store", "host"}
    assert {e["ph"] for e in events if e.get("cat") == "request"} == {"b", "n", "e"}


def change(path: str, value: object) -> Callable[[Any], None]:
    """What sets one field of the document; of the first event of the category before a colon."""

    def apply(document: Any) -> None:
        category, _, rest = path.rpartition(":")
        place = document
        if category:
            events = document["traceEvents"]
            place = next(e for e in events if e.get("cat") == category and e["ph"] in "Xb")
        *outer, last = rest.split(".")
        for key in outer:
            place = place[key]
        if value is DROP:
            del place[last]
        else:
            place[last] = value

    return apply


DROP = object()
DAMAGES = [
    ("otherData.format", "other"),
    ("otherData.left_out", DROP),
    ("otherData.num_layers", -1),
    ("otherData.num_layers", 10**9),
    ("otherData.num_layers", 4),
    ("otherData.clock", "mine"),
    ("otherData.model", None),
    ("traceEvents", 7),
    ("step:ts", -1),
    ("step:ts", "soon"),
    ("step:dur", 1e13),
    ("step:dur", True),
    ("step:dur", 1.0),
    ("step:args.layers", 2),
    ("step:args.mode", "FAST"),
    ("step:args.gated", 1),
    ("step:args.step", 99),
    ("step:args.tokens", {"a": -1}),
    ("host:args.step", 4),
    ("host:args.times", [1, 2]),
    ("layer:args.layer", 1),
    ("layer:args.step", 3),
    ("layer:args.passed", 0),
    ("layer:dur", 5),
    ("load:args.num_bytes", -3),
    ("load:args.end_layer", 0),
    ("load:args.end_layer", 4),
    ("load:args.request_ids", "hit"),
    ("load:args.lane", 3),
    ("load:args.error", 3),
    ("request:args.finish_reason", "bored"),
    ("request:args.times", DROP),
    ("request:args.request_id", 3),
]


@pytest.mark.parametrize(
    ("path", "value"), DAMAGES, ids=lambda one: "drop" if one is DROP else str(one)[:24]
)
def test_a_damaged_file_is_refused(path: str, value: object) -> None:
    document = json.loads(text_of(sample_trace()))
    change(path, value)(document)
    with pytest.raises(ConfigError):
        from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", "[" * 100_000, '{"otherData": NaN}'])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(text)


def test_a_cut_file_is_refused_and_another_kind_is_left_to_others(tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    write_trace(whole, sample_trace())
    assert read_file(whole) == sample_trace()
    (tmp_path / "cut.json").write_text(whole.read_text()[:-40])
    with pytest.raises(ConfigError, match=r"cut\.json is a damaged trace of an engine"):
        read_file(tmp_path / "cut.json")
    (tmp_path / "other.json").write_text("{}")
    assert read_file(tmp_path / "other.json") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "none.json")


def test_a_file_replaces_what_was_there_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    path.chmod(0o644)
    write_trace(path, sample_trace())
    assert path.stat().st_mode & 0o777 == 0o600
    assert FORMAT in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(trace: EngineTrace) -> Any:
        yield "{"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("interlace.engine.trace_file.to_json", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_trace(path, sample_trace())
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


# -------------------------------------------------------------------- what is told


def test_rows_say_what_a_step_waited_for_and_what_was_hidden() -> None:
    first, hit, decode = rows_of(sample_trace())
    assert first.longest_wait is None
    assert (hit.mode, hit.num_tokens, hit.request_ids) == ("GATED", 17, ("hit", "cold"))
    assert hit.wait_s == pytest.approx(1.75e-3)
    assert hit.longest_wait is not None
    assert hit.longest_wait.layer == 2
    assert hit.longest_wait.seconds == pytest.approx(1.5e-3)
    assert hit.step_s == pytest.approx(5.75e-3)
    assert hit.compute_s == pytest.approx(4.0e-3)
    assert hit.pause_s == pytest.approx(1.0e-3)
    assert hit.load.num_bytes == 12_000_000
    assert hit.load.busy_s == pytest.approx(3.5e-3)
    # Computing from 6 to 6.5 and from 6.75 to 8.75 ms lies beside a load from 5.75 to 9.25 ms.
    assert hit.load.beside_s == pytest.approx(2.5e-3)
    assert decode.load.num_bytes == 12_000_000


def test_all_of_the_time_is_accounted_for() -> None:
    totals = totals_of(sample_trace())
    parts = totals.compute_s + totals.wait_s + totals.pause_s
    assert parts == pytest.approx(totals.total_s)
    assert totals.most_waited is not None
    assert totals.most_waited.layer == 2


def test_a_step_that_loads_has_a_timeline_of_its_own() -> None:
    trace = sample_trace()
    hit = timed_steps(trace)[1]
    found = step_trace_of(trace, hit)
    assert found is not None
    assert (found.facts.group_size, found.facts.loaded_tokens, found.facts.new_tokens) == (
        2,
        128,
        17,
    )
    figures = figures_of(found)
    assert figures.wait_s == pytest.approx(1.75e-3)
    assert figures.load_bytes == 12_000_000
    assert step_trace_of(trace, timed_steps(trace)[0]) is None


def test_text() -> None:
    assert lines(sample_trace()) == TEXT.splitlines()


TEXT = """\
dummy:tiny, bfloat16, on a GPU, with PipelineConnector; times of the device
3 steps, 2 requests, 1 finished

 step tokens reqs      mode       ms computing  waiting       longest   pause MB loaded  GB/s hidden
    2    128    1 PIECEWISE    4.000     4.000    0.000             -   0.000         -     -      -
    4     17    2     GATED    5.750     4.000    1.750   1.500 at  2   1.000      12.0   3.4    71%
    5      2    2 PIECEWISE    1.750     1.750    0.000             -   0.000      12.0  12.0   100%

all steps      12.500 ms from the first begin to the last end
computing       9.750 ms  78.0%
waiting         1.750 ms  14.0% at the gates of 2 layers
            most at layer 2: 1.500 ms; longest 1.500 ms, at layer 2 in step 4
no step         1.000 ms   8.0% on the device
loads       24.0 MB in 4.500 ms, 5.3 GB/s; 77.8% of that beside computing
saves       12.0 MB in 1.000 ms, 12.0 GB/s; 0.0% of that beside computing
event loop  a step takes 0.100 ms from planned to handed over, 0.100 ms to apply it (medians)
left out    2 steps

steps 2 to 5
load                               0==1########2========               #####
compute ---0=====1####2=====---      ---.0=====1#####........2=====------=1#=---
store                          ======
        0                                                              12.500 ms
numbers are layers; . waits at a gate, - embed and head
"""


def test_one_step_as_text() -> None:
    assert step_view(sample_trace(), 5) == STEP.splitlines()
    assert "4 layers" not in "".join(step_view(sample_trace(), 4))
    with pytest.raises(ConfigError, match=r"no step 3 .* it has 2 to 5"):
        step_view(sample_trace(), 3)


STEP = """\
step 5
load         =========================================
compute embed----------------0=========1#########2=========head-----------------
        0                                                               1.750 ms
numbers are layers; . waits at a gate, - embed and head
"""


def test_nothing_timed_is_said() -> None:
    trace = dataclasses.replace(sample_trace(), steps=(), transfers=())
    assert "no step was timed" in lines(trace)
    with pytest.raises(ConfigError, match="no step with times"):
        window_of(trace)


def test_pictures_are_equal_for_equal_traces() -> None:
    pytest.importorskip("matplotlib")
    for step_id in (None, 4):
        picture = draw_picture(sample_trace(), "svg", step_id)
        assert picture == draw_picture(copy.deepcopy(sample_trace()), "svg", step_id)
        assert b"<svg" in picture
    assert draw_picture(sample_trace(), "png").startswith(b"\x89PNG")


def test_a_window_has_the_last_step_that_loads_and_what_is_readable_beside_it() -> None:
    window = window_of(sample_trace())
    assert [step.step_id for step in window.steps] == [2, 4, 5]
    assert set(window.lanes) == {"load", "compute", "store"}
    alone = window_of(sample_trace(), 4)
    assert [step.step_id for step in alone.steps] == [4]
    assert [span.label for span in alone.lanes["load"]] == ["0", "1", "2"]
    assert alone.end_ns == 6_000_000, "its load begins before it"


def _with(change: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(text_of(sample_trace()))
    change(document)
    return json.dumps(document)


def _load(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in document["traceEvents"] if e.get("cat") == "load")
    return found


@pytest.mark.parametrize("name", ["num_bytes", "num_blocks", "step_id"])
def test_numbers_that_no_float_can_be_are_refused(name: str) -> None:
    text = _with(lambda document: _load(document)["args"].__setitem__(name, 10**400))
    with pytest.raises(ConfigError, match="whole number"):
        from_json(text)


def test_a_picture_names_a_model_whose_path_is_no_text() -> None:
    pytest.importorskip("matplotlib")
    trace = from_json(_with(lambda document: document["otherData"].update(model="/data/\udcff")))
    assert draw_picture(trace, "svg")


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_file_is_not_replaced_by_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path(os.devnull)
    with pytest.raises(ConfigError, match="no file"):
        check_target(path)
    if kind == "pipe":  # a fault must not break the machine that runs the tests
        with pytest.raises(ConfigError, match="no file"):
            write_trace(path, sample_trace())
        assert path.is_fifo()


def test_nothing_is_left_where_a_folder_has_come_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    check_target(path)
    path.mkdir()
    with pytest.raises(ConfigError, match="folder"):
        write_trace(path, sample_trace())
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_where_the_file_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="not allowed"):
        write_trace(tmp_path / "trace", sample_trace())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_path_can_be_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        check_target(tmp_path / name)


def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    check_target(path)
    write_trace(path, sample_trace())
    assert read_file(path) == sample_trace()
