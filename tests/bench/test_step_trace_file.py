"""Files that hold a timeline, and files that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from step_trace_kit import SHAPE, a_step, a_trace, facts

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
}


def spans(document: Any) -> list[Any]:
    return [e for e in document["traceEvents"] if e.get("cat") in ("load", "compute")]


def waits(document: Any) -> list[Any]:
    return [e for e in document["traceEvents"] if e.get("cat") == "wait"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(damage: Damage, tmp_path: Path) -> None:
    document = json.loads(to_json(a_trace(load_us=100, compute_us=30)))
    damage(document)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    assert "is no timeline of a step" in refused(path)
