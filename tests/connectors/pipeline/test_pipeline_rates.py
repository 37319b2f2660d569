"""How long things take, and which way is chosen: tables of numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.connectors.pipeline.messages import LoadSample, StepSample, num_pairs
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.rates import (
    SAMPLES_OF_A_SIZE,
    Forecast,
    LoadRate,
    StepTimes,
    Way,
    choose_way,
    fit_prices,
)

MS = 1e-3


class TestLoadRate:
    def test_it_begins_with_what_was_measured(self) -> None:
        assert LoadRate(50e9).seconds(5 * 10**9) == pytest.approx(0.1)

    def test_unknown_until_a_load(self) -> None:
        rate = LoadRate(0)
        assert rate.seconds(1) is None
        rate.add([LoadSample(10, 0.0), LoadSample(0, 1.0)])
        assert rate.seconds(1) is None
        rate.add([LoadSample(100, 2.0)])
        assert rate.seconds(50) == pytest.approx(1.0)

    def test_it_follows_what_loads_take(self) -> None:
        rate = LoadRate(50e9)
        rate.add([LoadSample(10**9, 0.1)] * 60)
        assert rate.seconds(10**10) == pytest.approx(1.0, rel=0.01)

    def test_a_short_load_says_little(self) -> None:
        rate = LoadRate(50e9)
        rate.add([LoadSample(10**9, 0.02), LoadSample(1000, 1e-5)])
        assert rate.seconds(10**9) == pytest.approx(0.02, rel=0.01)


def step(num_tokens: int, context: int, prices: tuple[float, float, float]) -> StepSample:
    a, b, c = prices
    pairs = num_pairs(num_tokens, context)
    return StepSample(num_tokens, pairs, a + b * num_tokens + c * pairs)


LIKE_A_GPU = (4e-3, 2.5e-5, 1e-9)
SHAPES = ((1, 200), (8, 1600), (128, 8192), (688, 8192), (2048, 0), (8192, 0))


class TestStepTimes:
    def test_unknown_before_any_sample(self) -> None:
        times = StepTimes()
        times.add([StepSample(0, 0, 1.0), StepSample(1, 0, 0.0)])
        assert times.seconds(1, 0) is None

    def test_the_prices_are_found(self) -> None:
        times = StepTimes()
        times.add([step(n, c, LIKE_A_GPU) for n, c in SHAPES])
        for num_tokens, context in ((1, 0), (300, 4000), (4096, 4096)):
            right = step(num_tokens, context, LIKE_A_GPU).seconds
            assert times.seconds(num_tokens, context) == pytest.approx(right, rel=1e-3)

    def test_a_thousand_decodes_do_not_push_out_the_prompt(self) -> None:
        times = StepTimes()
        times.add([step(n, c, LIKE_A_GPU) for n, c in SHAPES])
        times.add([step(1, 200 + i, LIKE_A_GPU) for i in range(1000)])
        right = step(8192, 0, LIKE_A_GPU).seconds
        assert times.seconds(8192, 0) == pytest.approx(right, rel=1e-3)

    def test_old_samples_of_a_size_go(self) -> None:
        times = StepTimes()
        times.add([StepSample(64, 0, 9.0)] * 20)
        times.add([StepSample(64, 0, 1.0)] * SAMPLES_OF_A_SIZE)
        assert times.seconds(64, 0) == pytest.approx(1.0)

    def test_one_kind_of_step_does_not_make_long_prompts_look_free(self) -> None:
        times = StepTimes()
        times.add([StepSample(64, 0, 0.010)])
        assert times.seconds(640, 0) == pytest.approx(0.100)

    @pytest.mark.parametrize("noise", [0.9, 1.0, 1.1])
    def test_what_is_larger_than_all_that_was_seen_takes_longer(self, noise: float) -> None:
        """Steps of about one size, where the shorter one took as long: a constant fits best."""
        times = StepTimes()
        times.add([StepSample(1900, 0, 0.1), StepSample(2000, 0, 0.1 * noise)])
        whole, rest = times.at_least_seconds(8000, 0), times.seconds(64, 7936)
        assert whole is not None
        assert rest is not None
        assert whole >= 0.39 * noise
        assert whole > 3 * rest

    def test_a_little_more_than_was_seen_looks_no_longer_for_it(self) -> None:
        """Else a load within a step would seem to hide behind what computes for a moment."""
        times = StepTimes()
        times.add([step(n, 200, (8e-3, 2.5e-5, 0.0)) for n in (1, 4, 16)])
        assert times.seconds(128, 0) == pytest.approx(0.0112, rel=0.01)
        assert times.at_least_seconds(16, 0) == times.seconds(16, 0)

    def test_no_price_is_negative(self) -> None:
        # Larger steps take no longer: alone by least squares a token's price would be below zero.
        prices = fit_prices([StepSample(1, 0, 2.0), StepSample(1000, 0, 1.0)])
        assert min(prices) >= 0
        assert prices[0] == pytest.approx(1.2)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.builds(
                StepSample,
                st.integers(1, 10_000),
                st.integers(0, 100_000),
                st.floats(1e-4, 10.0),
            ),
            min_size=1,
            max_size=40,
        )
    )
    def test_any_samples_give_lawful_prices(self, samples: list[StepSample]) -> None:
        prices = fit_prices(samples)
        assert min(prices) >= 0
        assert max(prices) > 0
        # Never worse than one price alone for all steps, which is always possible.
        mean = sum(1 / s.seconds for s in samples) / sum(1 / s.seconds**2 for s in samples)
        worst = sum((mean / s.seconds - 1) ** 2 for s in samples)
        assert _error(samples, prices) <= worst * (1 + 1e-5) + 1e-5


def _error(samples: list[StepSample], prices: tuple[float, float, float]) -> float:
    a, b, c = prices
    return sum(((a + b * s.num_tokens + c * s.num_pairs) / s.seconds - 1) ** 2 for s in samples)


def forecast(
    load: float | None,
    recompute: float | None,
    rest: float | None,
    first: float | None,
    running: int,
    beside: float | None = None,
    hybrid: float | None = None,
) -> Forecast:
    """Milliseconds. `first`: None if it is all the rest; `beside`: None if there is no queue."""

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds * MS

    return Forecast(
        load_s=seconds(load),
        bulk_load_s=seconds(load if beside is None else beside),
        hybrid_s=seconds(hybrid),
        recompute_s=seconds(recompute),
        rest_s=seconds(rest),
        first_step_s=seconds(rest if first is None else first),
        num_running=running,
    )


UNKNOWN = None


@pytest.mark.parametrize(
    ("load", "recompute", "rest", "first", "running", "way"),
    [
        # 8B, 8,192 tokens stored: alone, whatever the rest is, layer by layer.
        (19.5, 211, 7, None, 0, Way.LAYERWISE),
        (19.5, 230, 28, None, 0, Way.LAYERWISE),
        (19.5, 300, 65, None, 0, Way.LAYERWISE),
        # Beside 32 decodes it may stall them 20 ms together.
        (19.5, 211, 7, 9, 32, Way.BULK),
        (19.5, 230, 28, 30, 32, Way.LAYERWISE),
        (1.2, 20, 5, 6, 32, Way.LAYERWISE),
        (19.5, 211, 7, 9, 1, Way.LAYERWISE),
        # A small model computes faster than the link loads.
        (18.0, 15, 1, None, 0, Way.RECOMPUTE),
        (18.0, 18, 1, None, 0, Way.RECOMPUTE),
        (18.0, 18.5, 1, None, 0, Way.LAYERWISE),
        (18.0, 18.5, 1, 2, 32, Way.RECOMPUTE),
        # A rest of several steps hides behind its first one only.
        (50.0, 500, 300, 40, 0, Way.LAYERWISE),
        (50.0, 320, 300, 40, 8, Way.RECOMPUTE),
        # Before anything is known a load is tried.
        (UNKNOWN, 100, 10, None, 0, Way.LAYERWISE),
        (10, UNKNOWN, UNKNOWN, UNKNOWN, 0, Way.LAYERWISE),
        (10, UNKNOWN, UNKNOWN, UNKNOWN, 1, Way.BULK),
    ],
)
def test_the_soonest_way(
    load: float | None,
    recompute: float | None,
    rest: float | None,
    first: float | None,
    running: int,
    way: Way,
) -> None:
    assert choose_way("auto", forecast(load, recompute, rest, first, running), 20 * MS) is way


def test_no_stall_is_allowed() -> None:
    longer = forecast(10, 100, 9, None, 1)
    assert choose_way("auto", longer, 0.0) is Way.BULK
    assert choose_way("auto", forecast(10, 100, 10, None, 1), 0.0) is Way.LAYERWISE


def test_a_queue_beside_the_steps_counts() -> None:
    queued = forecast(19.5, 100, 7, 9, 32, beside=200)
    assert choose_way("auto", queued, 20 * MS) is Way.RECOMPUTE


@pytest.mark.parametrize(
    ("mode", "way"),
    [("recompute", Way.RECOMPUTE), ("bulk", Way.BULK), ("layerwise", Way.LAYERWISE)],
)
def test_a_mode_forces_its_way(mode: LoadMode, way: Way) -> None:
    for running in (0, 32):
        assert choose_way(mode, forecast(19.5, 1, 7, 9, running), 0.0) is way
        unknown = forecast(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, running)
        assert choose_way(mode, unknown, 0.0) is way


@pytest.mark.parametrize("running", [0, 1])
@pytest.mark.parametrize("mode", ["layerwise", "auto"])
def test_what_has_to_be_read_first_is_not_loaded_within_a_step(
    mode: LoadMode, running: int
) -> None:
    known, unknown = forecast(19.5, 211, 7, None, running), forecast(None, None, None, None, 0)
    for one in (known, unknown):
        assert choose_way(mode, one, 1.0) is Way.LAYERWISE
        read = dataclasses.replace(one, may_load_within=False)
        assert choose_way(mode, read, 1.0) is Way.BULK


@pytest.mark.parametrize(
    ("load", "hybrid", "way"),
    [(65, 55, Way.BULK), (65, 45, Way.BULK), (500, 140, Way.HYBRID), (500, 190, Way.RECOMPUTE)],
)
def test_reading_beside_computing_has_its_price(load: float, hybrid: float, way: Way) -> None:
    """8,192 tokens in files: cached ones, which were 17 ms sooner in bulk, and cold ones."""
    one = dataclasses.replace(
        forecast(19.5, 212, 9, None, 0, beside=load, hybrid=hybrid), may_load_within=False
    )
    assert choose_way("auto", one, 20 * MS) is way
