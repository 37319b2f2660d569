"""A step's smaller uploads, by a kernel: a copy would wait for loads that are on their way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from interlace.layers.device_copies import to_device
from interlace.layers.gpu.pinned import PinnedTurns
from interlace.layers.kernels.host_copies import read_words

BUFFER_BYTES = 32 << 10
NUM_BUFFERS = 16
"""Several for each of the steps that may be in flight: then the host does not wait for one."""
WORD_BYTES = 4


class Uploads:
    """`to_device` by way of pinned buffers. Device thread."""

    def __init__(self, device: torch.device) -> None:
        """`device` is that of all uploads."""
        self._device = device
        self._pinned = PinnedTurns(BUFFER_BYTES, NUM_BUFFERS, device)

    def __call__(
        self,
        values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """See `to_device`; a large upload, or one of an odd size, is a copy after all."""
        source = torch.as_tensor(values, dtype=dtype)
        fits = 0 < source.nbytes <= BUFFER_BYTES and source.nbytes % WORD_BYTES == 0
        if device != self._device or not fits:
            return to_device(values, dtype, device)
        host = self._pinned.buffers[self._pinned.take()][: source.nbytes]
        host.view(dtype).view(source.shape).copy_(source)
        target = torch.empty(source.shape, dtype=dtype, device=device)
        words = target.view(-1).view(torch.int32)
        read_words(host.view(torch.int32), words, len(words))
        self._pinned.note_read()
        return target
