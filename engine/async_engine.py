"""The asynchronous engine: requests in, streams of deltas out. Takes its parts as arguments.

Lives on one event loop, between `async with`. Knows no torch: the runner, which it calls on the
device thread, and the tokenizer are handed to it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from interlace.engine.block_hash import HashMemo, TokenArray
from interlace.engine.clock import MonotonicClock
from interlace.engine.config import EngineConfig, KVTransferConfig, ModelConfig
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel, with_ordinary_errors
from interlace.engine.engine_tracing import LAST_STEPS, EngineTracing, traced
from interlace.engine.errors import (
    EngineBusyError,
    EngineDeadError,
    InterlaceError,
    RequestError,
    SamplingError,
)
from interlace.engine.events import EventBus, EventStream, RequestFinished
from interlace.engine.live_feed import LiveFeed
from interlace.engine.live_frame import EngineFacts
from interlace.engine.loop import StepLoop
from interlace.engine.mailbox import Mailbox
from interlace.engine.output_processor import OutputProcessor
from interlace.engine.outputs import (
    Completion,
    FinishReason,
    RequestOutput,
    Usage,
    merge_outputs,
)
from interlace.engine.ports import Clock, SchedulerConnector, StepRunner
from interlace.engine.prompt import (
    ChatMessages,
    Prompt,
    check_length,
    check_token_ids,
    is_token_ids,
    own_copy,
    tokenize,
)
from interlace.engine.request import Request
from interlace.engine.request_stream import RequestStream
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.snapshot import EngineSnapshot, take_snapshot
from interlace.engine.step_recording import StepRecording
from interlace.engine.step_timings import RecordingFacts
from interlace.engine.tokenizer import Tokenizer
from interlace.engine.transfer_picture import ConnectorPicture, joined_by_name, pictures_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from interlace.engine.connector_metrics import ConnectorMetrics
    from interlace.engine.metrics_recording import MetricsRecording
    from interlace.engine.metrics_server import MetricsServer

INLINE_TOKENS = 16_384
"""Longer prompts are hashed in a thread. This many take about 2 ms: less than the interpreter lets
another thread run before it takes turns, so that a thread would only come later."""


class AsyncEngine:
    """Continuous batching behind an async API.

    All methods are called on the event loop on which the engine was entered. Results are the
    same whatever else runs, up to rounding in the matrix products of other batch sizes.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: StepRunner,
        tokenizer: Tokenizer | None,
        *,
        device: DeviceThread | None = None,
        connector: SchedulerConnector | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`config` is resolved. `device` is the thread on which `runner` was made; whoever gives
        one closes it after the engine. `connector` is the scheduler side of the KV connector whose
        worker side `runner` has; the engine ends both.

        Raises: `ConnectorError`; then whoever made the parts closes them.
        """
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self._events = EventBus()
        self._runner = runner
        self._owns_device = device is None
        self._device = device or DeviceThread()
        self._metrics = None if connector is None else self._make_metrics(connector)
        self._registry: CollectorRegistry | None = None
        self._recordings: list[MetricsRecording] = []
        self._metrics_servers: list[MetricsServer] = []
        self._metrics_ended = False
        self._step_recording = StepRecording(runner, self._device, self._clock, self._events)
        self._scheduler = Scheduler(
            config.scheduler_config,
            config.cache_config,
            model_config.eos_token_ids,
            self._clock,
            self._events,
            connector,
            (config.kv_transfer_config or KVTransferConfig()).kv_load_failure_policy or "fail",
            self._metrics,
        )
        self._has_connector = connector is not None
        self._connector = connector
        self._outputs = OutputProcessor(self._scheduler, tokenizer, self._clock, self._events)
        self._preparing: dict[str, Mailbox] = {}  # request id -> mailbox, until it is aborted
        self._num_preparing = 0  # those whose thread has not ended, aborted ones included
        self._text_threads = ThreadPoolExecutor(2, thread_name_prefix="interlace-text")
        self._hash_memo = HashMemo()  # for prompts that are hashed on the loop
        self._arrivals = itertools.count()
        self._seeds = random.Random(config.seed)
        self._tasks = asyncio.TaskGroup()
        self._loop: StepLoop | None = None
        self._dead: EngineDeadError | None = None
        self._has_failed = False

    def _make_metrics(self, connector: SchedulerConnector) -> ConnectorMetrics:
        # Takes tens of milliseconds to import, and only engines with a connector need it.
        from interlace.engine.connector_metrics import ConnectorMetrics

        return ConnectorMetrics(connector, self.config, self._clock)

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        """Let a connector's two sides learn of each other, and start the step loop.

        Raises: `EngineDeadError` if this engine was opened before; `ConnectorError`, after which
        its parts are closed. Cancellation: the same.
        """
        if self._loop is not None:
            raise EngineDeadError("an engine is opened once; build a new one.")
        self._loop = StepLoop(
            self._scheduler, self._runner, self._device, self._outputs, self._clock, self._events
        )
        if self._has_connector:
            await self._connect()
        await self._tasks.__aenter__()
        self._tasks.create_task(self._loop.run(self._die), name="interlace-step-loop")
        return self

    async def _connect(self) -> None:
        try:
            await finish_despite_cancel(self._device.submit(self._scheduler.connect, self._runner))
        except BaseException as error:
            self._dead = EngineDeadError(f"the engine could not be opened: {error}")
            await self._release()
            raise

    async def _release(self) -> None:
        """End all parts. Cancellation: they end all the same."""
        self._events.close()
        self._step_recording.close()
        self._text_threads.shutdown(wait=False)
        try:
            await finish_despite_cancel(self._device.submit(self._close_parts))
        finally:
            if self._owns_device:
                self._device.close()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort what is unfinished, let the steps in flight end, release the device.

        Cancellation: the device is released all the same, then `CancelledError` is raised.
        """
        assert self._loop is not None
        for request_id in list(self._preparing):
            self.abort(request_id)
        self._outputs.abort_all()
        if self._dead is None:
            self._dead = EngineDeadError("the engine is closed; open a new one.")
        self._end_metrics()
        self._loop.stop()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._release()

    def _close_parts(self) -> None:
        """Device thread: connectors may wait for files."""
        self._scheduler.close()
        self._runner.close()

    def _die(self, cause: Exception) -> None:
        """The step loop failed: every waiting and every later caller gets the same error."""
        self._dead = EngineDeadError(
            f"the step loop failed: {type(cause).__name__}: {cause}. Open a new engine."
        )
        self._dead.__cause__ = cause
        self._has_failed = True
        self._outputs.fail_all(self._dead_error)
        preparing, self._preparing = self._preparing, {}
        for mailbox in preparing.values():
            mailbox.fail(self._dead_error())
        self._events.close()

    def _dead_error(self) -> EngineDeadError:
        """A fresh copy for each caller, since raising adds to an exception's traceback."""
        assert self._dead is not None
        copy = EngineDeadError(*self._dead.args)
        copy.__cause__ = self._dead.__cause__
        return copy

    # ---------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        """Submit a request; returns at once an async iterator of its deltas.

        `prompt` is text, token ids, or chat messages (`[{"role": ..., "content": ...}]`) for the
        model's template. Token ids are checked and queued here; text is tokenised in a thread
        first, so text that is too long is refused at the first item. Lower `priority` is sooner
        under the policy `priority`. Prompts with different `cache_salt` share no cached KV.

        Raises: `PromptError`, `SamplingError` and other `RequestError`s; `EngineBusyError`;
        `EngineDeadError`. Cancellation, closing or dropping the iterator aborts the request.
        """
        self._check_open()
        params = sampling_params or SamplingParams()
        self._check_options(params, priority, cache_salt, kv_transfer_params)
        text: str | ChatMessages = ""
        token_ids = None
        if is_token_ids(prompt):
            token_ids = check_token_ids(prompt, self.model_config.vocab_size)
            check_length(len(token_ids), self._scheduler.max_total_tokens)
        elif self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids, not text.")
        else:
            text = own_copy(prompt)
        self._check_room()
        arrival = next(self._arrivals)
        request_id = self._claim_id(request_id, arrival)
        build = functools.partial(
            Request,
            request_id,
            sampling_params=params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            arrival=arrival,
            block_size=self.config.block_size,
            priority=priority,
            cache_salt=cache_salt,
            kv_transfer_params=None if kv_transfer_params is None else dict(kv_transfer_params),
        )
        mailbox = Mailbox()
        if token_ids is not None and len(token_ids) <= INLINE_TOKENS:
            self._admit(build(token_ids, hash_memo=self._hash_memo), mailbox)
        else:
            self._preparing[request_id] = mailbox
            self._num_preparing += 1
            prepare = functools.partial(self._build, build, token_ids, text)
            self._tasks.create_task(self._prepare(prepare, mailbox, request_id))
        return RequestStream(
            request_id, mailbox, functools.partial(self._abort, request_id, mailbox)
        )

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Await a whole answer; the arguments and errors are those of `generate`.

        Cancellation: aborts the request.
        """
        stream = self.generate(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
        )
        deltas = [delta async for delta in stream]
        whole = merge_outputs(deltas)
        assert whole.finish_reason is not None
        assert whole.usage is not None
        return Completion(
            request_id=whole.request_id,
            text=whole.text_delta,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            usage=whole.usage,
            logprobs=whole.logprobs,
            stop_reason=whole.stop_reason,
            error=whole.error,
            kv_transfer_params=whole.kv_transfer_params,
        )

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; its consumer gets a last delta, `abort`.

        Returns False, and does nothing, for an id that is unknown or has ended.
        """
        mailbox = self._preparing.pop(request_id, None)
        if mailbox is not None:
            usage = Usage(0, 0, 0, 0)
            mailbox.put(RequestOutput(request_id, finish_reason="abort", usage=usage))
            self._tell_unqueued_end(request_id, "abort")
            return True
        if not self._outputs.abort(request_id):
            return False
        self._wake()
        return True

    def _abort(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort the request that `mailbox` belongs to, not a later one of the same id."""
        if not mailbox.closed:
            self.abort(request_id)

    def _check_options(
        self,
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        kv_transfer_params: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"give a SamplingParams, not {type(params).__name__}.")
        vocab_size = self.model_config.vocab_size
        for name in ("logit_bias", "stop_token_ids"):
            beyond = [i for i in getattr(params, name) or () if i >= vocab_size]
            if beyond:
                raise SamplingError(
                    f"{name} has token id {beyond[0]}, outside the vocabulary [0, {vocab_size})."
                )
        if params.stop_strings and self.tokenizer is None:
            raise SamplingError("stop strings need a tokenizer; use stop_token_ids.")
        if not isinstance(priority, int):
            raise RequestError(f"priority must be a whole number, not {priority!r}.")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, not {type(cache_salt).__name__}.")
        if kv_transfer_params is None:
            return
        if not isinstance(kv_transfer_params, Mapping):
            raise RequestError(f"kv_transfer_params must be a mapping: {kv_transfer_params!r}.")
        if not self._has_connector:
            raise RequestError("kv_transfer_params need a KV connector; this engine has none.")

    def _check_room(self) -> None:
        most = self.config.max_waiting_requests
        if self._scheduler.num_waiting_requests + self._num_preparing >= most:
            raise EngineBusyError(
                f"{most} requests are waiting already (max_waiting_requests); "
                "retry when some have finished."
            )

    def _claim_id(self, request_id: str | None, arrival: int) -> str:
        if request_id is None:
            request_id = f"request-{arrival}"
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, not {request_id!r}.")
        if self._scheduler.knows(request_id) or request_id in self._preparing:
            raise RequestError(f"request_id {request_id!r} is in use; choose another one.")
        return request_id

    async def _prepare(
        self, build: Callable[[], Request], mailbox: Mailbox, request_id: str
    ) -> None:
        """Tokenise and hash in a thread, then queue, unless the request has ended meanwhile."""
        loop = asyncio.get_running_loop()
        call = functools.partial(with_ordinary_errors, build)
        try:
            request = await finish_despite_cancel(loop.run_in_executor(self._text_threads, call))
            if not mailbox.closed:
                self._admit(request, mailbox)
        except InterlaceError as error:
            self._refuse(mailbox, request_id, error)
        except Exception as error:  # noqa: BLE001 - this prompt's own; the engine goes on
            failure = RequestError(f"the prompt cannot be read: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._refuse(mailbox, request_id, failure)
        finally:
            self._num_preparing -= 1
            if self._preparing.get(request_id) is mailbox:  # a later request may have the id
                del self._preparing[request_id]

    def _refuse(self, mailbox: Mailbox, request_id: str, error: InterlaceError) -> None:
        if not mailbox.closed:  # else it was aborted meanwhile, and that was told
            mailbox.fail(error)
            self._tell_unqueued_end(request_id, "error")

    def _tell_unqueued_end(self, request_id: str, reason: FinishReason) -> None:
        """A request has ended that the scheduler never knew."""
        self._scheduler.count_unqueued_end()
        if self._events.active:
            self._events.emit(RequestFinished(self._clock.monotonic(), request_id, reason, 0))

    def _build(
        self,
        build: Callable[[TokenArray], Request],
        token_ids: TokenArray | None,
        text: str | ChatMessages,
    ) -> Request:
        """A request of token ids, or else of text or chat messages. Runs on a text thread."""
        return build(self._tokenize(text) if token_ids is None else token_ids)

    def _tokenize(self, text: str | ChatMessages) -> TokenArray:
        """Text or chat messages to checked token ids. Runs on a text thread."""
        assert self.tokenizer is not None
        token_ids = check_token_ids(tokenize(text, self.tokenizer), self.model_config.vocab_size)
        check_length(len(token_ids), self._scheduler.max_total_tokens)
        return token_ids

    def _admit(self, request: Request, mailbox: Mailbox) -> None:
        self._outputs.add_request(request, mailbox)
        self._scheduler.add_request(request)
        self._wake()

    def _wake(self) -> None:
        assert self._loop is not None
        self._loop.wake()

    # ---------------------------------------------------------------- the engine's state

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget all cached KV on the device.

        Returns False, and does nothing, while a request or a step in flight needs any block.
        `reset_connector` asks the KV connector to forget too, and adds its answer; without a
        connector there is nothing more to forget. Raises: `ConnectorError`.
        """
        return self._scheduler.reset_prefix_cache(reset_connector=reset_connector)

    def snapshot(self) -> EngineSnapshot:
        """A frozen picture of queues, blocks and totals, as of now."""
        self._scheduler.settle_unheard()  # who has had the last token sees it counted
        return take_snapshot(
            self._scheduler,
            self._num_preparing,
            self._clock.monotonic(),
            {} if self._metrics is None else self._metrics.reduce(),
            self._connector_pictures(),
            None if self._dead is None or not self._has_failed else str(self._dead),
        )

    def _connector_pictures(self) -> tuple[ConnectorPicture, ...]:
        if self._connector is None:
            return ()
        worker_side = self._runner.get_transfer_pictures()
        return joined_by_name((*worker_side, *pictures_of(self._connector)))

    def live_view(self) -> LiveFeed:
        """Let `interlace top` of this user watch the engine, while the answer is entered:

            async with engine.live_view(): ...

        Costs nothing while nobody watches; see `LiveFeed`, whose `path` is the socket. Raises, when
        it is entered: `LiveViewError`.
        """
        transfer = self.config.kv_transfer_config
        facts = EngineFacts(
            pid=os.getpid(),
            model=self.config.model,
            device=self.config.device,
            dtype=self.config.dtype,
            kv_connector=None if transfer is None else transfer.kv_connector,
        )
        return LiveFeed(self, facts, self._clock)

    @property
    def metrics(self) -> CollectorRegistry:
        """Counters and gauges of the engine, and what the KV connector's Prometheus exporter keeps.

        A registry of this engine's own, to be read on the event loop:
        `prometheus_client.generate_latest(engine.metrics)`. Each time it takes a `snapshot()`.
        """
        if self._registry is None:
            from prometheus_client import CollectorRegistry

            from interlace.engine.engine_metrics import EngineCollector, WithoutCreated

            self._registry = CollectorRegistry()
            self._registry.register(
                EngineCollector(
                    self.snapshot, lambda: self._dead is None, self.config.max_waiting_requests
                )
            )
            if self._metrics is not None:
                self._registry.register(WithoutCreated(self._metrics.registry))
        return self._registry

    def record_metrics(self) -> MetricsRecording:
        """Record histograms too, of steps, first tokens and the like, from now on: until `close()`
        of what this returns, or until the engine ends. Its `registry` has `metrics` as well.

        Raises: `EngineDeadError`.
        """
        from interlace.engine.metrics_recording import MetricsRecording

        self._check_open()
        recording = MetricsRecording(self.metrics, self.events(), self._clock)
        self._recordings = [one for one in self._recordings if not one.is_closed]
        self._recordings.append(recording)
        self._tasks.create_task(recording.run(), name="interlace-metrics")
        return recording

    async def serve_metrics(self, port: int | socket.socket = 0) -> MetricsServer:
        """Record metrics, and serve them at `http://127.0.0.1:PORT/metrics`, the `url` of what this
        returns, until its `close()`, or until the engine closes. Port 0 takes a free one.

        `port` may be a socket of `metrics_server.listen`, taken before the model is loaded; it is
        the server's own from now on. When the step loop has failed, scrapes are still answered,
        with `interlace_engine_up 0`. Raises: `ConfigError` for a port that cannot be had;
        `EngineDeadError`. Cancellation: nothing is served or recorded.
        """
        self._check_open()
        listen, kind = await asyncio.to_thread(_metrics_server_parts)  # importing reads files
        sock = listen(port) if isinstance(port, int) else port
        recording: MetricsRecording | None = None
        try:
            recording = self.record_metrics()
            server = await kind.open(recording.registry, sock, on_close=recording.close)
        except BaseException:
            sock.close()
            if recording is not None:
                recording.close()
            raise
        if self._metrics_ended:  # the engine was closed meanwhile
            server.close()
            raise self._dead_error()
        self._metrics_servers = [one for one in self._metrics_servers if not one.is_closed]
        self._metrics_servers.append(server)
        return server

    def _end_metrics(self) -> None:
        self._metrics_ended = True
        for server in self._metrics_servers:
            server.close()
        for recording in self._recordings:
            recording.close()

    def _check_open(self) -> None:
        if self._dead is not None:
            raise self._dead_error()
        if self._loop is None:
            raise EngineDeadError("the engine is not open; use it inside `async with`.")

    def events(self, max_pending: int = 65536) -> EventStream:
        """An async iterator over what happens from now on; see `interlace.engine.events`.

        Beyond `max_pending` unread events the oldest are dropped and counted.
        """
        return self._events.subscribe(max_pending)

    @asynccontextmanager
    async def record_steps(self) -> AsyncIterator[RecordingFacts]:
        """Time each layer of each step, and each piece of a transfer, while this is entered:

            async with engine.record_steps(): ...

        `events()` has them then, as `step.timed`, `layer.compute`, `layer.load`, `layer.save` and
        `gate.failed`; without this nothing is timed, whoever reads events. Steps launched before
        are not timed, and those under way at the end are waited for by the device thread, unless
        others still look: then these are told of them. On a GPU
        events are recorded between layers, which takes the host a few microseconds each; a full
        graph is captured once more, with such events in it, when a step of its size first runs.

        Any number of callers may have it entered. Raises: `EngineDeadError`; `ConnectorError` if
        the connector will not tell of its transfers. Cancellation: recording ends all the same.
        """
        self._check_open()
        async with self._step_recording.look() as facts:
            yield facts

    @asynccontextmanager
    async def trace(
        self, path: str | os.PathLike[str], *, last_steps: int = LAST_STEPS
    ) -> AsyncIterator[EngineTracing]:
        """Record the steps that run while this is entered, and write them to `path` at its end:

            async with engine.trace("trace.json"): ...

        `interlace trace` shows the file, and Perfetto opens it: see `interlace.engine.trace_file`.
        It has the newest `last_steps` steps that compute, at most 2,048, with their layers, gate
        waits, transfers and requests, and says how much was left out. It appears whole, replaces
        what was there, and only its owner may read it. It holds ids of requests, and no text.

        It is written however the context ends: by an exception, after the step loop has died.
        Raises: `ConfigError`, on entering, for a file that cannot be written, or when writing
        fails; and as `record_steps`. Cancellation: the file is written first.
        """
        self._check_open()
        given = (Path(path), last_steps, self.config, self.model_config.model)
        async with traced(*given, self.record_steps, self._clock, self._events) as tracing:
            yield tracing

    def __repr__(self) -> str:
        state = "dead" if self._dead is not None else repr(self._scheduler)
        return f"<AsyncEngine {self.config.model} {state} preparing={self._num_preparing}>"


def _metrics_server_parts() -> tuple[Callable[[int], socket.socket], type[MetricsServer]]:
    """(`listen`, the server), and all that they need is imported. Any thread."""
    from interlace.engine import metrics_recording  # noqa: F401 - and its libraries
    from interlace.engine.engine_metrics import EngineCollector  # noqa: F401
    from interlace.engine.metrics_server import MetricsServer, listen

    return listen, MetricsServer
