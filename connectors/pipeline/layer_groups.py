"""Which layers of a load share a gate."""

from __future__ import annotations

import itertools


class LayerGroups:
    """Groups of neighbouring layers. The first layer and the last one have gates of their own: with
    the one a step begins to compute, and behind the other it computes alone."""

    def __init__(self, num_layers: int, size: int) -> None:
        """Groups of `size` layers, but for the two that are cut; both numbers are at least 1."""
        cuts = {0, 1, num_layers - 1, num_layers, *range(0, num_layers, size)}
        self.ranges = tuple(range(a, b) for a, b in itertools.pairwise(sorted(cuts)))
        """The layers of each group."""
        self.group_of = tuple(group for group, layers in enumerate(self.ranges) for _ in layers)
        """Of each layer."""

    def first_within(self, num_layers: int) -> int:
        """How many of the first groups make up so many layers, or a little more."""
        return self.group_of[num_layers - 1] + 1

    def last_beside(self, layer: int) -> int:
        """The last layer that has come when the gate of this one opens."""
        return self.ranges[self.group_of[layer]][-1]

    @property
    def num_layers(self) -> int:
        """Layers in all groups."""
        return len(self.group_of)
