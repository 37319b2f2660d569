"""What a command does with its process."""

from __future__ import annotations

import gc

from interlace.cli.own_process import frozen_heap


def test_what_is_there_is_left_alone_meanwhile() -> None:
    already = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > already + 1000
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1, "what comes later is collected"
    assert gc.get_freeze_count() == 0
