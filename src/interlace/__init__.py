"""Interlace: a compact asyncio-native LLM inference engine.

The front door, and the only place that wires engine, layers and connectors together. Names are
loaded on first use (PEP 562), so `import interlace.engine` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig, KVTransferConfig
    from interlace.engine.errors import (
        ConfigError,
        EngineBusyError,
        EngineDeadError,
        InterlaceError,
        ModelError,
        PromptError,
        RequestError,
        SamplingError,
    )
    from interlace.engine.outputs import Completion, RequestOutput, TokenLogprobs, Usage
    from interlace.engine.sampling_params import SamplingParams
    from interlace.front_door import AsyncEngine

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "interlace.front_door",
    "EngineConfig": "interlace.engine.config",
    "KVTransferConfig": "interlace.engine.config",
    "SamplingParams": "interlace.engine.sampling_params",
    **dict.fromkeys(
        ("Completion", "RequestOutput", "TokenLogprobs", "Usage"), "interlace.engine.outputs"
    ),
    **dict.fromkeys(
        (
            "ConfigError",
            "EngineBusyError",
            "EngineDeadError",
            "InterlaceError",
            "ModelError",
            "PromptError",
            "RequestError",
            "SamplingError",
        ),
        "interlace.engine.errors",
    ),
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "ConfigError",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "InterlaceError",
    "KVTransferConfig",
    "ModelError",
    "PromptError",
    "RequestError",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
    "__version__",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
