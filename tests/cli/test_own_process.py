"""What a command does with its process."""

from __future__ import annotations

import gc

from interlace.cli.own_process import frozen_heap


def test_what_is_there_is_left_alone_meanwhile() -> None:
    already, thresholds = gc.get_freeze_count(), gc.get_threshold()
    with frozen_heap():
        assert gc.get_freeze_count() > already + 1000
        assert gc.get_threshold()[0] > thresholds[0], "and what is new is looked at less often"
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1, "what comes later is collected"
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
