"""Room for the hidden states of chosen layers during one step. Device thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interlace.layers.decoder import Decoder


class StateRoom:
    """Makes room for the states of the layers in `EngineConfig.hidden_state_layer_ids`."""

    def __init__(self, decoder: Decoder, layer_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._layer_ids = tuple(layer_ids)

    def make(self, num_tokens: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Where the states of a step go, [T, layers, hidden], and each layer's part of it: what
        `Decoder.forward` fills. Nothing if no layer is chosen."""
        if not self._layer_ids:
            return None, {}
        decoder = self._decoder
        shape = (num_tokens, len(self._layer_ids), decoder.architecture.hidden_size)
        kept = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        return kept, dict(zip(self._layer_ids, kept.unbind(1), strict=True))
