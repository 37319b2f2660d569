"""Models from disk, package index or hub, brought into the engine's own weight layout."""

from __future__ import annotations

from interlace.layers.checkpoint.default_model import DEFAULT_MODEL
from interlace.layers.checkpoint.identity import model_identity
from interlace.layers.checkpoint.loading import LoadedModel, load_checkpoint

__all__ = ["DEFAULT_MODEL", "LoadedModel", "load_checkpoint", "model_identity"]
