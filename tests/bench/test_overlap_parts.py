"""Each part of `interlace bench overlap` for real, with a tiny model on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_kit import CountingProgress
from overlap_kit import SMALL, tiny_prepared

from interlace.bench.overlap.names import Part
from interlace.bench.overlap.session import run_overlap
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.part_reports import merged
from interlace.bench.report import Report
from interlace.bench.session import Prepared
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import InterlaceError

FIGURES = {
    Part.LINK: {"GB/s", "of one copy", "submit ms", "runs", "of records", "copies"},
    Part.FIRST_TOKEN: {"load ms", "compute ms", "serial ms", "pipelined ms", "hidden share"},
    Part.CROSSOVER: {"load ms", "compute ms", "hidden share"},
    Part.MODES: {"auto ms", "bulk ms", "layerwise ms", "hybrid ms", "recompute ms", "auto / best"},
    # What is predicted is told only where the rates see something to split: by chance, here.
    Part.SPLIT: {"hybrid ms", "best other / hybrid", "tokens loaded"},
    Part.MIXED: {"loaded / cached", "with the next gap"},
    Part.BESIDE: {"p99, loads / cached", "loads GB/s"},
    Part.GAPS: {"step alone ms", "p99 gap ms", "loaded tokens"},
    Part.SAVING: {"without ms", "with ms", "ratio", "noise of ratio"},
    Part.IDLE: {"ratio", "noise of ratio", "added us"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    with tiny_prepared(tmp_path_factory.mktemp("model")) as found:
        yield found


async def run_parts(
    prepared: Prepared, *parts: Part, sizes: Sizes = SMALL, folder: Path | None = None
) -> list[Report]:
    reports: list[Report] = []
    progress = CountingProgress()
    await run_overlap(prepared, parts, sizes, MonotonicClock(), progress, reports.append, folder)
    assert progress.done > 0
    return reports


@pytest.mark.parametrize("part", Part)
async def test_a_part(prepared: Prepared, part: Part) -> None:
    """Figures come out, and what is claimed to be loaded was: else the part raises."""
    (report,) = await run_parts(prepared, part)
    names = {name for row in report.rows for name in row.figures}
    assert names >= FIGURES[part]
    assert report.benchmark == f"overlap: {part}"
    assert not any("share" in check.name for check in report.checks), "no bars on a CPU"


async def test_prefixes_that_come_from_files(prepared: Prepared, tmp_path: Path) -> None:
    """What is claimed to be loaded was, though host memory was empty: else a part raises."""
    folder = tmp_path / "kv"
    first, modes = await run_parts(
        prepared, Part.FIRST_TOKEN, Part.MODES, folder=folder, sizes=SMALL
    )
    assert list(folder.glob("*/*.slab"))
    for row in first.rows:
        assert row.figures["read ms"].low > 0
        assert row.figures["load ms"].median >= row.figures["read ms"].median
    assert not first.checks, "there is one way for what lies in files"
    assert modes.settings["store"] == "file"
    assert {name for row in modes.rows for name in row.figures} >= FIGURES[Part.MODES]


async def test_parts_share_engines_and_one_report(prepared: Prepared) -> None:
    reports = await run_parts(prepared, Part.FIRST_TOKEN, Part.MIXED)
    report = merged("overlap", reports)
    assert [row.case for row in report.rows] == [
        "first-token: 16 new",
        "first-token: 3 new",
        "mixed: 2 decoding + 64 loaded, 16 new",
    ]
    assert report.checks[0].name == "first-token: layer-wise / bulk, 16 new"
    assert json.loads(report.to_json())["settings"]["new"] == [16, 3]


@pytest.mark.parametrize("part", [Part.MIXED, Part.LINK, Part.BESIDE])
async def test_cancelled_in_the_middle(prepared: Prepared, part: Part) -> None:
    """Whatever was begun ends, and the next run finds nothing of it."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await run_parts(
                prepared, part, sizes=dataclasses.replace(SMALL, repeats=200, lives=100)
            )
    await run_parts(prepared, Part.FIRST_TOKEN)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (dataclasses.replace(SMALL, prompt_tokens=496), "requests of 512 tokens do not fit"),
        (dataclasses.replace(SMALL, decoder_tokens=500), "requests of 516 tokens do not fit"),
        (dataclasses.replace(SMALL, prompt_tokens=100), "100 tokens are no whole number of blocks"),
    ],
)
async def test_sizes_that_do_not_fit(prepared: Prepared, sizes: Sizes, problem: str) -> None:
    with pytest.raises(InterlaceError, match=problem):
        await run_parts(prepared, Part.MIXED, sizes=sizes)


async def test_a_crowd_that_ends_too_soon_names_its_part(prepared: Prepared) -> None:
    with pytest.raises(InterlaceError, match=r"mixed: .*ended after its 3 tokens"):
        await run_parts(prepared, Part.MIXED, sizes=dataclasses.replace(SMALL, decoder_tokens=3))
