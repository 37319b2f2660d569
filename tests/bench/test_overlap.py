"""Loads that hide behind computing, on an arm of a known speed."""

from __future__ import annotations

import pytest
from bench_kit import CountingProgress
from overlap_kit import StoringArm, setting

from interlace.bench.bars import OverlapBars
from interlace.bench.overlap import crossover, first_token, modes
from interlace.engine.errors import InterlaceError

BARS = OverlapBars(
    first_token_ms={10: 23.0, 30: 31.0},
    hidden_new=frozenset({10}),
    hidden=0.93,
    mode_usual=1.05,
    mode_worst=1.15,
)


async def test_what_hides_of_a_load() -> None:
    what = setting(bars=BARS)
    rows, checks = await first_token.measure(StoringArm(), what, (10, 30))
    assert [row.case for row in rows] == ["10 new", "30 new"]
    figures = [{name: spread.median for name, spread in row.figures.items()} for row in rows]
    assert figures[0] == pytest.approx(
        {
            "cached ms": 12.0,
            "bulk ms": 32.0,
            "layer-wise ms": 22.0,
            "auto ms": 22.0,
            "computed ms": 44.0,
            "load ms": 20.0,
            "compute ms": 10.0,
            "serial ms": 30.0,
            "pipelined ms": 20.0,
            "hidden share": 1.0,
            "against bulk": 10 / 12,
            "submit ms": 0.5,
            "copies": 4.0,
            "runs": 2.0,
            "added, in loads": 1.0,
            "of link": 0.5,
        }
    )
    assert figures[1]["pipelined ms"] == pytest.approx(30.0)
    assert figures[1]["hidden share"] == pytest.approx(1.0)
    assert {check.name: check.met for check in checks} == {
        "first token, layer-wise, 10 new, ms": True,
        "hidden share, 10 new": True,
        "layer-wise / bulk, 10 new": True,
        "first token, layer-wise, 30 new, ms": False,
        "layer-wise / bulk, 30 new": True,
    }
    assert isinstance(what.progress, CountingProgress)
    assert what.progress.tasks == [("first token", 8)]
    assert what.progress.done == 8


async def test_arms_take_turns() -> None:
    arm = StoringArm()
    await first_token.measure(arm, setting(new=(10,), repeats=1), (10,))
    assert arm.runs == [
        ("auto", 32),
        *[("bulk", 42), ("layerwise", 42), ("auto", 42), ("auto", 42), ("auto", 42)] * 2,
    ]


async def test_a_prefix_that_was_not_stored_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="only 0 of 32 tokens were loaded"):
        await first_token.measure(StoringArm(stores=False), setting(), (10,))


async def test_the_crossover_is_found() -> None:
    """20 tokens take as long as the load."""
    (row,), (check,) = await crossover.measure(StoringArm(), setting(bars=BARS), 4096)
    assert row.case == "20 new (load = compute)"
    assert row.figures["compute ms"].median == pytest.approx(20.0)
    assert "computed ms" not in row.figures
    assert (check.name, check.met) == ("hidden share, 20 new (load = compute)", True)


@pytest.mark.parametrize(
    ("load_s", "most", "case"),
    [
        (0.0005, 100, "1 new (computing takes longer)"),
        (0.5, 100, "100 new (loading takes longer)"),
    ],
)
async def test_where_there_is_no_crossover_nothing_is_asked(
    load_s: float, most: int, case: str
) -> None:
    rows, checks = await crossover.measure(StoringArm(load_s=load_s), setting(bars=BARS), most)
    assert [row.case for row in rows] == [case]
    assert checks == ()


def test_lengths_of_prefixes() -> None:
    assert modes.prefix_lengths(8192) == [512, 2048, 4096, 8192]
    assert modes.prefix_lengths(64) == [16, 32, 64]


async def test_the_chosen_mode_by_the_best_one() -> None:
    what = setting(bars=BARS, new=(10,), repeats=2)
    arm = StoringArm(auto="bulk")
    rows, checks = await modes.measure_prefixes(arm, what, [what.work(32)])
    assert [row.case for row in rows] == ["32 + 10 new, best layerwise"]
    figures = {name: spread.median for name, spread in rows[0].figures.items()}
    assert figures == pytest.approx(
        {
            "auto ms": 32.0,
            "recompute ms": 44.0,
            "bulk ms": 32.0,
            "layerwise ms": 22.0,
            "hybrid ms": 32.0,
            "auto / best": 32 / 22,
        }
    )
    assert [check.value for check in checks] == pytest.approx([32 / 22] * 2)
    assert [(check.at_most, check.met) for check in checks] == [(1.05, False), (1.15, False)]
    assert len(arm.runs) == 1 + 3 * len(modes.MODES)


async def test_a_good_choice_is_met() -> None:
    what = setting(bars=BARS, new=(10, 30), repeats=1)
    _, checks = await modes.measure_prefixes(StoringArm(), what, [what.work(32)])
    assert [check.met for check in checks] == [True, True]
