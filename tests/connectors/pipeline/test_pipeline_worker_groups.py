"""Which layers share a gate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.connectors.pipeline.layer_groups import LayerGroups


@given(num_layers=st.integers(1, 100), size=st.integers(1, 110))
def test_each_layer_is_in_one_group_and_those_at_the_ends_are_alone(
    num_layers: int, size: int
) -> None:
    groups = LayerGroups(num_layers, size)
    assert [layer for layers in groups.ranges for layer in layers] == [*range(num_layers)]
    assert all(1 <= len(layers) <= size for layers in groups.ranges)
    assert len(groups.ranges[0]) == len(groups.ranges[-1]) == 1
    assert groups.num_layers == num_layers
    for layer, group in enumerate(groups.group_of):
        assert layer in groups.ranges[group]
    # All else is where layers are counted off.
    assert all(layers.start % size == 0 or layers.start in (1, num_layers - 1)
               for layers in groups.ranges)  # fmt: skip


@pytest.mark.parametrize(
    ("num_layers", "size", "lengths"),
    [
        (1, 2, [1]),
        (2, 2, [1, 1]),
        (3, 9, [1, 1, 1]),
        (8, 2, [1, 1, 2, 2, 1, 1]),
        (7, 3, [1, 2, 3, 1]),
    ],
)
def test_some_groups(num_layers: int, size: int, lengths: list[int]) -> None:
    assert [len(layers) for layers in LayerGroups(num_layers, size).ranges] == lengths
