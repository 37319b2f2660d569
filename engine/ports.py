"""What the engine asks of the world outside it, as Protocols: a step runner, both sides of a KV
connector, lanes and gates, a clock, progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
)
from interlace.engine.kv_connector_stats import KVConnectorPromMetrics, KVConnectorStats
from interlace.engine.kv_events import KVCacheEvent, KVConnectorKVEvents
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, Timings, TransferTiming
from interlace.engine.transfer_picture import ConnectorPicture

if TYPE_CHECKING:
    from interlace.engine.block_pool import BlockPool
    from interlace.engine.config import EngineConfig
    from interlace.engine.request import Request


PendingStep: TypeAlias = Callable[[], ModelRunnerOutput]
"""A step that was launched: waits for its end and returns its output. Device thread; called once,
in the order of the launches."""


class StepRunner(Protocol):
    """Executes steps in the order in which they were scheduled. Lives on the device thread."""

    @property
    def works_ahead(self) -> bool:
        """Whether the device goes on working when `launch` has returned, so that a further step
        should be launched before this one is waited for. Any thread."""
        ...

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step: queue all of its work. An exception is fatal for the engine.

        Where the device works by itself, this does not wait for it: the next step may be launched
        before the result of this one is asked for.
        """
        ...

    def advance_transfers(self) -> bool:
        """While nothing computes: move on what connectors have under way; whether it is worth
        asking again soon. If not they may have news, which an empty step brings, or nobody can tell
        more before it. Raises: `ConnectorError`.
        """
        ...

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """Rank -> what that worker's side of the connector has to say. Once, before the first step.

        Raises: `ConnectorError`.
        """
        ...

    def set_finished_count(self, count: int | None) -> None:
        """How many workers report each finished id; None means all. Once, before the first step.

        Raises: `ConnectorError` if there are less.
        """
        ...

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """What the worker side of the connector, the first of several, shows; see
        `KVConnectorBase_V1`. The event loop's thread, at any time; never waits or raises."""
        ...

    def begin_recording(self, clock: Clock) -> RecordingFacts:
        """Time every step that is launched from now on, and what connectors copy beside: outputs
        have `timings` of what has ended by then. Times are told on `clock`, which any thread may
        read. The device waits for none of it. Between steps; not while it records already.

        A runner that cannot answers `RecordingFacts()`. Raises: `ConnectorError`; then nothing is
        recorded.
        """
        ...

    def end_recording(self) -> Timings:
        """Time nothing more. What is left to tell: steps under way are waited for, and pieces of
        transfers that have not ended count as dropped. Without `begin_recording` nothing happens.

        Raises: `ConnectorError`; nothing is recorded any more then either.
        """
        ...

    def close(self) -> None:
        """Release what the runner holds; called once, after the last step."""
        ...


class Clock(Protocol):
    """Time, injected so that tests can turn the hands."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class Progress(Protocol):
    """Shows how far long work is: downloads, conversions. Called from any one thread."""

    def task(
        self, description: str, total: float | None
    ) -> AbstractContextManager[Callable[[float], None]]:
        """Show one task until the context ends; the callable inside adds to what is done.

        `total` is in whatever unit the callable is called with; None if it is not known. Either
        may raise to end the work; long work calls often, with 0 if there is no news.
        """
        ...


class Gate(Protocol):
    """What has to happen first. Closed, then open or failed; it always ends. Any thread."""

    def query(self) -> bool:
        """Whether it is no longer closed. Never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is no longer closed; False if that takes longer than `timeout_s`."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is closed, and if it opened."""
        ...


class Lane(Protocol):
    """Work that runs in its order, beside everything else: a stream, or its stand-in on a CPU.

    Work must not wait for other work of the same lane. What it raises fails its gates, and the lane
    goes on.
    """

    @property
    def name(self) -> str:
        """For people: "load", "store"."""
        ...

    def submit(self, work: Callable[[], None]) -> Gate:
        """Queue `work`; the gate opens when it has ended, and fails with what it raises.

        Raises: `LaneFullError`, and queues nothing, if `max_pending` have not ended yet;
        `LaneClosedError` after `close`.
        """
        ...

    def record(self) -> Gate:
        """A gate that opens when all that was queued and waited for so far has ended.

        It fails with the first exception among the work queued since the last `record`.
        """
        ...

    def wait(self, gate: Gate) -> None:
        """What is queued from now on begins when `gate`, of any lane, is no longer closed."""
        ...

    def query(self) -> bool:
        """Whether all work has ended. Never waits."""
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more work, and wait for what is queued; False if it takes longer. Idempotent."""
        ...


class Lanes(Protocol):
    """Where lanes come from: threads, CUDA streams, or one thread that a seed drives."""

    def lane(self, name: str, *, max_pending: int = 1024) -> Lane:
        """Make a lane. Lanes of one name are different lanes."""
        ...


class LayerGates(Protocol):
    """What holds each layer back until its KV is there, in steps that are one captured graph.

    Device thread. A replay passes on whatever was recorded last when it was launched: so the
    connector arms all gates for a step before the runner launches it, and the runner refuses to
    launch a step whose gates are armed for another one.
    """

    def wait_here(self, layer: int) -> None:
        """While a graph is captured: let its replays wait here for the KV of layer `layer`, counted
        from 0. Called for each layer in order; layers may share a gate."""
        ...

    def are_armed(self, step_id: int) -> bool:
        """Whether every gate will open when what step `step_id` loads is in the pages."""
        ...


@runtime_checkable
class LateLayerGates(LayerGates, Protocol):
    """Gates of which those of the first layers alone need be armed for a step to begin.

    Queueing a long load takes the host as long as the device takes for a layer or two. So the
    runner captures such a step as two graphs, cut before layer `num_first_layers`. It launches the
    first one, has the rest armed while that runs, and launches the second one if all are armed by
    then; if not, the step runs once more, from its begin, with its layer hooks. Device thread.
    """

    @property
    def num_first_layers(self) -> int:
        """Layers before the cut. Never changes. Graphs of models with no more layers are whole."""
        ...

    def are_first_armed(self, step_id: int) -> bool:
        """As `are_armed`, of the gates of the first layers."""
        ...

    def arm_rest(self, step_id: int) -> None:
        """Arm the gates of the other layers. What it raises is a failed load."""
        ...


class TransferRecorder(Protocol):
    """Takes down when pieces of transfers began and ended: see
    `KVConnectorBase_V1.record_transfers`. It keeps what nobody has fetched up to a bound."""

    def mark(self) -> Any:
        """This moment: when all that the current stream has been given by now has ended, where the
        device works by itself, and else now. Device thread, or any thread on a CPU."""
        ...

    def add(self, begin: Any, end: Any, tell: Callable[[float, float], TransferTiming]) -> None:
        """A piece lies between two marks. `tell` is called with their times, in seconds on the
        engine's clock, when both have passed: on the device thread, once or never. Any thread."""
        ...


class SchedulerConnector(Protocol):
    """The scheduler side of a KV connector: `KVConnectorBase_V1` in the role SCHEDULER.

    Every call comes from the event loop's thread and must return at once, without file I/O. See
    the base class for each method's contract.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the connector can bring beyond the computed ones (None: ask again), and whether
        asynchronously."""
        ...

    def get_compute_end(self, request: Request) -> int | None:
        """Tokens that the engine computes itself while those behind are loaded; None: none."""
        ...

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has its blocks; the connector is to fill `num_external_tokens` of them."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker side needs for this step."""
        ...

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the worker side reported with a step."""
        ...

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: whether its blocks must stay, and parameters for its caller."""
        ...

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The engine's block pool. Once, before all other hooks."""
        ...

    def get_finished_count(self) -> int | None:
        """How many workers report each id; None means all. Once."""
        ...

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Rank -> what that worker has to say. Once, before the first step; device thread."""
        ...

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Statistics since the last call."""
        ...

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Cache events since the last call."""
        ...

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """What this side shows."""
        ...

    def build_kv_connector_stats(
        self, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics that consist of `data`; of the class."""
        ...

    def build_prom_metrics(
        self,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """An exporter of those statistics; of the class. Once."""
        ...

    def reset_cache(self) -> bool | None:
        """Forget all stored KV; only False says that it failed."""
        ...

    def shutdown(self) -> None:
        """Release what the connector holds; called once."""
        ...


class WorkerConnector(Protocol):
    """The worker side of a KV connector: `KVConnectorBase_V1` in the role WORKER.

    Every call comes from the device thread. Tensors are torch's. See the base class.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Layer name -> its pages. Once, before the first step."""
        ...

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: type[Any]) -> None:
        """One tensor with all layers, in place of `register_kv_caches`."""
        ...

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """How to copy blocks between host and device. Once, after registering."""
        ...

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side is to know of this worker. Once, after registering."""
        ...

    def get_layer_gates(self) -> LayerGates | None:
        """Gates for captured graphs, or None. Once, after registering, before capture."""
        ...

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Finish reading blocks that this step hands on. Before anything else of the step."""
        ...

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's metadata, before its other hooks."""
        ...

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        ...

    def has_connector_metadata(self) -> bool:
        """Whether metadata is bound, so that the layer hooks are called."""
        ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        ...

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's KV may be read."""
        ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The layer's new KV has been written."""
        ...

    def wait_for_save(self) -> None:
        """Return when the step's pages may be overwritten."""
        ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids whose (saves, loads) have ended since the last call."""
        ...

    def advance_transfers(self) -> bool:
        """Move on what goes on beside the steps, for a fraction of a millisecond; whether there is
        more of it. While the device works, or nothing is to be computed, as often as that is so."""
        ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load promised and did not fill."""
        ...

    def get_late_load_errors(self) -> set[int]:
        """Blocks that the step loaded and that are bad, now that its tokens have come."""
        ...

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Statistics since the last call."""
        ...

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Cache events since the last call."""
        ...

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler side should know of this step."""
        ...

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """What this side shows: the one hook that is called on the event loop's thread."""
        ...

    def record_transfers(self, recorder: TransferRecorder | None) -> None:
        """Tell `recorder` from now on what is copied when; None: nobody any more."""
        ...

    def shutdown(self) -> None:
        """Release what the connector holds; called once."""
        ...
