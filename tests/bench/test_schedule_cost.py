"""The scheduler's benchmark runs on the real scheduler; nothing here depends on its speed."""

from __future__ import annotations

from interlace.bench.schedule_cost import ScheduleLoad, measure_schedule


class TickingClock:
    """Moves by a millisecond each time it is read."""

    def __init__(self) -> None:
        self._reads = 0

    def monotonic(self) -> float:
        self._reads += 1
        return self._reads / 1000


def test_measures_decode_steps_of_every_request() -> None:
    load = ScheduleLoad(num_requests=40, prompt_tokens=300, num_steps=20)
    row, check = measure_schedule(load, TickingClock())
    assert row.case == "40 running requests"
    assert len(row.figures["schedule() ms"].samples) == 20
    assert row.figures["update ms"].low > 0.5
    assert check.value == row.figures["schedule() ms"].median
    assert check.at_most == 2.0
