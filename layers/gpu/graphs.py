"""CUDA graphs of whole steps, and of the pieces between attentions, captured once at the start.

A step is padded to the next captured size. Padding tokens have no slot and belong to nobody, so a
padded replay writes and samples nothing more. Hooks never run while a graph is captured.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from interlace.engine.errors import ConfigError
from interlace.engine.ports import LateLayerGates, LayerGates, Progress
from interlace.layers.attention import SequenceChunk
from interlace.layers.gpu.forward import Answer, Bounds, Flow, FusedDecoder, Wanted
from interlace.layers.gpu.inputs import InputBuffer, StepInputs, StepSize
from interlace.layers.gpu.room import StepRoom
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import LayerHooks

T = TypeVar("T")

LOWER_WHAT = (
    "lower gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or num_gpu_blocks_override"
)
"""The remedy when memory runs out before the first step."""
MIXED_REQUESTS = 64
"""Most requests of a captured step that is not made of decodes alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphSizes:
    """Numbers of tokens of the steps to capture."""

    decode: Sequence[int] = ()
    """Of steps of decodes, whole or in pieces."""
    mixed: Sequence[int] = ()
    """Of other short steps, whole."""
    chunk: Sequence[int] = ()
    """Of longer ones, in pieces."""


class StepToReplay(NamedTuple):
    """A step whose inputs were uploaded, padded to the captured size."""

    inputs: StepInputs
    bounds: Bounds
    chunks: Sequence[SequenceChunk]
    """What its requests compute."""
    hooks: LayerHooks | None = None
    """For a step in pieces; a full graph calls none."""
    arm_rest: Callable[[], bool] | None = None
    """For a full graph that is to wait for the layer gates, all of which are armed for the step, or
    those of the first layers: called when the first layers are launched, whether all are armed."""
    traced: Sequence[torch.cuda.CUDAGraph] | None = None
    """In place of a full graph, what `GraphPool.capture_traced` made of it."""


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

    @property
    def gathers(self) -> bool:
        """Whether it stands for steps alone whose keys can be gathered."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether late gates need not be armed before its first layers are launched."""
        ...

    def replay(self, step: StepToReplay) -> Answer | None:
        """Queue a step: what comes out for all requests, padded; valid until the next replay. None:
        its gates were not all armed in time, and what is queued of it comes to nothing."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Full:
    size: StepSize
    graph: torch.cuda.CUDAGraph
    gated: Sequence[torch.cuda.CUDAGraph]
    """The same, waiting for the layer gates, in one or two parts; none if there are no gates."""
    answer: Answer
    gathers: bool
    work: Callable[[LayerHooks | None], Answer | None]
    """What was captured, around these hooks."""

    @property
    def runtime_mode(self) -> GraphMode:
        return GraphMode.FULL

    @property
    def is_cut(self) -> bool:
        return len(self.gated) > 1

    def replay(self, step: StepToReplay) -> Answer | None:
        parts = step.traced or ((self.graph,) if step.arm_rest is None else self.gated)
        for number, graph in enumerate(parts):
            if number and step.arm_rest is not None and not step.arm_rest():
                return None
            graph.replay()
        return self.answer


@dataclasses.dataclass(frozen=True, slots=True)
class _Pieces:
    size: StepSize
    forward: FusedDecoder
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    """One before each attention, and one after the last."""
    room: StepRoom
    """Where an attention finds what goes into it, and puts what comes out."""
    answer: Answer

    @property
    def runtime_mode(self) -> GraphMode:
        return GraphMode.PIECEWISE

    @property
    def gathers(self) -> bool:
        return False  # its attentions are planned step by step

    @property
    def is_cut(self) -> bool:
        return False  # its gates are its hooks

    def replay(self, step: StepToReplay) -> Answer:
        self.graphs[0].replay()  # first: the device shall not wait for the host's preparations
        hooks = step.hooks
        attention = self.forward.attention(step.inputs, step.bounds, step.chunks)
        for layer, following in enumerate(self.graphs[1:]):
            if hooks is not None:
                hooks.wait(layer)
            self.forward.attend(attention, layer, self.room.qkv, out=self.room.attended)
            if hooks is not None:
                hooks.save(layer)
            following.replay()
        return self.answer


class _Shelf:
    """Captured steps of one kind, by their number of tokens."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._captured: list[Captured] = []

    def add(self, captured: Captured) -> None:
        """One more, of another number of tokens."""
        num_tokens = captured.size.num_tokens
        place = bisect.bisect_left(self._sizes, num_tokens)
        self._captured.insert(place, captured)
        self._sizes.insert(place, num_tokens)

    def find(self, size: StepSize) -> Captured | None:
        """The smallest one that can stand for a step of this size."""
        place = bisect.bisect_left(self._sizes, size.num_tokens)
        if place == len(self._sizes):
            return None
        captured = self._captured[place]
        return captured if size.num_requests <= captured.size.num_requests else None


class GraphPool:
    """The graphs of one runner. Device thread."""

    def __init__(
        self,
        forward: FusedDecoder,
        inputs: InputBuffer,
        make_room: Callable[[int, int], StepRoom],
        *,
        nobody: int,
        max_seq_len: int,
        gates: LayerGates | None = None,
    ) -> None:
        """`make_room` allocates room for so many tokens and requests. `nobody`: the row of the
        block tables for padding, and most requests of a step. With `gates` each full graph is
        captured a second time, to wait for them."""
        self._forward = forward
        self._inputs = inputs
        self._make_room = make_room
        self._nobody = nobody
        self._max_seq_len = max_seq_len
        self._gates = gates
        self._decode, self._mixed, self._pieces, self._chunks = (_Shelf() for _ in range(4))
        self._room: StepRoom | None = None  # of the largest
        if inputs.is_on_gpu:
            self._memory = torch.cuda.graph_pool_handle()  # for all: no two ever run at once
            # The default stream cannot be captured.
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, mode: GraphMode, sizes: GraphSizes, progress: Progress) -> None:
        """Capture what `mode` asks for, the largest first.

        Raises: `ConfigError` if memory runs out.
        """
        wanted: list[_WantedStep] = []
        if mode.piecewise:
            wanted += _each(sizes.chunk, self._chunks, self._chunk_in_pieces)
            # A full graph of a mixed step takes fewer decodes as well.
            least = MIXED_REQUESTS if mode.full_mixed else 0
            decodes = [size for size in sizes.decode if size > least]
            wanted += _each(decodes, self._pieces, self._decode_in_pieces)
        if mode.full_mixed:
            wanted += _each(sizes.mixed, self._mixed, self._mixed_step)
        if mode.full_decode:
            wanted += _each(sizes.decode, self._decode, self._decode_step)
        if not wanted:
            return
        with progress.task("capturing CUDA graphs", len(wanted)) as advance:
            size = max(step.num_tokens for step in wanted)
            try:
                self._room = self._make_room(size, max((MIXED_REQUESTS, *sizes.decode)))
                for size, shelf, capture_step in wanted:
                    shelf.add(capture_step(size))
                    advance(1)
            except torch.cuda.OutOfMemoryError as error:
                raise ConfigError(
                    f"no GPU memory is left to capture a graph of {size} tokens: {LOWER_WHAT}, or"
                    " set cudagraph_mode='NONE'."
                ) from error

    def close(self) -> None:
        """Let go of all graphs, and of their memory."""
        self._decode, self._mixed, self._pieces, self._chunks = (_Shelf() for _ in range(4))
        self._room = None

    def find(self, size: StepSize, *, is_decode: bool, can_gather: bool = True) -> Captured | None:
        """What can stand for a step of this size.

        `is_decode`: each of its requests has one token. `can_gather`: whether the keys of the
        others can be gathered.
        """
        kinds = (self._mixed, self._pieces, self._chunks)
        for shelf in (self._decode, *kinds) if is_decode else kinds:
            captured = shelf.find(size)
            if captured is not None and (can_gather or not captured.gathers):
                return captured
        return None

    def _decode_step(self, num_tokens: int) -> Captured:
        return self._whole_step(StepSize(num_tokens, num_tokens), max_query_len=1)

    def _mixed_step(self, num_tokens: int) -> Captured:
        return self._whole_step(self._mixed_size(num_tokens), max_query_len=num_tokens)

    def _mixed_size(self, num_tokens: int) -> StepSize:
        return StepSize(num_tokens, min(num_tokens, MIXED_REQUESTS, self._nobody))

    def _whole_step(self, size: StepSize, max_query_len: int) -> Captured:
        inputs = self._inputs.pad(size, self._nobody)
        bounds = Bounds(max_query_len, self._max_seq_len)
        wanted, room = Wanted(inputs.last_tokens, inputs.rows), self._room_of(size)

        gathers = False

        def work(hooks: LayerHooks | None = None) -> Answer | None:
            nonlocal gathers
            attention = self._forward.attention(inputs, bounds)
            gathers = attention.plan.is_gathered
            return self._forward.forward(inputs, attention, wanted, hooks, room=room)

        graph, answer = self._graph(work)
        gated = () if self._gates is None else self._in_parts(work, self._gates)
        assert answer is not None, "a step has requests"
        return _Full(size, graph, gated, answer, gathers, work)

    def capture_traced(
        self,
        captured: Captured,
        around: Callable[[LayerHooks | None], LayerHooks],
        *,
        is_gated: bool,
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        """A full graph once more, gated or not, in as many parts, with `around` its hooks: for who
        takes times. It puts its answer where `captured` does. None of a step in pieces, whose hooks
        are called.

        While steps run, so it waits for those under way first, and other threads may ask CUDA what
        they like meanwhile. Raises: `torch.cuda.OutOfMemoryError`; then all is as it was.
        """
        if not isinstance(captured, _Full):
            return ()
        gates = self._gates if is_gated else None
        return self._in_parts(captured.work, gates, around, error_mode="thread_local")

    def _in_parts(
        self,
        work: Callable[[LayerHooks], object],
        gates: LayerGates | None,
        around: Callable[[LayerHooks | None], LayerHooks] | None = None,
        *,
        error_mode: str = "global",
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Capture `work`, which ran before, so that each layer waits for its gate; in two parts if
        gates are late. `around` its hooks."""
        capture = _Capture(self._memory, error_mode)
        hooks = None if gates is None else _waits(gates, capture)
        if around is not None:
            hooks = around(hooks)
        assert hooks is not None, "there are gates, or somebody takes times"
        self._record(capture, functools.partial(work, hooks))
        return tuple(capture.graphs)

    def _room_of(self, size: StepSize) -> StepRoom:
        assert self._room is not None, "made before the first capture"
        return self._room.part(size)

    def _decode_in_pieces(self, num_tokens: int) -> Captured:
        return self._step_in_pieces(StepSize(num_tokens, num_tokens))

    def _chunk_in_pieces(self, num_tokens: int) -> Captured:
        return self._step_in_pieces(self._mixed_size(num_tokens))

    def _step_in_pieces(self, size: StepSize) -> Captured:
        forward, room = self._forward, self._room_of(size)
        inputs = self._inputs.pad(size, self._nobody)
        graphs = [self._graph(lambda: forward.first(inputs, room=room))[0]]
        for layer in range(forward.num_layers - 1):
            graph, _ = self._graph(_between(forward, layer, room), is_new=layer == 0)
            graphs.append(graph)
        wanted = Wanted(inputs.last_tokens, inputs.rows)
        graph, answer = self._graph(lambda: forward.last(wanted, room.x, room.attended, room=room))
        assert answer is not None, "a step has requests"
        return _Pieces(size, forward, (*graphs, graph), room, answer)

    def _graph(
        self, work: Callable[[], T], *, is_new: bool = True, error_mode: str = "global"
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture `work`. If it `is_new` it runs once before, so that all is compiled and loaded.

        Unlike `torch.cuda.graph` this does not give cached memory back each time.
        """
        if is_new:
            work()
        capture = _Capture(self._memory)
        result = self._record(capture, work)
        return capture.graphs[0], result

    def _record(self, capture: _Capture, work: Callable[[], T]) -> T:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            capture.begin()
            try:
                result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what failed may have ended it
                    capture.end()
                raise
            capture.end()
        return result


class _Capture:
    """What is queued on the current stream, as one graph or as several that follow each other: what
    one leaves in tensors that are still held the next ones find."""

    def __init__(self, memory: Any, error_mode: str = "global") -> None:
        """`memory`: the pool that graphs take theirs from. `error_mode`: torch's, which says who
        else may use CUDA meanwhile."""
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._memory = memory
        self._error_mode = error_mode

    def begin(self) -> None:
        """Of the first graph, or of the next one."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode=self._error_mode)
        self.graphs.append(graph)

    def cut(self) -> None:
        """What comes from now on belongs to the next graph."""
        self.end()
        self.begin()

    def end(self) -> None:
        """Of all."""
        self.graphs[-1].capture_end()


def _waits(gates: LayerGates, capture: _Capture) -> LayerHooks:
    """Hooks that let each layer wait for its gate, and cut the graph where late ones want that."""
    cut = gates.num_first_layers if isinstance(gates, LateLayerGates) else 0

    def wait(layer: int) -> None:
        if layer and layer == cut:
            capture.cut()
        gates.wait_here(layer)

    return LayerHooks(wait, save=lambda layer: None)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Of cycles, in the whole process: graphs of an engine that has ended must not go while one is
    captured, which would fail for it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _WantedStep(NamedTuple):
    """A step to capture."""

    num_tokens: int
    shelf: _Shelf
    capture: Callable[[int], Captured]


def _each(
    sizes: Iterable[int], shelf: _Shelf, capture: Callable[[int], Captured]
) -> list[_WantedStep]:
    """The largest first."""
    return [_WantedStep(size, shelf, capture) for size in sorted(set(sizes), reverse=True)]


def _between(forward: FusedDecoder, layer: int, room: StepRoom) -> Callable[[], Flow]:
    return lambda: forward.between(layer, room.x, room.attended, room=room)
