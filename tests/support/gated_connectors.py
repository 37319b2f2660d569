"""Connectors whose loads within a step work in captured graphs, by gates; some do it wrong.

Made of `ScriptedConnector`, for pages on a GPU: what is to be loaded is brought to the device
first, and then copied layer by layer on a lane of its own, late, so that who does not wait reads
too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from graph_connectors import Unsaid

from interlace.engine.ports import LayerGates
from interlace.layers.cuda_gates import CudaGate, GraphGate
from interlace.layers.cuda_lanes import CudaLane, CudaLanes
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.graph_mode import GraphMode

DELAY_CYCLES = 2_000_000
"""Before each layer's copy: about a millisecond."""


class Gates:
    """A gate for each layer."""

    def __init__(self, gates: Sequence[GraphGate]) -> None:
        self.gates = list(gates)

    def wait_here(self, layer: int) -> None:
        self.gates[layer].wait_here()

    def are_armed(self, step_id: int) -> bool:
        return all(gate.armed_for == step_id for gate in self.gates)


class Gated(Unsaid):
    """Loads layer by layer behind gates, in every mode of graphs; saves when a step is queued."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        lanes = CudaLanes(CudaStreams(torch.device("cuda")))
        self.compute = lanes.compute
        self.lane: CudaLane = lanes.lane("load")
        self.gates = Gates([lanes.graph_gate() for _ in kv_caches])
        self.loaded: dict[str, CudaGate] = {}
        self.modes: list[GraphMode] = []
        """Of steps that load."""
        STARTED.append(self)

    def get_layer_gates(self) -> LayerGates | None:
        return self.gates

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.loaded = {}
        worker = self._on_worker
        if not worker._sync:
            return
        self.modes.append(forward_context.cudagraph_runtime_mode)
        self.lane.wait(self.compute.record())  # the pages are nobody's by then
        for layer, name in enumerate(worker._pages):
            self.load(layer, name)

    def load(self, layer: int, name: str) -> None:
        """Queue the copies of one layer, and arm its gate."""
        self.loaded[name] = self.lane.submit(self.copies(name))
        self.arm(layer)

    def arm(self, layer: int) -> None:
        assert self.lane.arm(self.gates.gates[layer], self._step.step_id)

    def copies(self, name: str) -> Any:
        worker, index = self._on_worker, self._on_worker._index[name]
        pages = worker._pages[name]
        blocks = [block for job in worker._sync for block in job.blocks if block.pages]
        staged = [block.pages[index].to("cuda") for block in blocks if block.pages]

        def work() -> None:
            torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
            for block, page in zip(blocks, staged, strict=True):
                pages[block.block_id].copy_(page, non_blocking=True)

        return work

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self.loaded:
            self.compute.wait(self.loaded[layer_name])

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for layer_name, pages in self._on_worker._pages.items():
            self._on_worker.copy_layer(self._step, layer_name, pages)


STARTED: list[Gated] = []
"""Worker sides that were made, the newest last; a test empties it."""


class RestLate(Gated):
    """Loads the first layer before its steps are launched, and the others when it is told to."""

    tells_truth = True

    def get_layer_gates(self) -> LayerGates | None:
        return LateGates(self.gates.gates, self)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.waiting: list[tuple[int, str]] = []
        super().start_load_kv(forward_context, **kwargs)

    def load(self, layer: int, name: str) -> None:
        if layer:
            self.waiting.append((layer, name))
        else:
            super().load(layer, name)

    def arm_rest(self) -> None:
        """For its gates."""
        waiting, self.waiting = self.waiting, []
        for layer, name in waiting:
            super().load(layer, name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._on_worker._sync:
            self.arm_rest()
        super().wait_for_layer_load(layer_name)


class LateGates(Gates):
    """`LateLayerGates`, of which the first layer's is armed first."""

    num_first_layers = 1

    def __init__(self, gates: Sequence[GraphGate], side: RestLate) -> None:
        super().__init__(gates)
        self.side = side

    def are_armed(self, step_id: int) -> bool:
        return super().are_armed(step_id) or not self.side.tells_truth

    def are_first_armed(self, step_id: int) -> bool:
        return self.gates[0].armed_for == step_id

    def arm_rest(self, step_id: int) -> None:
        assert step_id == self.side._step.step_id
        self.side.arm_rest()


class RestNeverArmed(RestLate):
    """Does not arm the rest, and says so: such steps run once more, with their layer hooks."""

    def arm_rest(self) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        waiting, self.waiting = self.waiting, []
        for layer, name in waiting:
            Gated.load(self, layer, name)
        Gated.wait_for_layer_load(self, layer_name)


class RestArmedBehindTheLaunch(RestNeverArmed):
    """Says that the rest is armed, and arms it when the step has been launched."""

    tells_truth = False

    def wait_for_save(self) -> None:
        waiting, self.waiting = getattr(self, "waiting", []), []
        for layer, name in waiting:
            Gated.load(self, layer, name)
        super().wait_for_save()


class AsksFirst(Gated):
    """Reads the step's attention metadata before it loads, so that the step is prepared then."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        by_layer = forward_context.attn_metadata
        if by_layer is not None:
            metadata = next(iter(by_layer.values()))
            slots = metadata.slot_mapping.tolist()
            assert len(slots) == metadata.num_actual_tokens
            assert len(set(slots)) == len(slots)
            assert min(slots) >= 0
            assert metadata.seq_lens.tolist()[0] > 0
        super().start_load_kv(forward_context, **kwargs)


class NotAllArmed(Gated):
    """Leaves one gate out, and says so: such steps run with their layer hooks."""

    def arm(self, layer: int) -> None:
        if layer:
            super().arm(layer)


class OneGateLeftOut(NotAllArmed):
    """Leaves one gate out, and says that all are armed."""

    def get_layer_gates(self) -> LayerGates | None:
        self.gates.are_armed = lambda step_id: True  # type: ignore[method-assign]
        return self.gates


class OpenedEarly(Gated):
    """Arms each gate before the copies that it stands for."""

    def load(self, layer: int, name: str) -> None:
        work = self.copies(name)
        self.arm(layer)
        self.loaded[name] = self.lane.submit(work)


class ArmedBehindTheLaunch(OneGateLeftOut):
    """Arms its gates when the step has been launched."""

    def arm(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        for layer in range(len(self.gates.gates)):
            Gated.arm(self, layer)
        super().wait_for_save()


BROKEN = (OneGateLeftOut, OpenedEarly, ArmedBehindTheLaunch, RestArmedBehindTheLaunch)
