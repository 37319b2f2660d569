"""From tensors as a checkpoint names them to the engine's own fused layout.

One weight at a time, so that the extra memory is that of the parts of one weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture
from interlace.layers.weights import weight_shapes

Parts = Mapping[str, tuple[str, ...]]
"""Name of a weight of ours -> tensors of the checkpoint whose rows it stacks."""


class TensorSource(Protocol):
    """Named tensors of one checkpoint. Both methods raise `ModelError` for an unknown name."""

    @property
    def where(self) -> str:
        """The checkpoint, for messages."""
        ...

    @property
    def names(self) -> Collection[str]:
        """All tensors that are there."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor that the caller drops soon, together with the memory behind it."""
        ...

    def keep(self, name: str) -> torch.Tensor:
        """The same tensor to be used in place for as long as the model lives."""
        ...


def assembled(
    architecture: Architecture,
    parts: Parts,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) in the order of `weight_shapes`; used in place where nothing changes.

    Raises: `ModelError` if a tensor is missing, of the wrong shape or type, or left over.
    """
    _refuse_leftovers(parts, source)
    for name, shape in weight_shapes(architecture).items():
        tensors = [_float_tensor(source, part) for part in parts[name]]
        _check_shape(source, parts[name], tensors, shape)
        if len(tensors) > 1:
            yield name, torch.cat([tensor.to(dtype) for tensor in tensors]).to(device)
        elif tensors[0].dtype == dtype and device.type == "cpu":
            tensors.clear()
            yield name, source.keep(parts[name][0])
        else:
            yield name, tensors[0].to(device=device, dtype=dtype)


def assemble(
    architecture: Architecture,
    parts: Parts,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """All weights of `assembled` at once, with progress in bytes."""
    weights: dict[str, torch.Tensor] = {}
    with progress.task("Loading weights", total_bytes(architecture, dtype)) as advance:
        for name, weight in assembled(architecture, parts, source, dtype=dtype, device=device):
            weights[name] = weight
            advance(weight.nbytes)
    return weights


def total_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """Size of all weights of a model."""
    return sum(map(math.prod, weight_shapes(architecture).values())) * dtype.itemsize


def _float_tensor(source: TensorSource, name: str) -> torch.Tensor:
    tensor = source.read(name)
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ModelError(f"{source.where}: tensor {name} has the unsupported type {tensor.dtype}.")
    return tensor


def _check_shape(
    source: TensorSource,
    names: tuple[str, ...],
    tensors: list[torch.Tensor],
    shape: tuple[int, ...],
) -> None:
    """The parts' rows must add up to the weight's, and all else must be equal."""
    rows = sum(tensor.shape[0] for tensor in tensors if tensor.dim())
    tails = {tuple(tensor.shape[1:]) if tensor.dim() else None for tensor in tensors}
    if rows != shape[0] or tails != {shape[1:]}:
        found = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ModelError(
            f"{source.where}: {' + '.join(names)} should make {list(shape)} by the model's "
            f"configuration, but the file has {found}."
        )


def _refuse_leftovers(parts: Parts, source: TensorSource) -> None:
    """A tensor that nobody reads means a model that would answer wrongly."""
    used = {name for names in parts.values() for name in names}
    leftover = sorted(set(source.names) - used)
    if leftover:
        raise ModelError(
            f"{source.where}: {len(leftover)} tensors do not belong to a model of this "
            f"configuration, such as {leftover[0]}."
        )
