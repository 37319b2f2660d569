"""The figures that follow from arrival times, and their spread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.spread import Spread
from interlace.bench.timeline import sample_of
from interlace.bench.workload import Work


def work(batch_size: int, output_tokens: int = 4) -> Work:
    return Work(tuple((i, 1, 2) for i in range(batch_size)), output_tokens)


def test_one_request() -> None:
    sample = sample_of(work(1), 10.0, [[12.0, 12.5, 13.0, 13.5]], cached_tokens=2)
    assert sample.first_token_s == 2.0
    assert (sample.decode_s, sample.decode_steps, sample.decode_tokens) == (1.5, 3, 3)
    assert sample.decode_tokens_per_s == 2.0
    assert sample.step_s == sample.median_step_s == 0.5
    assert sample.prefill_tokens_per_s == 1.5
    assert sample.cached_tokens == 2


def test_a_single_token_has_no_decode_rate() -> None:
    sample = sample_of(work(1, 1), 0.0, [[2.0]])
    assert (sample.decode_tokens_per_s, sample.step_s, sample.first_token_s) == (0.0, 0.0, 2.0)


@pytest.mark.parametrize("read_after", [-1e-5, 0.0, 1e-5])
def test_tokens_of_the_step_that_opens_the_window_are_not_in_it(read_after: float) -> None:
    # Request 0 is one step ahead; its second token belongs to the step of the other's first.
    ahead = [1.0, 2.0 + read_after, 3.0, 4.0]
    behind = [2.0, 3.0, 4.0, 5.0]
    sample = sample_of(work(2), 0.0, [ahead, behind])
    assert sample.first_token_s == 2.0
    assert (sample.decode_s, sample.decode_tokens, sample.decode_steps) == (3.0, 5, 3)


def test_steps_of_uneven_length_are_all_counted() -> None:
    sample = sample_of(work(1), 0.0, [[1.0, 1.001, 9.0, 9.001]])
    assert (sample.decode_tokens, sample.decode_steps) == (3, 3)
    ahead, behind = [1.0, 2.00001, 2.1, 9.0], [2.0, 2.10001, 9.00001, 9.1]
    assert sample_of(work(2), 0.0, [ahead, behind]).decode_tokens == 5


@given(
    batch_size=st.integers(1, 8),
    steps=st.integers(2, 20),
    jitter=st.lists(st.floats(0, 1e-3), min_size=8, max_size=8),
)
def test_requests_in_step_are_counted_exactly(
    batch_size: int, steps: int, jitter: list[float]
) -> None:
    arrivals = [[1.0 + s + jitter[i] for s in range(steps)] for i in range(batch_size)]
    sample = sample_of(work(batch_size, steps), 0.0, arrivals)
    assert sample.decode_tokens == batch_size * (steps - 1)
    assert sample.decode_steps == steps - 1
    assert sample.step_s == pytest.approx(1.0, abs=2e-3)


def test_spread() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert spread == Spread(2.5, 1.0, 10.0, (3.0, 1.0, 2.0, 10.0))
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0, (4.0,))
