"""Connectors that differ in what they do about CUDA graphs, and some that do not keep the protocol.

All are made of `ScriptedConnector`, whose pages may be on a CPU or a GPU.
"""

from __future__ import annotations

from typing import Any

from interlace.connectors.conformance import ScriptedConnector


class Unsaid(ScriptedConnector):
    """Loads and saves in the hooks of layers, and does not say that these have to run."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False


class AtOnce(Unsaid):
    """Loads all layers before a step, and saves them behind it: no hooks of layers have to run."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for layer_name in self._on_worker._pages:
            self._on_worker.load_layer(layer_name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for layer_name, pages in self._on_worker._pages.items():
            self._on_worker.copy_layer(self._step, layer_name, pages)


class LastLayerLate(ScriptedConnector):
    """Leaves the last layer of a load out."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name != list(self._on_worker._pages)[-1]:
            super().wait_for_layer_load(layer_name)


class WrongLayer(ScriptedConnector):
    """Saves the first layer's KV in place of each one's."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        pages = self._on_worker._pages
        self._on_worker.copy_layer(self._step, layer_name, next(iter(pages.values())))


class Scribbler(ScriptedConnector):
    """Writes to a block that is none of its loads'."""

    def wait_for_save(self) -> None:
        first = next(iter(self._on_worker._pages.values()))
        first[len(first) - 1] = 1.5


class TooEarly(ScriptedConnector):
    """Saves a layer before its KV is computed."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        self._on_worker.copy_layer(self._step, layer_name, self._on_worker._pages[layer_name])

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass


BROKEN = {
    LastLayerLate: "layer-loads-complete",
    WrongLayer: "loaded-kv-right",
    Scribbler: "loads-write-only-their-blocks",
    TooEarly: "saves-visible-when-whole",
}
"""Each with the property that it lacks."""
