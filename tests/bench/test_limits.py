"""Rates of a device, on a clock that the test turns, and once for real."""

from __future__ import annotations

import itertools

import pytest
import torch

from interlace.bench.limits import ROUNDS, Extent, Limits, measure_limits
from interlace.bench.spread import Spread
from interlace.bench.work_size import WorkSize

LIMITS = Limits(Spread.of([90.0, 100.0, 110.0]), Spread.of([1000.0]))
CPU = torch.device("cpu")


def test_the_longer_of_reading_and_computing_is_the_least_time() -> None:
    reads, computes = WorkSize(num_bytes=200, flops=500), WorkSize(num_bytes=50, flops=3000)
    assert (LIMITS.reading_s(reads), LIMITS.computing_s(reads)) == (2.0, 0.5)
    assert (LIMITS.least_s(reads), LIMITS.least_s(computes)) == (2.0, 3.0)


def test_rates_are_amounts_by_the_time_of_a_round() -> None:
    ticks = itertools.count()  # every round takes one second
    limits = measure_limits(CPU, torch.float32, Extent(4096, 16, calls=3), lambda: next(ticks))
    assert limits.bytes_per_s.samples == (3 * 4096.0,) * ROUNDS
    assert limits.flops_per_s.samples == (3 * 2 * 16.0**3,) * ROUNDS
    assert next(ticks) == 2 * 2 * (ROUNDS + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_cpu_is_measured_in_any_dtype(dtype: torch.dtype) -> None:
    figures = measure_limits(CPU, dtype, Extent(1 << 20, 64, calls=1)).figures()
    assert figures["read GB/s"].low > 0
    assert figures["matrix TFLOP/s"].low > 0


def test_figures_have_units_that_people_read() -> None:
    figures = Limits(Spread.of([4.33e12]), Spread.of([7.8e14])).figures()
    assert figures["read GB/s"].median == pytest.approx(4330)
    assert figures["matrix TFLOP/s"].median == pytest.approx(780)
