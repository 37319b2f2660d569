"""Files that hold a timeline, and files that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from step_trace_kit import SHAPE, a_step, a_trace, facts, of_both_ends

from interlace.bench.step_trace import file as trace_file
from interlace.bench.step_trace.build import build_trace
from interlace.bench.step_trace.device import marks_of
from interlace.bench.step_trace.file import read_file, to_json
from interlace.engine.errors import ConfigError


def test_what_perfetto_finds() -> None:
    trace = build_trace(marks_of(a_step().events, SHAPE), facts(1))
    events = json.loads(to_json(trace))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "load", 2: "compute"}
    (layer,) = [e for e in events if e.get("cat") == "load" and e["args"]["layer"] == 2]
    assert layer["name"] == "layer 2"
    assert (layer["ph"], layer["pid"], layer["tid"]) == ("X", 1, 1)
    assert (layer["ts"], layer["dur"]) == (200.0, 100.0), "microseconds"
    assert layer["args"]["bytes"] == 8000
    assert (layer["args"]["request"], layer["args"]["step"]) == ("request-7", 42)
    gates = [e for e in events if e.get("cat") == "wait"]
    assert [e["args"]["layer"] for e in gates] == [0, 1, 2, 3]
    assert {e["tid"] for e in gates} == {2}
    kernels = [e["name"] for e in events if e.get("cat") == "piece" and e["tid"] == 2]
    assert kernels.count("rope_write_kernel") == 4


def test_what_perfetto_finds_of_both_ends() -> None:
    document = json.loads(to_json(of_both_ends()))
    assert document["otherData"]["format"] == "interlace hybrid timeline 1"
    assert document["otherData"]["steps"] == [[42, 256], [43, 128], [44, 8]]
    events = document["traceEvents"]
    assert events[0]["args"]["name"] == "request request-7"
    one, _ = [e for e in events if e.get("cat") == "load"]
    assert (one["name"], one["ts"], one["dur"]) == ("blocks 40-63", 0.0, 240.0)
    assert (one["args"]["blocks"], one["args"]["bytes"]) == ([40, 64], 24_000)
    computed = [e for e in events if e.get("cat") == "compute"]
    assert [e["args"]["step"] for e in computed] == [42] * 6 + [43] * 6 + [44] * 6
    assert computed[7]["name"] == "layer 0"


def test_files_of_steps_have_the_format_that_they_always_had() -> None:
    """So files that were written before there were others are read, and those that are written now
    are read by who knows no others."""
    document = json.loads(to_json(a_trace(2)))
    assert document["otherData"]["format"] == "interlace step timeline 1"
    layer = next(e for e in document["traceEvents"] if e.get("cat") == "load")
    assert layer["args"] == {
        "layer": 0, "part": "layer", "request": "request-7", "step": 42, "bytes": 8000,
    }  # fmt: skip


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    device = a_step()
    device.events = [e._replace(name=e.name.replace("nvjet", "n" * 500)) for e in device.events]
    path = tmp_path / "trace.json"
    path.write_text(to_json(build_trace(marks_of(device.events, SHAPE), facts(1))))
    names = {piece.name for span in read_file(path).spans for piece in span.pieces}
    assert max(len(name) for name in names) == 120


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    message = str(caught.value)
    assert len(message) < 600
    return message


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "missing.json")
    assert "cannot be read" in refused(tmp_path)
    path = tmp_path / "file.json"
    for content in (b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000, b'{"otherData": NaN}'):
        path.write_bytes(content)
        assert "is no timeline of a step" in refused(path)
    path.write_text('{"traceEvents": []}')  # of another program
    assert "`interlace bench timeline --trace`" in refused(path)


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    content = to_json(a_trace())
    path.write_text(content)
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", len(content))
    read_file(path)
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", len(content) - 1)
    assert "larger than 64 MiB" in refused(path)


Damage = Callable[[Any], object]
DAMAGES: dict[str, Damage] = {
    "no facts": lambda d: d.pop("otherData"),
    "another format": lambda d: d["otherData"].update(format="other"),
    "a fact too many": lambda d: d["otherData"].update(colour="red"),
    "a fact too few": lambda d: d["otherData"].pop("model"),
    "a fact of another kind": lambda d: d["otherData"].update(step_id="x"),
    "a model that is a number": lambda d: d["otherData"].update(model=3),
    "no group": lambda d: d["otherData"].update(group_size=0),
    "another clock": lambda d: d["otherData"].update(clock="sun"),
    "no events": lambda d: d["traceEvents"].clear(),
    "events that are text": lambda d: d.update(traceEvents="text"),
    "an event that is a list": lambda d: d["traceEvents"].append([]),
    "a layer twice": lambda d: d["traceEvents"].append(dict(spans(d)[0])),
    "a layer too few": lambda d: d["traceEvents"].remove(spans(d)[1]),
    "layers in another order": lambda d: spans(d)[1]["args"].update(layer=0),
    "another part": lambda d: spans(d)[0]["args"].update(part="tail"),
    "a layer of the head": lambda d: spans(d)[-1]["args"].update(layer=3),
    "no layer": lambda d: spans(d)[0]["args"].update(layer=None),
    "a time that is text": lambda d: spans(d)[0].update(ts="0"),
    "a time before the begin": lambda d: spans(d)[0].update(ts=-1),
    "an endless time": lambda d: spans(d)[-1].update(dur=1e300),
    "a time without end": lambda d: spans(d)[0].pop("dur"),
    "blocks that overlap": lambda d: spans(d)[0].update(dur=150.0),
    "bytes that are text": lambda d: spans(d)[0]["args"].update(bytes="many"),
    "a wait of nobody": lambda d: waits(d)[0]["args"].update(of=99),
    "a wait counted from the end": lambda d: waits(d)[0]["args"].update(of=-1),
    "a wait outside of its layer": lambda d: waits(d)[0].update(ts=0.0),
    "a slice": lambda d: spans(d)[0]["args"].update(part="slice", layer=None, blocks=[0, 1]),
    "facts of both ends": lambda d: d["otherData"].update(json.loads(both_ends())["otherData"]),
}
BOTH_ENDS_DAMAGES: dict[str, Damage] = {
    "facts of a step": lambda d: d["otherData"].update(json.loads(to_json(a_trace()))["otherData"]),
    "a version to come": lambda d: d["otherData"].update(format="interlace hybrid timeline 2"),
    "no number of layers": lambda d: d["otherData"].pop("num_layers"),
    "no layers": lambda d: d["otherData"].update(num_layers=0),
    "more layers": lambda d: d["otherData"].update(num_layers=5),
    "layers without end": lambda d: d["otherData"].update(num_layers=1 << 40),
    "blocks without tokens": lambda d: d["otherData"].update(block_size=0),
    "steps that are text": lambda d: d["otherData"].update(steps="42"),
    "steps that are a number": lambda d: d["otherData"].update(steps=3),
    "a step too few": lambda d: d["otherData"]["steps"].pop(),
    "a step too many": lambda d: d["otherData"]["steps"].append([45, 0]),
    "a step of three numbers": lambda d: d["otherData"]["steps"][0].append(1),
    "a step with a number that is none": lambda d: d["otherData"]["steps"][0].__setitem__(0, "42"),
    "tokens that nobody computed": lambda d: d["otherData"].update(new_tokens=9),
    "tokens that nobody loaded": lambda d: d["otherData"].update(loaded_tokens=656),
    "an end that is not met": lambda d: d["otherData"].update(front_tokens=368, loaded_tokens=656),
    "half a block": lambda d: d["otherData"].update(front_tokens=383, new_tokens=9),
    "no slices": lambda d: [d["traceEvents"].remove(e) for e in spans(d)[:2]],
    "a slice too few": lambda d: d["traceEvents"].remove(spans(d)[1]),
    "a slice of no blocks": lambda d: spans(d)[1]["args"].update(blocks=[40, 40]),
    "a slice that goes up": lambda d: spans(d)[1]["args"].update(blocks=[40, 24]),
    "a slice of one number": lambda d: spans(d)[1]["args"].update(blocks=[24]),
    "a slice of text": lambda d: spans(d)[1]["args"].update(blocks=["24", "40"]),
    "a slice without numbers": lambda d: spans(d)[1]["args"].pop("blocks"),
    "a slice below zero": lambda d: spans(d)[1]["args"].update(blocks=[-1, 40]),
    "a slice with another part": lambda d: spans(d)[1]["args"].update(part="head"),
    "slices that overlap": lambda d: spans(d)[0].update(dur=300.0),
    "a slice that computes": lambda d: spans(d)[2]["args"].update(part="slice", blocks=[0, 1]),
    "a layer less": lambda d: d["traceEvents"].remove(spans(d)[4]),
    "steps that overlap": lambda d: spans(d)[7].update(dur=90.0),
}


def spans(document: Any) -> list[Any]:
    return [e for e in document["traceEvents"] if e.get("cat") in ("load", "compute")]


def waits(document: Any) -> list[Any]:
    return [e for e in document["traceEvents"] if e.get("cat") == "wait"]


def both_ends() -> str:
    return to_json(of_both_ends())


def check_refused(content: str, damage: Damage, path: Path) -> None:
    document = json.loads(content)
    path.write_text(json.dumps(document))
    read_file(path)
    damage(document)
    path.write_text(json.dumps(document))
    assert "is no timeline of a step" in refused(path)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(damage: Damage, tmp_path: Path) -> None:
    check_refused(to_json(a_trace(load_us=100, compute_us=30)), damage, tmp_path / "trace.json")


@pytest.mark.parametrize("damage", BOTH_ENDS_DAMAGES.values(), ids=BOTH_ENDS_DAMAGES)
def test_a_damaged_file_of_both_ends_is_refused(damage: Damage, tmp_path: Path) -> None:
    check_refused(both_ends(), damage, tmp_path / "trace.json")
