"""The driver's copies, done by the host."""

from __future__ import annotations

import ctypes

from interlace.layers.cuda_copies import Addresses


class HostBatch:
    """A `MemcpyBatch` that copies at once, between any memory of the host; counts the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def copy(self, targets: Addresses, sources: Addresses, num_bytes: int) -> None:
        self.num_calls += 1
        assert len(targets) == len(sources) > 0
        assert targets.flags.c_contiguous
        assert sources.flags.c_contiguous
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)


class HostMemcpy:
    """A `Memcpy2D` that copies at once, between any memory of the host; counts the copies."""

    def __init__(self) -> None:
        self.num_copies = 0

    def current_stream(self) -> int:
        return 0

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        self.num_copies += 1
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
