"""The draws are a fixed function of (seed, position), and look uniform."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layers.random_draws import GAMMA, mix64, uniform


def test_matches_the_published_splitmix64_stream_of_seed_0() -> None:
    assert mix64(0) == 0
    assert [mix64(i * GAMMA) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_values_never_change() -> None:
    assert uniform(0, 0) == 0.8833108082136426
    assert uniform(0, 1) == 0.43152799704850997
    assert uniform(1, 0) == 0.7497482413580301
    assert uniform(2**64 - 1, 8191) == 0.4397363521563732


@settings(derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_lies_in_the_half_open_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_the_largest_draw_is_below_one() -> None:
    assert ((2**64 - 1) >> 11) * 2.0**-53 < 1.0


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63])
def test_positions_fill_the_interval_evenly(seed: int) -> None:
    bins = [0] * 10
    for position in range(2000):
        bins[int(uniform(seed, position) * 10)] += 1
    assert all(130 <= n <= 270 for n in bins), bins


def test_neighbouring_seeds_share_no_draws() -> None:
    draws = {uniform(seed, position) for seed in range(100) for position in range(100)}
    assert len(draws) == 100 * 100
