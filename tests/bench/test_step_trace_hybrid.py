"""A prompt from both ends: from what was seen to its timeline, figures and file, and back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_trace_kit import US, Ticks, a_tape, both_ends_facts, both_ends_marks, of_both_ends

from interlace.bench.step_trace.build import LayerLoad
from interlace.bench.step_trace.facts import RanStep
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.file import to_json
from interlace.bench.step_trace.hybrid_build import HybridMarks, SliceLoad, build_hybrid_trace
from interlace.bench.step_trace.hybrid_tape import HybridTape, NotedSlice
from interlace.bench.step_trace.parse import from_json
from interlace.bench.step_trace.trace import Blocks
from interlace.engine.errors import InterlaceError

RECORD = 30


def test_slices_go_down_and_steps_follow_each_other() -> None:
    trace = of_both_ends()
    assert [span.label for span in trace.load] == ["40-63", "24-39"]
    assert [(span.begin_ns, span.end_ns) for span in trace.load] == [
        (0, 240 * US),
        (240 * US, 400 * US),
    ]
    assert [span.num_bytes for span in trace.load] == [24_000, 16_000]
    one_step = ["embed", "0", "1", "2", "3", "head"]
    assert [span.label for span in trace.compute] == one_step * 3
    assert all(span.wait is None for span in trace.spans)
    first, second, last = trace.compute[:6], trace.compute[6:12], trace.compute[12:]
    assert (first[0].begin_ns, first[-1].end_ns) == (10 * US, 225 * US)
    assert second[0].begin_ns == 245 * US, "the pause between steps is nobody's"
    assert last[0].begin_ns > trace.load[-1].end_ns
    assert trace.end_ns == last[-1].end_ns
    assert (trace.facts.meeting_block, trace.facts.num_blocks) == (24, 64)


def test_figures() -> None:
    """Steps take 215 us each; the first one and 155 us of the second one lie beside the load."""
    found = figures_of(of_both_ends())
    assert found.load_s == pytest.approx(400e-6)
    assert found.load_bytes == 40_000
    assert found.compute_s == pytest.approx(3 * 215e-6)
    assert found.both_s == pytest.approx((215 + 155) * 1e-6)
    assert found.hidden_share == pytest.approx(370 / 400), "loading took less than computing"
    assert found.num_waits == 0
    faster = figures_of(of_both_ends(both_ends_marks(layer_us=10, num_layers=4)))
    assert faster.compute_s < faster.load_s
    assert faster.hidden_share == pytest.approx(faster.both_s / faster.compute_s)


def test_a_slice_of_one_block_has_one_number() -> None:
    trace = of_both_ends(both_ends_marks((3, 1), (2,)))
    assert [span.label for span in trace.load] == ["3-5", "2"]


def refused(marks: HybridMarks, message: str, **changes: object) -> None:
    facts = both_ends_facts(24, 40, marks.ran, 4, **changes)
    with pytest.raises(InterlaceError, match=message):
        build_hybrid_trace(marks, facts)


def test_what_does_not_come_out_even_is_refused() -> None:
    marks = both_ends_marks()
    refused(dataclasses.replace(marks, slices=()), "0 slices were loaded and 3 steps")
    refused(dataclasses.replace(marks, steps=()), "2 slices were loaded and 0 steps")
    refused(dataclasses.replace(marks, slices=marks.slices[:1]), "do not meet")
    refused(dataclasses.replace(marks, slices=marks.slices[::-1]), "slices go down")
    refused(marks, "do not meet", front_tokens=16 * 24 + 1, loaded_tokens=16 * 40 - 1)
    refused(marks, "blocks 40 to 63 were loaded", loaded_tokens=16 * 41)
    refused(marks, "steps computed 392 tokens", new_tokens=9)


def test_times_out_of_order_are_refused() -> None:
    marks = both_ends_marks()
    refused(dataclasses.replace(marks, steps=marks.steps[::-1]), "overlap or run backwards")
    first, second = marks.slices
    early = LayerLoad(first.load.begin_ns, first.load.begin_ns + 1, 5)
    slices = (first, SliceLoad(second.blocks, early))
    refused(dataclasses.replace(marks, slices=slices), "overlap or run backwards")


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_the_file_loses_nothing_and_shares_are_shares(
    sizes: tuple[int, ...], fronts: tuple[int, ...], num_layers: int, block_us: int, layer_us: int
) -> None:
    marks = both_ends_marks(
        sizes, fronts, num_layers=num_layers, block_us=block_us, layer_us=layer_us
    )
    trace = of_both_ends(marks, num_layers)
    assert from_json(to_json(trace)) == trace
    covered = [n for span in trace.load if span.blocks for n in reversed(range(*span.blocks))]
    assert covered == [*range(sum(sizes) + sum(fronts) - 1, sum(fronts) - 1, -1)]
    figures = figures_of(trace)
    assert 0 <= figures.hidden_share <= 1
    assert figures.both_s <= min(figures.load_s, figures.compute_s) + 1e-12
    assert figures.compute_s <= figures.total_s + 1e-12


# ---------------------------------------------------------------- the tape


def a_noted_run() -> HybridTape:
    """Two layers; an empty step in between and behind."""
    tape = HybridTape(Ticks())
    tape.end()  # of an empty step, before there is anything
    tape.note_load("request-7", [(RECORD, 100, 8)])
    for number in (42, 44):
        tape.begin(RanStep(number, 16))
        tape.reach()
        tape.reach()
        tape.end_forward()
        tape.end()
        tape.end()  # of an empty step
        if number == 42:
            tape.add_slice(NotedSlice([(RECORD + 4, 104, 4)], 3000, 4000, 80, 2))
    return tape


def test_the_tape_of_a_run() -> None:
    marks = a_noted_run().timed_marks()
    assert (marks.request_id, marks.num_blocks, marks.num_loaded_blocks) == ("request-7", 8, 4)
    assert marks.slices == (SliceLoad(Blocks(4, 8), LayerLoad(3000, 4000, 80)),)
    assert [step.step_id for step in marks.ran] == [42, 44]
    first, second = marks.steps
    assert (first.begin_ns, first.end_ns) == (1 * US, 5 * US), "an empty step changes nothing"
    assert [gate.begin_ns for gate in first.gates] == [2 * US, 3 * US]
    assert second.begin_ns == 6 * US


def test_a_tape_is_forgotten() -> None:
    tape = a_noted_run()
    tape.clear()
    assert (tape.ran, tape.slices) == ((), ())
    with pytest.raises(InterlaceError, match="0 loads from the back were seen"):
        tape.timed_marks()


def test_tapes_of_something_else_are_refused() -> None:
    tape = a_noted_run()
    tape.begin(RanStep(45, 3))
    with pytest.raises(InterlaceError, match=r"step 45 was not seen whole \(0 layers\)"):
        tape.timed_marks()
    tape = a_noted_run()
    tape.note_load("request-8", [(RECORD, 100, 8)])
    with pytest.raises(InterlaceError, match="2 loads from the back were seen, not one"):
        tape.timed_marks()


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [(RECORD, 200, 1)],
        [(RECORD, 99, 2)],
        [(RECORD, 100, 1), (RECORD, 102, 1)],
        [(RECORD, 102, 1), (RECORD, 100, 1)],
    ],
)
def test_a_slice_that_is_no_stretch_of_the_prompt_is_refused(
    runs: list[tuple[int, int, int]],
) -> None:
    tape = a_tape(NotedSlice(runs, 0, 0, 1, 1), num_steps=0)
    with pytest.raises(InterlaceError, match="no stretch of the prompt"):
        tape.timed_marks()
