"""Whether a model's weights fit, and the one error that says that they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.assemble import total_bytes
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.host import memory


def refuse_too_large(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are larger than all memory that is free on `device`.

    For weights that are made: on Linux memory that is only written to later seems to be there,
    and the process that writes is killed. Raises: `ModelError`.
    """
    free = _free_bytes(device)
    if free is not None and total_bytes(architecture, dtype) > free:
        raise _too_large(architecture, dtype, device, free)


@contextlib.contextmanager
def telling_what_is_needed(
    architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Turn running out of memory in the block into the `ModelError` that says what is needed."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _too_large(architecture, dtype, device, None) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise _too_large(architecture, dtype, device, None) from error


def _free_bytes(device: torch.device) -> int | None:
    """None where it is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps for itself and does not use is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    found = memory()
    if device.type != "cpu" or isinstance(found, Unknown):
        return None
    return found.available_bytes


def _too_large(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, free: int | None
) -> ModelError:
    needed = total_bytes(architecture, dtype) / 2**30
    found = "" if free is None else f" and {free / 2**30:.1f} GiB are free"
    smaller = "a smaller dtype such as 'bfloat16', " if dtype.itemsize > 2 else ""
    return ModelError(
        f"the weights of this {architecture.name} take {needed:.1f} GiB on {device} in "
        f"{str(dtype).removeprefix('torch.')}{found}: choose {smaller}a smaller model or another "
        "device, or end what else uses that memory."
    )
