"""Which ids are picked: as many as asked for, in few runs, and what is left stays whole."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from interlace.engine.block_runs import in_few_runs, runs_of

ids = st.lists(st.integers(1, 120), unique=True, min_size=1)


def test_the_runs_of_ids_in_any_order() -> None:
    assert runs_of([]) == []
    assert runs_of([7]) == [range(7, 8)]
    assert runs_of([5, 1, 9, 2, 4, 3]) == [range(1, 6), range(9, 10)]


@given(ids)
def test_runs_are_maximal_and_hold_each_id_once(some: list[int]) -> None:
    runs = runs_of(some)
    assert [i for run in runs for i in run] == sorted(some)
    assert all(one.stop < other.start for one, other in pairwise(runs))


@given(ids, st.data())
def test_as_many_as_asked_for_in_as_few_runs_as_can_be(
    some: list[int], data: st.DataObject
) -> None:
    num_ids = data.draw(st.integers(1, len(some)))
    picked = in_few_runs(some, num_ids)
    assert len(picked) == num_ids
    assert picked == sorted(set(picked) & set(some))
    fewest, covered = 0, 0
    for length in sorted((len(run) for run in runs_of(some)), reverse=True):
        if covered >= num_ids:
            break
        fewest, covered = fewest + 1, covered + length
    assert len(runs_of(picked)) == fewest


def test_the_rest_comes_from_the_shortest_run_that_has_all_of_it() -> None:
    long, middle, short = range(10, 20), range(30, 36), range(40, 43)
    picked = in_few_runs([*short, *middle, *long], 12)
    assert picked == [*long, 40, 41]


def test_of_a_run_the_older_end_goes() -> None:
    assert in_few_runs([1, 2, 3, 4, 5], 2) == [1, 2]
    assert in_few_runs([5, 4, 3, 2, 1], 2) == [4, 5]
