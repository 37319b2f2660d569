"""One engine around both sides of a connector, stepped by hand, with everything watched.

There is no event loop: `plan`, `execute` and `apply` are the parts of a step, and `step` and `run`
put them together as the engine does. All on the calling thread. What a connector does wrong comes
out as `Violation` from the next of these calls.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.detectors import Detectors
from interlace.connectors.conformance.engine_shape import EngineShape
from interlace.connectors.conformance.findings import Trace, Violation
from interlace.connectors.conformance.hook_calls import describe_step
from interlace.connectors.conformance.lawful_answers import LawfulAnswers
from interlace.connectors.conformance.open_files import FilesSince
from interlace.connectors.conformance.oracle import Oracle
from interlace.connectors.conformance.pages import Pages
from interlace.connectors.conformance.parts import Parts, open_parts
from interlace.connectors.conformance.stalls import Stalls, ThreadsSince
from interlace.connectors.conformance.store_damage import StoreDamage
from interlace.connectors.conformance.stored_truth import StoredTruth
from interlace.connectors.conformance.subject import (
    Device,
    DType,
    Subject,
    connector_class,
)
from interlace.connectors.conformance.tiny_model import model_of
from interlace.connectors.conformance.token_judge import TokenJudge
from interlace.connectors.conformance.watch import Watch
from interlace.connectors.conformance.watched_lanes import WatchedLanes
from interlace.engine.config import KVRole
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import PendingStep
from interlace.engine.request import Request, RequestStatus
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.checkpoint import LoadedModel


class Harness:
    """See the module's docstring. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        subject: Subject,
        model: LoadedModel,
        oracle: Oracle,
        *,
        shape: EngineShape | None = None,
        truth: StoredTruth | None = None,
        nonce: str = "",
        salt: str = "",
        trace: Trace | None = None,
        token_property: str = "tokens-cold",
    ) -> None:
        """`truth`: what engines over the same store have stored before. `nonce` is part of each
        request's id, `salt` of its cache salt. A wrong token violates `token_property`.

        Raises: `Violation`, `ConfigError`.
        """
        self.shape = shape or EngineShape()
        self.subject = subject
        self.oracle = oracle
        self.truth = truth or StoredTruth()
        self.watch = Watch(trace or Trace(nonce))
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_steps = 0
        """That were applied."""
        self.newest_output: SchedulerOutput | None = None
        """Of the newest step that was planned."""
        self._nonce = nonce
        self._salt = salt
        self._tokens = TokenJudge(self.watch, oracle, token_property)
        self._inflight: collections.deque[SchedulerOutput] = collections.deque()
        self._executed: collections.deque[PendingStep] = collections.deque()
        """The oldest steps in flight, whose results can be waited for."""
        self._threads = ThreadsSince()
        self.files = FilesSince()
        """Those that the connector, or who else runs meanwhile, has open."""
        self.lanes = WatchedLanes(self.watch, self.shape.lane_seed, self.shape.lane_policy)
        self._open(model)

    @classmethod
    def of(
        cls,
        connector: str | type[KVConnectorBase_V1],
        extra_config: Mapping[str, Any] | None = None,
        *,
        shape: EngineShape | None = None,
        workers: int = 1,
        seed: int = 0,
        role: KVRole = "kv_both",
        device: Device = "cpu",
        dtype: DType | None = None,
    ) -> Self:
        """One over a connector that is named as in `check_connector`, for tests of its own.

        `device` and `dtype` are as there. Raises: `Violation`, `ConfigError`.
        """
        subject = Subject(
            cls=connector_class(connector),
            extra_config=dict(extra_config or {}),
            role=role,
            workers=workers,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        model = model_of(subject)
        return cls(subject, model, Oracle(model), shape=shape)

    def _open(self, model: LoadedModel) -> None:
        self._answers = LawfulAnswers(self.watch)
        self.watch.set_detectors([self._answers])
        try:
            self.parts: Parts = open_parts(self.subject, self.shape, model, self.watch, self.lanes)
        except ConnectorError as error:
            self.watch.findings.raise_first()
            if self.watch.trace.newest(1):  # a hook was called: the engine minds its answer
                self._engine_failed(error)
            raise ConfigError(str(error)) from error
        except Exception:
            self.watch.findings.raise_first()
            raise
        self._store = StoreDamage(self.watch, self.parts.worker_sides)
        self.scheduler = self.parts.scheduler
        self.block_size = self.scheduler.kv_cache.block_size
        pages = Pages(self.parts.pages, self.truth.paint_numbers)
        pages.follow(self.scheduler.kv_cache.pool)
        self._pages = pages
        self.detectors = Detectors(
            self.watch,
            self.parts,
            pages,
            self.lanes,
            self.oracle,
            self.truth,
            answers=self._answers,
            shape=self.shape,
            synthetic=self.is_synthetic,
        )
        self.watch.findings.raise_first()

    # ---------------------------------------------------------------- requests

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        salt: str = "",
        priority: int = 0,
        kv_transfer_params: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Request:
        """Queue a request; `name` is its id in messages, and may be that of one that has ended if
        the engine does not know it any more. With a `seed` its tokens are drawn, else they are
        greedy. Raises: `ConfigError` if the engine is too small."""
        self._require_room(len(prompt))
        request = self._request(name, prompt, max_tokens, salt, priority, kv_transfer_params, seed)
        request_id = request.request_id
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.detectors.order.comes(request_id)
        self.scheduler.add_request(request)
        self.watch.trace.note(f"engine    {name} comes, {len(prompt)} tokens")
        return request

    def _require_room(self, num_tokens: int) -> None:
        most = self.scheduler.max_total_tokens
        if num_tokens >= most:
            raise ConfigError(
                f"this engine has room for {most} tokens, and the check has a prompt of"
                f" {num_tokens}: let the engine options of {self.subject.name} give it more or"
                " smaller blocks."
            )

    def _request(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        salt: str,
        priority: int = 0,
        kv_transfer_params: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Request:
        temperature = 0.0 if seed is None else 1.0
        return Request(
            f"{name}{self._nonce}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True),
            seed=seed or 0,
            arrival=len(self.requests),
            block_size=self.block_size,
            priority=priority,
            cache_salt=f"{salt}{self._salt}",
            kv_transfer_params=kv_transfer_params,
        )

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is. Raises: `Violation`."""
        self.watch.trace.note(
            f"engine    {request.request_id} is aborted while {request.status.name}"
        )
        self._guarded(
            lambda: self.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
        )

    def ask(self, request: Request, kv_transfer_params: dict[str, Any] | None = None) -> None:
        """Ask the connector about a request without blocks, as the engine may at any time.

        With `kv_transfer_params` as the request's, but for this question only.
        """
        side, own = self.parts.stand_in, request.kv_transfer_params
        if kv_transfer_params is not None:
            request.kv_transfer_params = dict(kv_transfer_params)
        self._guarded(lambda: side.get_num_new_matched_tokens(request, 0))
        request.kv_transfer_params = own

    def tokens_of(self, request: Request) -> list[int]:
        """What was generated so far."""
        return self.outputs[request.request_id]

    # ---------------------------------------------------------------- one step

    @property
    def num_inflight(self) -> int:
        """Steps that were planned and not applied."""
        return len(self._inflight)

    def plan(self) -> SchedulerOutput | None:
        """Plan one more step, if depth and scheduler allow. Raises: `Violation`."""
        if len(self._inflight) >= self.shape.depth:
            return None
        output: SchedulerOutput | None
        output = self._guarded(lambda: self.scheduler.schedule(poll=True))
        for update in self.scheduler.take_failed():
            self._unexpected_end(update.request)
        if output is not None:
            self._inflight.append(output)
            self.newest_output = output
            self._pages.planned(output.step_id)
            self.detectors.promises.planned(output, self.requests)
        return output

    def _unexpected_end(self, request: Request) -> None:
        self.watch.findings.add("answers-lawful", f"{request.request_id} failed: {request.error}")
        self.watch.findings.raise_first()

    def execute(self) -> None:
        """Execute the oldest step in flight that was not; on a GPU its work may go on until it is
        applied. Raises: `Violation`."""
        output = self._inflight[len(self._executed)]
        self.watch.step, self.watch.step_is_running = output, True
        self.watch.trace.note(f"engine    executes {describe_step(output)}")
        pending: PendingStep = self._guarded(lambda: self.parts.runner.launch(output))
        self.watch.step_is_running = False
        self.detectors.order.end_step(output)
        self.detectors.mutation.end_step(output.step_id)
        self._executed.append(pending)
        self.watch.findings.raise_first()

    def apply(self) -> None:
        """Apply the oldest step in flight, which was executed. Raises: `Violation`."""
        output, pending = self._inflight.popleft(), self._executed.popleft()
        result: ModelRunnerOutput = self._guarded(pending)
        if self.shape.depth > 1:  # else it follows at once
            self.watch.trace.note(f"engine    applies step {output.step_id}")
        updates = self._guarded(lambda: self.scheduler.update_from_output(output, result))
        self.detectors.promises.applied(output)
        for update in updates:
            self._take(update.request, update.new_token_ids)
        self.num_steps += 1
        self.watch.findings.raise_first()

    def _take(self, request: Request, tokens: Sequence[int]) -> None:
        """Note new tokens. When all are there, judge them."""
        self.outputs[request.request_id] += tokens
        if request.is_finished and not self.is_synthetic:
            self._tokens.judge(request, self.outputs[request.request_id])

    def _guarded(self, call: Any) -> Any:
        """What `call` returns. Raises: `Violation`, also for what the engine raises itself."""
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - whatever the connector brought about
            self._engine_failed(error)
        self.watch.findings.raise_first()
        return result

    def _engine_failed(self, error: Exception) -> NoReturn:
        self.watch.findings.add(
            "answers-lawful", f"the engine failed: {type(error).__name__}: {error}"
        )
        self.watch.findings.raise_first()
        raise error

    # ---------------------------------------------------------------- many steps

    def step(self) -> bool:
        """Plan, execute and apply one step; False if nothing is to do.

        With two steps in flight the next one is planned in turns before and after the one before
        is executed, as it may happen when the device has a thread of its own. Where the device
        works ahead, the next one is also executed before that one is applied.
        """
        self._plan_ahead(self.shape.depth if self.num_steps % 2 else 1)
        if not self._inflight:
            return False
        if not self._executed:
            self.execute()
        self._plan_ahead(self.shape.depth)
        if self.parts.runner.works_ahead and len(self._executed) < len(self._inflight):
            self.execute()
        self.apply()
        return True

    def _plan_ahead(self, depth: int) -> None:
        while len(self._inflight) < depth and self.plan() is not None:
            pass

    def run(self, *, max_steps: int = 4000) -> None:
        """Step until nothing is left to do. Raises: `Violation`, also if nothing gets on."""
        stalls = Stalls(self)
        for _ in range(max_steps):
            if not self.step():
                return
            if stalls.is_stalled():
                break
        stalls.explain()
        self.watch.findings.raise_first()

    def steps(self, num_steps: int) -> None:
        """So many, or fewer if nothing is left to do."""
        for _ in range(num_steps):
            if not self.step():
                return

    @property
    def has_own_threads(self) -> bool:
        """Whether the connector runs threads, so that time has to pass."""
        return bool(self.own_threads)

    @property
    def own_threads(self) -> list[threading.Thread]:
        """Those that began after this harness did and have not ended."""
        return self._threads.alive()

    # ---------------------------------------------------------------- the store, the end

    @property
    def is_synthetic(self) -> bool:
        """Whether the connector, as it is configured here, invents KV."""
        return self.parts.worker_sides[0].kv_is_synthetic

    @property
    def store_fault_kinds(self) -> tuple[str, ...]:
        """Ways in which its store can be damaged here."""
        return self._store.kinds

    @property
    def lost_hashes(self) -> set[bytes]:
        """Of blocks that were damaged in the connector's store."""
        return self.detectors.judge.lost_hashes

    def damage(self, kind: str, prompt: Sequence[int], index: int, *, salt: str = "") -> bool:
        """Let the connector lose block `index` of a stored prompt, on each worker.

        False: it has no such block. Raises: `Violation`.
        """
        probe = self._request("damage", prompt, 1, salt)
        block_hash = probe.block_hashes[index]
        lost = self._store.inject(kind, block_hash)
        self.lost_hashes.update(lost)
        self._answers.loads_may_raise |= bool(lost)
        self.watch.trace.note(
            f"engine    damages block {index} in the store: {kind}, {len(lost)} blocks are lost"
        )
        return bool(lost)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Let the engine forget its cached blocks; nothing may be under way."""
        return bool(
            self._guarded(
                lambda: self.scheduler.reset_prefix_cache(reset_connector=reset_connector)
            )
        )

    @property
    def sides(self) -> dict[str, KVConnectorBase_V1]:
        """The connector's instances, by a name for messages."""
        workers = {f"worker {rank}": side for rank, side in enumerate(self.parts.worker_sides)}
        return {"scheduler side": self.parts.scheduler_side, **workers}

    def close(self) -> None:
        """End both sides. Idempotent; raises nothing that a side raises."""
        parts = getattr(self, "parts", None)
        if parts is not None:
            self.watch.step_is_running = False
            parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Violation:
            if exc is None:
                raise
