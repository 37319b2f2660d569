"""Models from disk, package index or hub, brought into the engine's own weight layout.

Names are loaded on first use: what reads a tokenizer alone imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from interlace.layers.checkpoint.description import DEFAULT_MODEL
    from interlace.layers.checkpoint.identity import model_identity
    from interlace.layers.checkpoint.loading import LoadedModel, load_checkpoint

_HERE = "interlace.layers.checkpoint"
_HOMES = {
    "DEFAULT_MODEL": f"{_HERE}.description",
    "LoadedModel": f"{_HERE}.loading",
    "load_checkpoint": f"{_HERE}.loading",
    "model_identity": f"{_HERE}.identity",
}

__all__ = ["DEFAULT_MODEL", "LoadedModel", "load_checkpoint", "model_identity"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
