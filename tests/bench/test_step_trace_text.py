"""The timeline in words and characters, as it is printed."""

from __future__ import annotations

import pytest
from step_trace_kit import SHAPE, a_step, a_trace, both_ends_marks, facts, of_both_ends

from interlace.bench.step_trace.build import LayerLoad, StepMarks, build_trace
from interlace.bench.step_trace.device import marks_of
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.text import WIDTH, chart, lines, summary

GOLDEN = """\
dummy:llama-3.1-8b, bfloat16, on NVIDIA H200: 8,192 tokens loaded, 688 computed
step 42, request request-7; times of the device; 1 layer to a gate
total                0.486 ms
load                 0.400 ms for 0.0 MB, 0.1 GB/s
compute              0.268 ms of work
both lanes busy      0.183 ms, 45.8% of the load
waits                0.201 ms at the gates of 4 layers, longest 0.075 ms before layer 0

load    0==============1##############2=============3##############
compute  ---...........0=======.......1#######......2========......3#######head-
        0                                                               0.486 ms
numbers are layers; . waits at a gate, - embed and head"""

BOTH_ENDS = """\
dummy:llama-3.1-8b, bfloat16, on NVIDIA H200: 1,024 tokens from both ends, 8 behind them
request request-7; times of the device; tokens of each step: 256, 128, 8
total                0.695 ms
load                 0.400 ms for 0.0 MB, 0.1 GB/s
compute              0.645 ms of work
both lanes busy      0.370 ms, 92.5% of the shorter of the two
met               at block 24 of 64: 384 tokens before it computed, 640 loaded
steps             3, the last one with 8 tokens

load    40-63====================24-39###########
compute  -0====1####2=====3####  -0=====1####2====3####-  -0====1####2====3####-
        0                                                               0.695 ms
numbers are blocks of the prompt above, layers below; - embed and head"""

PIPELINED = """\
load    0=#2=#4=#6=#8=#==#==#==#==#==#==#==#==#==#==#==#
compute ..0=1#2=3#4==5#6=7#8=9##==##==##14=##==##==19#==##==##24=##==##==29#==##
        0                                                              29.171 ms"""


def test_the_golden_one() -> None:
    trace = build_trace(marks_of(a_step().events, SHAPE), facts(1))
    assert "\n".join(lines(trace)) == GOLDEN


def test_many_layers() -> None:
    assert "\n".join(chart(a_trace(32, load_us=610, compute_us=890))) == PIPELINED


@pytest.mark.parametrize("num_layers", [1, 2, 30, 126])
@pytest.mark.parametrize("load_us", [1, 90, 700])
def test_no_row_is_too_wide(num_layers: int, load_us: int) -> None:
    rows = chart(a_trace(num_layers, group_size=1, load_us=load_us))
    assert all(len(row) <= WIDTH and row.isascii() for row in rows)


def test_without_waits_and_without_time() -> None:
    assert summary(a_trace(3, load_us=1, compute_us=50))[-1] == "waits                    0 ms"
    nothing = StepMarks((LayerLoad(5, 5, 0),), 5, (Interval(5, 5),), 5, 5)
    assert lines(build_trace(nothing, facts(1)))[-2].split() == ["0", "0.000", "ms"]


def test_both_ends() -> None:
    assert "\n".join(lines(of_both_ends())) == BOTH_ENDS


def test_many_steps() -> None:
    trace = of_both_ends(both_ends_marks((1,) * 30, (1,) * 12))
    rows = lines(trace)
    assert rows[1].endswith("tokens of each step: 16, 16, 16, 16, 16, 16, 16, 16, ...")
    assert "steps             13, the last one with 8 tokens" in rows
    assert all(len(row) <= WIDTH and row.isascii() for row in chart(trace))
