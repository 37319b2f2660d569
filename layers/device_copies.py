"""Small copies to a device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Upload(Protocol):
    """`to_device`, or what goes another way."""

    def __call__(
        self,
        values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        dtype: torch.dtype,
        device: torch.device,
        /,
    ) -> Tensor:
        """Queue the upload of numbers, which may change as soon as it returns."""
        ...


def to_device(
    values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Queue the upload of numbers, which may change as soon as it returns.

    By way of pinned memory, which is kept until it was read.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":  # `pin_memory` would leave what is pinned already where it is
        host = torch.empty_like(host, pin_memory=True).copy_(host)
    return host.to(device, non_blocking=True)
