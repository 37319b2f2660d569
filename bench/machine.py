"""Facts about this machine that a figure means nothing without. Starts nothing.

All but `gpu_facts` and `torch_facts` without torch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from interlace.layers.hardware import host
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.nvidia import Gpu, Nvidia, nvidia

Facts = dict[str, str | int | None]
"""By name, ready for JSON; None is not known, or not there."""


def machine_facts() -> Facts:
    """The host, and the packages that a figure depends on."""
    processor = host.processor()
    return {
        "cpu": processor.model,
        "cores": processor.cores,
        "torch_threads": None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _known(host.version_of("torch")),
        "transformers": _known(host.version_of("transformers")),
    }


def torch_facts(device: str) -> Facts:
    """`machine_facts`, with the thread count of the torch in this process; of "cuda" the GPU too.

    On the device thread.
    """
    import torch

    facts = machine_facts() | {"torch_threads": torch.get_num_threads()}
    if device != "cuda":
        return facts
    versions: Facts = {
        "cuda": torch.version.cuda,
        "triton": _known(host.version_of("triton")),
    }
    return facts | versions | gpu_facts(torch.cuda.get_device_name(0))


def gpu_facts(name: str, load: Callable[[], Any] | None = None) -> Facts:
    """The driver, and the clocks in MHz of the first GPU that it calls `name`.

    Clocks are those of now, so ask while the GPU has just worked. `load` returns the module pynvml.
    """
    driver = nvidia(load)
    facts: Facts = {"gpu": name}
    if isinstance(driver, Unknown):
        return facts
    facts["driver"] = _known(driver.driver)
    gpu = _find(driver, name)
    if gpu is None:
        return facts
    return facts | {
        "sm_mhz": _known(gpu.sm_clock.now_mhz),
        "max_sm_mhz": _known(gpu.sm_clock.max_mhz),
        "memory_mhz": _known(gpu.memory_clock.now_mhz),
        "max_memory_mhz": _known(gpu.memory_clock.max_mhz),
    }


def _find(driver: Nvidia, name: str) -> Gpu | None:
    """CUDA and the driver may count GPUs differently."""
    gpus = () if isinstance(driver.gpus, Unknown) else driver.gpus
    return next((gpu for gpu in gpus if gpu.name == name), None)


def _known(fact: str | int | Unknown) -> str | int | None:
    return None if isinstance(fact, Unknown) else fact
