"""Two runs, arm by arm: ratios on samples that a test makes up, and what is said of differences."""

from __future__ import annotations

import json
import random

import pytest
from grid_kit import a_run, loading, on_another
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.grid.compare import compare_runs, ratio_of
from interlace.engine.errors import ConfigError

FAST = [0.100, 0.101, 0.102, 0.103, 0.104]
SLOW = [0.200, 0.202, 0.204, 0.206, 0.208]


def test_what_is_slower_and_what_is_noise() -> None:
    arms = [(loading("bulk", 32), FAST), (loading("layerwise", 32), FAST)]
    a = a_run(arms)
    b = a_run([(loading("bulk", 32), SLOW), (loading("layerwise", 32), list(reversed(FAST)))])
    found = compare_runs(a, b)
    assert [(one.arm, one.verdict) for one in found.compared] == [
        ("bulk", "slower"),
        ("layerwise", "within noise"),
    ]
    slower = found.compared[0].ratio
    assert slower.ratio == pytest.approx(2.0)
    assert 0.200 / 0.104 <= slower.low < 2.0 < slower.high <= 0.208 / 0.100
    assert (found.differences, found.machines) == ((), ())
    back = compare_runs(b, a).compared[0]
    assert back.verdict == "faster"
    assert back.ratio.ratio == pytest.approx(0.5)


def test_two_rounds_say_nothing() -> None:
    a, b = (a_run([(loading("bulk", 32), s[:2])]) for s in (FAST, SLOW))
    assert compare_runs(a, b).compared[0].verdict.startswith("too few rounds")


@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=9),
    st.lists(st.floats(0.001, 10), min_size=1, max_size=9),
)
def test_a_range_holds_the_extremes_at_most(a: list[float], b: list[float]) -> None:
    found = ratio_of(a, b)
    slack = 1 + 1e-9
    assert min(b) / max(a) / slack <= found.low <= found.high <= max(b) / min(a) * slack
    assert found == ratio_of(a, b), "the same for the same"


def test_a_range_holds_the_truth_about_as_often_as_it_says() -> None:
    """Of two runs that differ by nothing but noise. Medians of few samples jump, so that ranges are
    rather wide than narrow."""
    source = random.Random(7)
    hits = [
        ratio_of(*([source.gauss(1, 0.05) for _ in range(7)] for _ in range(2))).is_noise
        for _ in range(60)
    ]
    assert sum(hits) / len(hits) >= 0.9


def test_other_grids_are_named_and_common_arms_compared() -> None:
    a = a_run([(loading("bulk", 32), FAST), (loading("bulk", 64), FAST)])
    b = a_run([(loading("bulk", 64), FAST), (loading("bulk", 96), FAST)])
    found = compare_runs(a, b)
    assert [one.arm for one in found.compared] == ["prefix 64"]
    assert found.differences == (
        "prefix is 32, 64 in A, 64, 96 in B",
        "only in A: prefix 32",
        "only in B: prefix 96",
    )


def test_nothing_in_common_is_refused() -> None:
    a, b = a_run([(loading("bulk", 32), FAST)]), a_run([(loading("bulk", 64), FAST)])
    with pytest.raises(ConfigError, match="no arm in common: prefix is 32 in A, 64 in B"):
        compare_runs(a, b)


def test_nothing_measured_is_refused() -> None:
    a, b = a_run([(loading("bulk", 32), FAST)]), a_run([(loading("bulk", 32), [])], repeats=5)
    with pytest.raises(ConfigError, match="stopped in its first round"):
        compare_runs(a, b)


def test_partial_runs_and_other_machines_are_named() -> None:
    a = a_run([(loading("bulk", 32), FAST)])
    b = on_another(a_run([(loading("bulk", 32), SLOW[:3])], repeats=5), cpu="there", gpu="H200")
    found = compare_runs(a, b)
    assert found.differences == ("B was stopped after 3 of 5 rounds",)
    assert found.machines == ("cpu is here for A, there for B", "gpu is None for A, H200 for B")
    record = json.loads(found.to_json())
    assert record["compared"][0]["verdict"] == "slower"
    assert record["machines"] == list(found.machines)
