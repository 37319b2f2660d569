"""Figures and bars of `interlace bench store`; the slabs and pages that it relies on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bench_kit import CountingProgress
from overlap_kit import PREFIX, StoringArm, setting

from interlace.bench.overlap.arms import Hit
from interlace.bench.store import cold, first_token, read
from interlace.bench.store.first_token import Round
from interlace.bench.store.page_cache import drop_pages, resident_bytes, slab_files
from interlace.bench.store.read import CHECKED, STORE, Taken
from interlace.bench.store.rig import CPU_BARS, CUDA_BARS, NO_STORE_BARS, StoreBars, bars_for
from interlace.bench.store.shelf import count_records, fill, made_up_hashes, made_up_space
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.slab_store.catalog import Catalog
from interlace.layers.kv_memory import PageShape

SHAPE = PageShape(2, 16, 2, 8, torch.float32)


class FileArm(StoringArm):
    """A prefix comes from host memory, in 10 ms, unless that was emptied."""

    def __init__(self, auto: LoadMode = "layerwise") -> None:
        super().__init__(auto=auto, load_s=0.020)
        self.emptied = 0

    def forget(self) -> None:
        super().forget()
        self._load_s = 0.020
        self.emptied += 1

    def forget_on_device(self) -> None:
        super().forget()

    async def run(self, work: Work, mode: LoadMode = "auto") -> Hit:
        hit = await super().run(work, mode)
        self._load_s = 0.010
        return hit


def test_bars_hold_for_what_they_are_about() -> None:
    assert bars_for("cpu", "smollm2-135m", 960) == CPU_BARS
    assert bars_for("cpu", "smollm2-135m", 480) == NO_STORE_BARS
    assert bars_for("cpu", "other", 960) == NO_STORE_BARS
    assert bars_for("cuda", "other", 8192) == CUDA_BARS


async def test_first_tokens_in_turns() -> None:
    what = setting(new=(10, 30), repeats=2)
    arm = FileArm()
    bars = StoreBars(computed_by_files=1.5, registered_by_memory=1.1)
    rows, checks = await first_token.measure(arm, what, bars, FileArm())
    assert [row.case for row in rows] == ["32 + 10 new", "32 + 30 new"]
    figures = {name: spread.median for name, spread in rows[0].figures.items()}
    assert figures == pytest.approx(
        {
            "cached ms": 12.0,
            "memory ms": 12.0,
            "files ms": 22.0,
            "registered ms": 22.0,
            "computed ms": 44.0,
            "times sooner": 2.0,
            "files / memory": 22 / 12,
            "registered / memory": 22 / 12,
            "tokens registered": 32,
            "tokens from memory": 32,
            "tokens from files": 32,
        }
    )
    assert [(check.name, check.met) for check in checks] == [
        ("computed / files, 10 new", True),
        ("registered / memory, 10 new", False),
        ("registered / memory, 30 new", True),
    ]
    assert isinstance(what.progress, CountingProgress)
    assert what.progress.tasks == [("first token", 6)]
    assert what.progress.done == 6
    assert arm.runs[1:6] == [(mode, 42) for mode in ("auto", "bulk", "auto", "auto", "recompute")]


async def test_a_prompt_that_is_computed_after_all_is_told() -> None:
    what = setting(new=(10,), repeats=1)
    (row,), checks = await first_token.measure(FileArm(auto="recompute"), what, NO_STORE_BARS)
    assert row.figures["tokens from files"].median == 0
    assert row.figures["times sooner"].median == pytest.approx(1.0)
    assert checks == ()


def test_ratios_are_of_one_round() -> None:
    def hit(seconds: float) -> Hit:
        return Hit(Sample(1, PREFIX, seconds, 0.0, 0, 0), 0.0, ())

    one = Round(hit(1.0), hit(2.0), hit(3.0), hit(12.0))
    assert one.computed_by_files == 4.0
    assert one.files_by_memory == 1.5


async def test_the_choice_when_pages_are_dropped(tmp_path: Path) -> None:
    what = setting(new=(10,), repeats=2)
    arm = FileArm(auto="recompute")
    rows, checks = await cold.measure(arm, what, tmp_path)
    (row,), (check,) = rows, checks
    assert row.case == "32 + 10 new, best bulk"
    assert row.figures["recompute ms"].median == pytest.approx(44.0)
    assert row.figures["bulk ms"].median == pytest.approx(32.0)
    assert row.figures["MB in memory"].median == 0
    assert check.value == pytest.approx(44 / 32)
    assert not check.met
    assert arm.emptied == 3 * len(cold.WAYS)
    modes = [mode for mode, _ in arm.runs[1:]]
    assert modes == [*cold.WAYS, *cold.WAYS[1:], cold.WAYS[0], *cold.WAYS[2:], *cold.WAYS[:2]]


def test_the_store_s_rate_by_the_best_plain_one() -> None:
    ways = {STORE: 8.0, CHECKED: 20.0, "plain, depth 1": 5.0, "plain, depth 2": 10.0}
    taken = {name: [Taken(rate, 100)] * 3 for name, rate in ways.items()}
    rows, (check,) = read._outcome(taken, 1000, is_dropped=False, is_judged=True)
    assert [row.figures["of the best plain"].median for row in rows] == [0.8, 2.0, 0.5, 1.0]
    assert (check.name, check.value, check.met) == ("store / best plain read, cached", 0.8, False)
    (_, *_), (dropped,) = read._outcome(taken, 1000, is_dropped=True, is_judged=True)
    assert dropped.name == "store / best plain read, page cache dropped"


def test_pages_that_stay_are_told_and_nothing_is_asked() -> None:
    taken = {name: [Taken(1.0, 900)] for name in (STORE, CHECKED, "plain, depth 1")}
    assert read._outcome(taken, 1000, is_dropped=False, is_judged=False)[1] == ()
    rows, checks = read._outcome(taken, 1000, is_dropped=True, is_judged=True)
    assert all("not dropped: this file system keeps its pages" in row.case for row in rows)
    assert checks == ()


@pytest.mark.parametrize("slab_records", [3, 100])
def test_a_shelf_is_a_store(slab_records: int, tmp_path: Path) -> None:
    space = made_up_space(SHAPE)
    assert space.record_bytes == SHAPE.block_bytes
    hashes = made_up_hashes(7)
    assert hashes == made_up_hashes(7)
    places = fill(tmp_path, space, hashes, slab_records=slab_records)
    assert len(slab_files(tmp_path)) == -(-7 // slab_records)
    assert count_records(tmp_path) == 7
    catalog = Catalog(tmp_path, space)
    catalog.look()
    assert catalog.num_stored(hashes) == 7
    contents = set()
    for block_hash, at in zip(hashes, places, strict=True):
        found = catalog.find(block_hash)
        assert found is not None
        slab, entry = found
        assert (slab.path.name, entry.record, entry.checksum) == at
        buffer = np.empty(space.record_bytes, np.uint8)
        slab.read(entry, buffer)
        contents.add(buffer.tobytes())
    assert len(contents) == 7
    catalog.close()


def test_pages_of_a_file_are_counted_and_dropped(tmp_path: Path) -> None:
    """Where the file system has pages to drop: those of a tmpfs stay."""
    path = tmp_path / "some.slab"
    path.write_bytes(bytes(1 << 20))
    (tmp_path / "empty.slab").touch()
    files = slab_files(tmp_path)
    assert [file.name for file in files] == ["empty.slab", "some.slab"]
    assert resident_bytes(files) == 1 << 20
    drop_pages(files)
    assert resident_bytes(files) in (0, 1 << 20)
    assert path.read_bytes() == bytes(1 << 20)
    assert resident_bytes(files) == 1 << 20
