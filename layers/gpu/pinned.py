"""Pinned buffers that are filled in turns, and read by the device. Device thread."""

from __future__ import annotations

import torch


class PinnedTurns:
    """A buffer is written to again when the device has read it, for which the host waits if it
    must: with more of them than are under way it does not."""

    def __init__(self, num_bytes: int, num_buffers: int, device: torch.device) -> None:
        """Of so many bytes each, zeros; pinned if `device` is a GPU."""
        self.is_on_gpu = device.type == "cuda"
        self.buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.is_on_gpu)
            for _ in range(num_buffers)
        ]
        """uint8 [num_bytes] each."""
        self._were_read: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

    def take(self) -> int:
        """The place of the next buffer, which may be written to now."""
        self._turn = (self._turn + 1) % len(self.buffers)
        was_read = self._were_read[self._turn]
        if was_read is not None:
            was_read.synchronize()
        return self._turn

    def note_read(self) -> None:
        """All that reads the buffer taken last is queued on the current stream."""
        if self.is_on_gpu:
            event = self._were_read[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._were_read[self._turn] = event
