"""From what was seen of a step to its timeline and figures; the file, there and back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_trace_kit import US, a_trace, facts, steady_marks

from interlace.bench.step_trace.build import LayerLoad, StepMarks, build_trace
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.file import to_json
from interlace.bench.step_trace.intervals import Interval, common, merged, total_ns
from interlace.bench.step_trace.parse import from_json
from interlace.bench.step_trace.trace import Piece
from interlace.engine.errors import InterlaceError

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda p: Interval(p[0], p[0] + p[1])),
    max_size=8,
)


def points(parts: tuple[Interval, ...] | list[Interval]) -> set[int]:
    return {t for begin, end in parts for t in range(begin, end)}


@given(intervals, intervals)
def test_times_are_counted_once(first: list[Interval], second: list[Interval]) -> None:
    one, two = merged(first), merged(second)
    assert points(one) == points(first)
    assert total_ns(one) == len(points(first))
    assert points(common(one, two)) == points(first) & points(second)


def test_short_gaps_are_closed_on_request() -> None:
    parts = [Interval(0, 4), Interval(6, 8), Interval(11, 12)]
    assert merged(parts, tolerance_ns=2) == (Interval(0, 8), Interval(11, 12))


def test_a_layer_waits_for_its_group_and_goes_on_to_the_next_gate() -> None:
    """The first layer and the last one are groups of their own; so layers 2 and 3 are one."""
    trace = a_trace(6, group_size=2, load_us=100, compute_us=30)
    embed, first, second, third, fourth, fifth, last, head = trace.compute
    assert (embed.begin_ns, embed.end_ns) == (10 * US, 30 * US)
    assert first.wait == Interval(30 * US, 100 * US)
    assert (first.begin_ns, first.end_ns) == (30 * US, 131 * US)
    assert second.wait == Interval(131 * US, 200 * US)
    assert third.wait == Interval(231 * US, 400 * US)
    assert fourth.wait is None
    assert fifth.wait == Interval(461 * US, 500 * US)
    assert head.begin_ns == last.end_ns
    assert [span.label for span in trace.load] == ["0", "1", "2", "3", "4", "5"]
    assert trace.end_ns == head.end_ns == (631 + 30) * US


def test_figures() -> None:
    found = figures_of(a_trace(6, group_size=2, load_us=100, compute_us=30))
    assert found.total_s == pytest.approx(661e-6)
    assert found.load_s == pytest.approx(600e-6)
    assert found.load_gb_per_s == pytest.approx(48_000 / 600e-6 / 1e9)
    # embed and all layers but the last one, which comes behind the load
    assert found.both_s == pytest.approx((20 + 4 * 31 + 30) * 1e-6)
    assert found.hidden_share == pytest.approx(174 / 600)
    assert found.wait_s == pytest.approx((70 + 69 + 169 + 39 + 69) * 1e-6)
    assert found.num_waits == 5
    assert found.longest_wait is not None
    assert found.longest_wait[0] == 2
    assert found.longest_wait[1] == pytest.approx(169e-6)


def test_a_load_that_is_early_costs_no_wait() -> None:
    trace = a_trace(6, group_size=1, load_us=5, compute_us=80)
    assert all(span.wait is None for span in trace.compute)
    assert figures_of(trace).longest_wait is None
    # It began before computing did, which is all that is not hidden.
    assert figures_of(trace).hidden_share == pytest.approx(20 / 30)


def test_a_host_that_is_late_is_not_a_gate() -> None:
    marks = steady_marks(2, group_size=1, load_us=100, compute_us=50)
    late = Interval(marks.gates[0].begin_ns, marks.gates[0].end_ns + 30 * US)
    trace = build_trace(dataclasses.replace(marks, gates=(late, marks.gates[1])), facts(1))
    assert trace.compute[1].wait == Interval(30 * US, 100 * US)


def test_pieces_lie_within_their_block_and_gaps_are_no_work() -> None:
    marks = steady_marks(2, group_size=1, load_us=10, compute_us=50)
    zero = marks.loads[0].begin_ns
    first, second = marks.gates
    pieces = (
        Piece("embedding", zero + 10 * US, zero + 12 * US),
        Piece("rope", first.end_ns, first.end_ns + 5 * US),
        Piece("last one, which overlaps", second.begin_ns - 10 * US, second.begin_ns + 1 * US),
        Piece("rope", second.end_ns, second.end_ns + 5 * US),
    )
    trace = build_trace(dataclasses.replace(marks, pieces=pieces), facts(1))
    by_span = [[piece.name for piece in span.pieces] for span in trace.compute]
    assert by_span == [["embedding"], ["rope", "last one, which overlaps"], ["rope"], []]
    for span in trace.compute:
        for piece in span.pieces:
            assert span.begin_ns <= piece.begin_ns < piece.end_ns <= span.end_ns
    assert total_ns(trace.compute[1].busy) == 15 * US
    assert from_json(to_json(trace)) == trace


def test_marks_that_are_out_of_order_are_refused() -> None:
    marks = steady_marks(3)
    with pytest.raises(InterlaceError, match="2 loads of layers and 3 gates"):
        build_trace(dataclasses.replace(marks, loads=marks.loads[:2]), facts())
    with pytest.raises(InterlaceError, match="overlap or run backwards"):
        build_trace(dataclasses.replace(marks, gates=marks.gates[::-1]), facts())
    with pytest.raises(InterlaceError, match="overlap or run backwards"):
        build_trace(dataclasses.replace(marks, loads=marks.loads[::-1]), facts())


@st.composite
def any_marks(draw: st.DrawFn) -> StepMarks:
    """Of a step whose every length is random."""
    lengths = st.integers(0, 10**7)
    num_layers = draw(st.integers(1, 5))
    at = draw(lengths)
    loads, gates = [], []
    for _ in range(num_layers):
        at += draw(lengths)
        begin, at = at, at + draw(lengths)
        loads.append(LayerLoad(begin, at, draw(lengths), (Piece("copy", begin, at),)))
    at = begin_ns = draw(lengths)
    for _ in range(num_layers):
        reached = at + draw(lengths)
        at = reached + draw(lengths)
        gates.append(Interval(reached, at))
    forward_end = at + draw(lengths)
    end = forward_end + draw(lengths)
    return StepMarks(tuple(loads), begin_ns, tuple(gates), forward_end, end)


@given(any_marks(), st.integers(1, 6))
def test_the_compute_lane_has_no_gaps_and_the_file_loses_nothing(
    marks: StepMarks, group_size: int
) -> None:
    trace = build_trace(marks, facts(group_size))
    for span, after in zip(trace.compute, trace.compute[1:], strict=False):
        assert span.end_ns == after.begin_ns
    for span in trace.compute:
        assert span.wait is None or span.begin_ns == span.wait.begin_ns < span.wait.end_ns
    figures = figures_of(trace)
    assert 0 <= figures.hidden_share <= 1
    assert figures.both_s <= min(figures.load_s, figures.compute_s) + 1e-12
    assert figures.compute_s + figures.wait_s <= figures.total_s + 1e-12
    assert from_json(to_json(trace)) == trace
