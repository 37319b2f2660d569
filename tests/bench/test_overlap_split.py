"""`bench overlap --part split`: which links it makes, what it compares, and what it judges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hooked_copies import HookedCopies
from overlap_kit import HOST_S, LOAD_S, PREFIX, TOKEN_S, StoringArm, setting

from interlace.bench.bars import OverlapBars
from interlace.bench.overlap import slow_link
from interlace.bench.overlap.modes import MODES
from interlace.bench.overlap.slow_link import SlowLoads, UselessCopies
from interlace.bench.overlap.split import RATIOS, find_links, measure
from interlace.engine.errors import InterlaceError
from interlace.layers.page_copies import Runs


async def test_links_are_as_slow_as_the_ratios_say() -> None:
    arm, made = StoringArm(), setting(new=(8,))
    prefix = made.work(PREFIX)
    await arm.run(prefix)
    links = await find_links(arm, made, prefix)
    compute_s, link_s = TOKEN_S * (PREFIX + 8), LOAD_S / 2  # the arm says that its link is faster
    assert [link.slowdown for link in links] == [round(r * compute_s / link_s) for r in RATIOS]
    assert [link.ratio for link in links] == [
        pytest.approx(link.slowdown * link_s / compute_s) for link in links
    ]


async def test_a_link_that_is_slow_as_it_is_is_taken_once() -> None:
    arm, made = StoringArm(), setting(new=(8,))
    arm.link_bytes_per_s /= 100
    prefix = made.work(PREFIX)
    (link,) = await find_links(arm, made, prefix)
    assert link.slowdown == 1
    assert link.ratio > max(RATIOS)


async def test_an_unknown_link_is_an_error() -> None:
    arm = StoringArm()
    arm.link_bytes_per_s = 0.0
    with pytest.raises(InterlaceError, match="longer --prompt-tokens"):
        await measure(arm, setting())


async def test_all_ways_over_all_links_and_the_link_is_as_before() -> None:
    arm, made = StoringArm(auto="recompute"), setting(new=(30, 8), repeats=2)
    rows, checks = await measure(arm, made)
    assert len(rows) == 3
    assert not checks
    assert {length for _, length in arm.runs[1:]} == {PREFIX + 8}, "the least new tokens"
    assert [mode for mode, _ in arm.runs[3:]] == [*MODES] * 3 * 3
    assert arm._slowdown == 1
    for row in rows:
        recompute = row.figures["recompute ms"].median / 1e3
        assert recompute == pytest.approx(TOKEN_S * (PREFIX + 8) + HOST_S)
        assert row.figures["auto ms"].median == row.figures["recompute ms"].median
        others = min(row.figures[f"{way} ms"].median for way in ("recompute", "bulk", "layerwise"))
        gain = others / row.figures["hybrid ms"].median
        assert row.figures["best other / hybrid"].median == pytest.approx(gain)
        assert row.figures["predicted ms"].median < row.figures["hybrid ms"].median
        assert row.figures["tokens loaded"].median == PREFIX


async def test_it_is_judged_by_the_prediction_and_by_the_best() -> None:
    made = dataclasses.replace(setting(new=(8,)), bars=OverlapBars(split=1.1, mode_worst=1.15))
    _, checks = await measure(StoringArm(), made)
    assert len(checks) == 6
    by_name = {check.name: check for check in checks}
    assert sum("hybrid / predicted" in name for name in by_name) == 3
    assert not any(check.met for name, check in by_name.items() if "predicted" in name), (
        "this arm's hybrid is no better than loading in bulk"
    )


async def test_without_a_prediction_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoringArm, "balanced_s", staticmethod(lambda load_s, rest_s: None))
    rows, checks = await measure(
        StoringArm(), dataclasses.replace(setting(new=(8,)), bars=OverlapBars(split=1.1))
    )
    assert not checks
    assert all("predicted ms" not in row.figures for row in rows)


@pytest.mark.parametrize("times", [1, 3])
def test_loads_come_behind_useless_copies(times: int) -> None:
    records = torch.randint(0, 256, (4, 2, 8), dtype=torch.uint8)
    layers = [torch.zeros(6, 8, dtype=torch.uint8) for _ in range(2)]
    seen: list[tuple[str, int]] = []

    def note(layer: int, runs: Runs) -> None:
        seen.append(("layer", layer))

    copies = SlowLoads(
        HookedCopies(records, layers, note),
        lambda: times,
        lambda num_bytes: seen.append(("useless", num_bytes)),
    )
    runs = copies.prepare([(0, 2, 3)])
    assert copies.load(1, runs).num_bytes == 3 * 8
    assert seen == [("useless", (times - 1) * 3 * 8), ("layer", 1)]
    seen.clear()
    assert len(list(copies.load_layers(range(2), runs))) == 2
    assert seen == [("useless", (times - 1) * 2 * 3 * 8), ("layer", 0), ("layer", 1)]
    assert all(torch.equal(layer[2:5], records[:3, i]) for i, layer in enumerate(layers))
    seen.clear()
    copies.save(0, runs)
    assert len(list(copies.save_layers(range(2), runs))) == 2
    assert [what for what, _ in seen] == ["layer"] * 3, "saves are as they were"
    assert (copies.num_layers, copies.page_bytes) == (2, 8)


def test_useless_copies_are_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link, "PIECE_BYTES", 24)
    records = torch.randint(0, 256, (4, 2, 8), dtype=torch.uint8)
    copied: list[int] = []

    def note(target: np.ndarray, source: np.ndarray) -> None:
        copied.append(len(target))
        assert len(source) == len(target)

    useless = UselessCopies(records, torch.device("cpu"))
    useless.copy(60)
    assert torch.equal(useless._target, records.view(-1)[:24])
    monkeypatch.setattr(np, "copyto", note)
    useless.copy(60)
    useless.copy(0)
    assert copied == [24, 24, 12]
