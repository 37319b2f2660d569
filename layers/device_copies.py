"""Small copies between host and device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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


def to_host(values: Tensor) -> Tensor:
    """Queue the download; what is returned may be read when the device has come so far."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)
