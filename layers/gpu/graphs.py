"""CUDA graphs of whole steps, and of the pieces between attentions, captured once at the start.

A step is padded to the next captured size. Padding tokens have no slot and belong to nobody, so a
padded replay writes and samples nothing more. Hooks never run while a graph is captured.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from interlace.engine.errors import ConfigError
from interlace.engine.ports import Progress
from interlace.layers.gpu.forward import Bounds, Flow, FusedDecoder
from interlace.layers.gpu.inputs import InputBuffer, StepInputs, StepSize
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import LayerHooks

T = TypeVar("T")

MIXED_REQUESTS = 32
"""Most requests of a mixed step that is replayed as one graph."""


class Captured(Protocol):
    """A step that can be replayed."""

    @property
    def runtime_mode(self) -> GraphMode:
        """FULL or PIECEWISE."""
        ...

    @property
    def size(self) -> StepSize:
        """To which inputs have to be padded."""
        ...

    def replay(self, inputs: StepInputs, bounds: Bounds, hooks: LayerHooks | None) -> Tensor:
        """Queue a step whose inputs were uploaded; logits of its requests, [padded, vocabulary].

        They are valid until the next replay. A full graph calls no `hooks`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Full:
    size: StepSize
    graph: torch.cuda.CUDAGraph
    logits: Tensor

    @property
    def runtime_mode(self) -> GraphMode:
        return GraphMode.FULL

    def replay(self, inputs: StepInputs, bounds: Bounds, hooks: LayerHooks | None) -> Tensor:
        self.graph.replay()
        return self.logits


@dataclasses.dataclass(frozen=True, slots=True)
class _Pieces:
    size: StepSize
    forward: FusedDecoder
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    """One before each attention, and one after the last."""
    flows: tuple[Flow, ...]
    """What goes into each layer's attention."""
    attended: Tensor
    """[T, heads * head_dim]: where the piece behind an attention looks for its result."""
    logits: Tensor

    @property
    def runtime_mode(self) -> GraphMode:
        return GraphMode.PIECEWISE

    def replay(self, inputs: StepInputs, bounds: Bounds, hooks: LayerHooks | None) -> Tensor:
        attention = self.forward.attention(inputs, bounds)
        self.graphs[0].replay()
        for layer, flow in enumerate(self.flows):
            if hooks is not None:
                hooks.wait(layer)
            self.forward.attend(attention, layer, flow.qkv, out=self.attended)
            if hooks is not None:
                hooks.save(layer)
            self.graphs[layer + 1].replay()
        return self.logits


class GraphPool:
    """The graphs of one runner. Device thread."""

    def __init__(
        self, forward: FusedDecoder, inputs: InputBuffer, *, nobody: int, max_seq_len: int
    ) -> None:
        """`nobody`: the row of the block tables for padding, and most requests of a step."""
        self._forward = forward
        self._inputs = inputs
        self._nobody = nobody
        self._max_seq_len = max_seq_len
        self._decode: dict[int, Captured] = {}  # number of tokens -> graph
        self._mixed: dict[int, Captured] = {}
        self._pieces: dict[int, Captured] = {}
        self._memory: Any = None  # a pool's handle, shared by all: no two ever run at once

    def capture(
        self,
        mode: GraphMode,
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        progress: Progress,
    ) -> None:
        """Capture what `mode` asks for, for steps of these numbers of tokens; the largest first.

        Raises: `ConfigError` if memory runs out.
        """
        wanted: list[tuple[dict[int, Captured], int, Callable[[int], Captured]]] = []
        decode, mixed = sorted(decode_sizes, reverse=True), sorted(mixed_sizes, reverse=True)
        if mode.full_mixed:
            wanted += [(self._mixed, size, self._mixed_step) for size in mixed]
        if mode.full_decode:
            wanted += [(self._decode, size, self._decode_step) for size in decode]
        if mode.piecewise:
            wanted += [(self._pieces, size, self._step_in_pieces) for size in decode]
        with progress.task("capturing CUDA graphs", len(wanted)) as advance:
            for graphs, size, capture in wanted:
                try:
                    graphs[size] = capture(size)
                except torch.cuda.OutOfMemoryError as error:
                    raise ConfigError(
                        f"no GPU memory is left to capture a graph of {size} tokens: lower"
                        " gpu_memory_utilization, max_num_seqs or num_gpu_blocks_override, or set"
                        " cudagraph_mode='NONE'."
                    ) from error
                advance(1)

    def find(self, size: StepSize, *, is_decode: bool) -> Captured | None:
        """The smallest captured step that can stand for one of this size.

        `is_decode`: each of its requests has one token.
        """
        kinds = (
            (self._decode, self._mixed, self._pieces)
            if is_decode
            else (
                self._mixed,
                self._pieces,
            )
        )
        for graphs in kinds:
            sizes = sorted(graphs)
            place = bisect.bisect_left(sizes, size.num_tokens)
            if place < len(sizes):
                captured = graphs[sizes[place]]
                if size.num_requests <= captured.size.num_requests:
                    return captured
        return None

    def _decode_step(self, num_tokens: int) -> Captured:
        return self._whole_step(StepSize(num_tokens, num_tokens), max_query_len=1)

    def _mixed_step(self, num_tokens: int) -> Captured:
        size = StepSize(num_tokens, min(num_tokens, MIXED_REQUESTS, self._nobody))
        return self._whole_step(size, max_query_len=num_tokens)

    def _whole_step(self, size: StepSize, max_query_len: int) -> Captured:
        inputs = self._inputs.pad(size, self._nobody)
        bounds = Bounds(max_query_len, self._max_seq_len)
        graph, logits = self._graph(
            lambda: self._forward.forward(inputs, bounds, inputs.last_tokens)
        )
        return _Full(size, graph, logits)

    def _step_in_pieces(self, num_tokens: int) -> Captured:
        forward, size = self._forward, StepSize(num_tokens, num_tokens)
        inputs = self._inputs.pad(size, self._nobody)
        graph, flow = self._graph(lambda: forward.first(inputs))
        graphs, flows, x = [graph], [flow], flow.x
        attended = forward.room_for_attended(num_tokens)
        for layer in range(forward.num_layers - 1):
            graph, flow = self._graph(lambda layer=layer: forward.between(layer, x, attended))  # type: ignore[misc]
            graphs.append(graph)
            flows.append(flow)
        graph, logits = self._graph(lambda: forward.last(inputs.last_tokens, x, attended))
        return _Pieces(size, forward, (*graphs, graph), tuple(flows), attended, logits)

    def _graph(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run `work` once, so that everything is compiled and loaded, and then capture it."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = work()
        self._memory = self._memory or graph.pool()
        return graph, result
