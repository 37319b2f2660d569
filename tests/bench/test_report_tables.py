"""A report as JSON and as a table, and the machine's facts in it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from interlace.bench.report import Check, Report, Row
from interlace.bench.spread import Spread
from interlace.bench.tables import draw

REPORT = Report(
    "decode",
    {"model": "tiny", "repeats": 3},
    {"cpu": "Some CPU", "cores": 2, "transformers": None},
    (
        Row("ours", {"tokens/s": Spread.of([61.5, 60.0, 62.25]), "lag ms": Spread.of([0.5])}),
        Row("theirs", {"tokens/s": Spread.of([1234.0, 5.0, 9999.0])}),
    ),
    (
        Check("ours / theirs", 1.25, at_least=1.3),
        Check("lag, ms", 0.5, at_most=20.0),
        Check("other", 150.0),
    ),
    limits={"read GB/s": Spread.of([4330.0, 4300.0])},
    notes=("Something is not known.",),
)


def test_json() -> None:
    found = json.loads(REPORT.to_json())
    assert found["benchmark"] == "decode"
    assert found["settings"] == {"model": "tiny", "repeats": 3}
    assert found["machine"]["cores"] == 2
    assert found["rows"][0]["case"] == "ours"
    assert found["rows"][0]["figures"]["tokens/s"] == {
        "median": 61.5,
        "low": 60.0,
        "high": 62.25,
        "samples": [61.5, 60.0, 62.25],
    }
    assert [check["met"] for check in found["checks"]] == [False, True, True]
    assert found["limits"]["read GB/s"]["samples"] == [4330.0, 4300.0]
    assert found["notes"] == ["Something is not known."]
    assert REPORT.to_json().endswith("}\n")


def test_table() -> None:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(draw(REPORT))
    text = out.getvalue()
    assert "decode: median (lowest to highest)" in text
    assert "61.5 (60.0 to 62.2)" in text
    assert "1,234 (5.00 to 9,999)" in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert lines["ours"].split("|")[3].strip() == "0.50"  # one sample has no spread
    assert lines["theirs"].split("|")[3].strip() == "-"
    assert [cell.strip() for cell in lines["ours / theirs"].split("|")[2:5]] == [
        "1.25",
        ">= 1.30",
        "missed",
    ]
    assert "<= 20.0" in lines["lag, ms"]
    assert "limits in the same run: read GB/s 4,315 (4,300 to 4,330)" in text
    assert "Something is not known." in text
    assert "model tiny, repeats 3" in text
    assert "cpu Some CPU, cores 2" in text
    assert "transformers None" not in text
    assert text.isascii()


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "met"),
    [(1.3, 1.3, None, True), (1.29, 1.3, None, False), (2.0, None, 2.0, True)],
)
def test_a_check(value: float, at_least: float | None, at_most: float | None, met: bool) -> None:
    assert Check("x", value, at_least=at_least, at_most=at_most).met is met
