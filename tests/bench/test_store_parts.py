"""Each part of `interlace bench store` for real, with a tiny model on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bench_kit import CountingProgress
from overlap_kit import tiny_prepared

from interlace.bench.overlap.rig import Rig
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.part_reports import merged
from interlace.bench.report import Report
from interlace.bench.session import Prepared
from interlace.bench.store.names import Part
from interlace.bench.store.rig import StoreSizes
from interlace.bench.store.session import StoreWork, run_store
from interlace.bench.store.shelf import fill
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import InterlaceError

SIZES = Sizes(128, (16, 3), 1, num_decoders=1)
STORE_SIZES = StoreSizes(read_bytes=1 << 19, num_records=300, lookup_blocks=40, lookups=3)
FIGURES = {
    Part.READ: {"GB/s", "of the best plain", "MB in memory"},
    Part.LOOKUP: {"ms"},
    Part.FIRST_TOKEN: {
        "cached ms",
        "memory ms",
        "files ms",
        "computed ms",
        "times sooner",
        "files / memory",
        "tokens from files",
    },
    Part.COLD: {"auto ms", "recompute ms", "bulk ms", "hybrid ms", "auto / best", "MB in memory"},
    Part.SAVING: {"without ms", "with ms", "ratio", "noise of ratio"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    with tiny_prepared(tmp_path_factory.mktemp("model")) as found:
        yield found


async def run_parts(
    prepared: Prepared, parts: Sequence[Part], folder: Path, sizes: Sizes = SIZES
) -> list[Report]:
    reports: list[Report] = []
    progress = CountingProgress()
    work = StoreWork(sizes, folder, STORE_SIZES)
    await run_store(prepared, parts, work, MonotonicClock(), progress, reports.append)
    assert progress.done > 0
    return reports


@pytest.mark.parametrize("part", Part)
async def test_a_part(prepared: Prepared, part: Part, tmp_path: Path) -> None:
    """Figures come out, and what is claimed to come from files did: else the part raises."""
    (report,) = await run_parts(prepared, [part], tmp_path)
    names = {name for row in report.rows for name in row.figures}
    assert names >= FIGURES[part]
    assert report.benchmark == f"store: {part}"
    assert report.settings["store"] == "file"
    assert isinstance(report.settings["file_system"], str)


async def test_an_engine_that_is_opened_when_files_are_written(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: here it reads them."""
    monkeypatch.setattr(Rig, "is_registered", True)
    (report,) = await run_parts(prepared, [Part.FIRST_TOKEN], tmp_path)
    for row in report.rows:
        assert row.figures.keys() >= FIGURES[Part.FIRST_TOKEN] | {"registered ms"}


async def test_what_is_asked_on_a_cpu(prepared: Prepared, tmp_path: Path) -> None:
    """What holds for every machine; nothing about first tokens of another model."""
    parts = [Part.LOOKUP, Part.FIRST_TOKEN, Part.COLD, Part.SAVING]
    reports = await run_parts(prepared, parts, tmp_path)
    report = merged("store", reports)
    assert [row.case for row in report.rows[3:5]] == [
        "first-token: 128 + 16 new",
        "first-token: 128 + 3 new",
    ]
    assert [(check.name, check.at_most) for check in report.checks] == [
        ("lookup: look-up of 40 blocks, ms", 1.0),
        ("lookup: first look at 300 records, s", 1.0),
        ("cold: auto / best forced, cold, 128 + 16 new", 1.1),
        ("cold: auto / best forced, cold, 128 + 3 new", 1.1),
    ]


async def test_reads_that_fail_are_an_error(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rate is told of records that did not come."""

    def fill_and_mistake(
        folder: Path, space: Space, block_hashes: Sequence[bytes], *, slab_records: int
    ) -> list[StoredPlace]:
        places = fill(folder, space, block_hashes, slab_records=slab_records)
        return [place._replace(checksum=place.checksum + 1) for place in places]

    monkeypatch.setattr("interlace.bench.store.read.fill", fill_and_mistake)
    with pytest.raises(InterlaceError, match=r"read: a record could not be read: .*checksum"):
        await run_parts(prepared, [Part.READ], tmp_path)


async def test_saving_that_drops_some_is_an_error(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cost is told of what was not done."""
    monkeypatch.setattr(FileTier, "offer", lambda *args: None)
    with pytest.raises(InterlaceError, match=r"saving: only 0 of \d+ blocks were written"):
        await run_parts(prepared, [Part.SAVING], tmp_path)


@pytest.mark.parametrize("part", [Part.READ, Part.FIRST_TOKEN, Part.COLD])
async def test_cancelled_in_the_middle(prepared: Prepared, part: Part, tmp_path: Path) -> None:
    """Whatever was begun ends, and the next run finds nothing of it."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await run_parts(prepared, [part], first, dataclasses.replace(SIZES, repeats=500))
    await run_parts(prepared, [part], second)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (dataclasses.replace(SIZES, prompt_tokens=496), "requests of 512 tokens do not fit"),
        (dataclasses.replace(SIZES, prompt_tokens=100), "100 tokens are no whole number of blocks"),
    ],
)
async def test_sizes_that_do_not_fit(
    prepared: Prepared, sizes: Sizes, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InterlaceError, match=problem):
        await run_parts(prepared, [Part.FIRST_TOKEN], tmp_path, sizes)
