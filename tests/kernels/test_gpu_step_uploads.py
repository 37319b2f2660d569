"""Small uploads in turns, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from interlace.layers.gpu import uploads as uploads_module
from interlace.layers.gpu.pinned import PinnedTurns
from interlace.layers.gpu.uploads import BUFFER_BYTES, NUM_BUFFERS, Uploads
from interlace.layers.kernels.toolchain import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([3, 1, 2], torch.int64),
        ((5,), torch.int32),
        (np.arange(12, dtype=np.float64).reshape(3, 4), torch.float64),
        (range(BUFFER_BYTES // 8), torch.int64),
    ],
)
def test_what_is_uploaded_is_there(values: Sequence[float], dtype: torch.dtype) -> None:
    found = Uploads(CPU)(values, dtype, CPU)
    assert torch.equal(found, torch.as_tensor(values, dtype=dtype))


@pytest.mark.parametrize(
    ("values", "dtype"), [([], torch.int64), (range(BUFFER_BYTES), torch.int64), ([1], torch.int8)]
)
def test_what_does_not_fit_is_copied(
    values: Sequence[float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(uploads_module, "read_words")
    found = Uploads(CPU)(values, dtype, CPU)
    assert torch.equal(found, torch.as_tensor(values, dtype=dtype))


def test_buffers_are_taken_in_turns_and_results_are_their_own() -> None:
    uploads = Uploads(CPU)
    found = [uploads([i, -i], torch.int64, CPU) for i in range(3 * NUM_BUFFERS)]
    assert [one.tolist() for one in found] == [[i, -i] for i in range(3 * NUM_BUFFERS)]


def test_the_host_waits_for_a_buffer_that_was_not_read_yet() -> None:
    class Event:
        num_waits = 0

        def synchronize(self) -> None:
            self.num_waits += 1

    uploads, event = Uploads(CPU), Event()
    uploads._pinned._were_read[2] = event  # type: ignore[call-overload]
    for number in range(NUM_BUFFERS + 2):
        uploads([number], torch.int64, CPU)
        assert event.num_waits == (number >= 1) + (number >= NUM_BUFFERS + 1)


def test_buffers_are_taken_in_turns_and_marked_when_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks: list[tuple[str, int]] = []

    class Event:
        def __init__(self) -> None:
            self.number = sum(what == "made" for what, _ in marks)
            marks.append(("made", self.number))

        def record(self) -> None:
            marks.append(("record", self.number))

        def synchronize(self) -> None:
            marks.append(("wait", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    turns = PinnedTurns(8, 2, CPU)
    turns.is_on_gpu = True
    taken = []
    for _ in range(4):
        taken.append(turns.take())
        turns.note_read()
    assert taken == [1, 0, 1, 0]
    assert marks == [
        ("made", 0), ("record", 0), ("made", 1), ("record", 1),
        ("wait", 0), ("record", 0), ("wait", 1), ("record", 1),
    ]  # fmt: skip
