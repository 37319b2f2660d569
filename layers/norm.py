"""RMS normalisation."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale `x` [..., n] to a root mean square of 1 over its last axis, then by `weight`.

    The statistics are float32 whatever the dtype, and the result is cast back before the
    multiplication: reference implementations round in this order. `weight` broadcasts.
    """
    wide = x.to(torch.float32)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)
