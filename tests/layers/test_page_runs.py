"""Runs, block by block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from interlace.layers.page_runs import expand_runs


@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 9)), min_size=1
    )
)
def test_each_block_has_its_record(runs: list[tuple[int, int, int]]) -> None:
    wanted = [[record + i, block + i] for record, block, count in runs for i in range(count)]
    assert expand_runs(runs).tolist() == wanted
