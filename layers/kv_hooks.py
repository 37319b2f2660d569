"""Where a step calls its KV connector's worker side, in the protocol's order.

    handle_preemptions                      before any kernel of the step
    pre_forward:   bind, start_load_kv
        per layer: wait_for_layer_load, KV write, attention, save_kv_layer; the cache-only layer
                   comes last, and attends to nothing
    post_forward:  wait_for_save
    collect:       get_finished, get_block_ids_with_load_errors, statistics, events, worker
                   metadata, clear

A step in which the connector says that its worker side is idle calls none of them. A step without
tokens runs `no_forward`: the same without layers and without `wait_for_save`. Between the steps'
hooks, while the device works: `advance_transfers`. Device thread. Knows no connector by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Set
from typing import Any, NamedTuple, Self

import torch

from interlace.engine.connector_errors import call_hook
from interlace.engine.errors import ConnectorError, InterlaceError
from interlace.engine.kv_connector import (
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
)
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.kv_events import KVConnectorKVEvents
from interlace.engine.ports import LateLayerGates, LayerGates, TransferRecorder, WorkerConnector
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.transfer_picture import ConnectorPicture, pictures_of
from interlace.layers.attention_backend import TritonAttentionBackend
from interlace.layers.decoder import Attend
from interlace.layers.forward_context import (
    AttentionLayer,
    CacheOnlyAttentionLayer,
    ForwardContext,
    TritonAttentionMetadata,
)
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_copy import copy_kv_blocks
from interlace.layers.kv_memory import CACHE_ONLY_LAYER
from interlace.layers.kv_pages import KVPages

logger = logging.getLogger(__name__)


class LayerHooks(NamedTuple):
    """What one step calls around the KV write and the attention of layer i.

    Where the step loads, an exception of `wait_for_layer_load` makes its blocks invalid; all others
    are fatal: `ConnectorError`.
    """

    wait: Callable[[int], None]
    """`wait_for_layer_load`, before."""
    save: Callable[[int], None]
    """`save_kv_layer`, after."""
    end: Callable[[], None] | None = None
    """Behind all of the last layer, for who takes times; not where that is within a piece that was
    captured."""


class KVHooks:
    """The worker side of one connector, as one runner calls it."""

    def __init__(
        self,
        connector: WorkerConnector,
        layers: dict[str, torch.Tensor],
        cross_layers: tuple[torch.Tensor, type[TritonAttentionBackend]] | None = None,
    ) -> None:
        """`layers`: layer name -> its pages, in order of depth. Registers them, or the tensor that
        holds `cross_layers` with what knows its order of dimensions.

        Raises: `ConnectorError`.
        """
        self._connector = connector
        self._call: Callable[..., Any] = functools.partial(call_hook, connector)
        self._layers = {name: _layer(name, pages) for name, pages in layers.items()}
        self._context = ForwardContext(self._layers, None)  # of the step
        self._is_idle = False  # the connector, in this step: see `KVConnectorMetadata.is_idle`
        self._failed_blocks: frozenset[int] = frozenset()
        self._num_blocks = len(next(iter(layers.values())))
        self._late_gates: LateLayerGates | None = None
        if cross_layers is None:
            self._call("register_kv_caches", dict(layers))
        else:
            self._call("register_cross_layers_kv_cache", *cross_layers)
        self._call("set_host_xfer_buffer_ops", copy_kv_blocks)

    @classmethod
    def of_pages(cls, connector: WorkerConnector, pages: KVPages) -> Self:
        """The worker side of `connector` over these pages. Raises: `ConnectorError`."""
        tensor = pages.cross_layers_tensor
        cross_layers = None if tensor is None else (tensor, pages.attention_backend)
        return cls(connector, pages.by_name(), cross_layers)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side is to know of this worker. Raises: `ConnectorError`."""
        answer: KVConnectorHandshakeMetadata | None = self._checked(
            "get_handshake_metadata", KVConnectorHandshakeMetadata
        )
        return answer

    def _checked(self, hook: str, kind: type[Any]) -> Any:
        """What `hook` answers: one of that kind, or None. Raises: `ConnectorError`."""
        answer = self._call(hook)
        if answer is None or isinstance(answer, kind):
            return answer
        raise self._broken(hook, answer, f"a {kind.__name__} or None")

    def get_layer_gates(self) -> LayerGates | None:
        """What captured graphs are to wait for, or None. Raises: `ConnectorError`."""
        gates: LayerGates | None = self._call("get_layer_gates")
        if gates is None or all(
            callable(getattr(gates, name, None)) for name in ("wait_here", "are_armed")
        ):
            self._late_gates = gates if isinstance(gates, LateLayerGates) else None
            return gates
        raise self._broken("get_layer_gates", gates, "an object with wait_here and are_armed")

    def arm_rest(self, output: SchedulerOutput) -> None:
        """Let late gates be armed, if that is what they are. What is raised is a failed load."""
        if self._late_gates is not None:
            self._guard_load(output, call_hook, self._late_gates, "arm_rest", output.step_id)

    def handle_preemptions(self, output: SchedulerOutput) -> None:
        """Let the connector finish reading what this step hands on. Raises: `ConnectorError`."""
        self._is_idle = output.kv_connector_metadata.is_idle
        if self._is_idle:
            return
        self._call("handle_preemptions", output.kv_connector_metadata)

    def pre_forward(
        self,
        output: SchedulerOutput,
        make_metadata: Callable[[], TritonAttentionMetadata] | None,
        mode: GraphMode = GraphMode.NONE,
    ) -> None:
        """Bind the step's metadata and let its loads begin.

        `make_metadata` makes the attention metadata; None in a step without tokens. `mode` is how
        the step will run: in a FULL graph no layer hook does.

        Raises: `ConnectorError`. If only this step's own loads are at stake, an exception makes
        their blocks invalid, and is logged.
        """
        self._failed_blocks = frozenset()
        if self._is_idle:
            return
        self._call("bind_connector_metadata", output.kv_connector_metadata)
        self._context = ForwardContext(self._layers, make_metadata, mode)
        if output.loading_block_ids and not output.async_loading_req_ids:
            self._guard_load(output, self._call, "start_load_kv", self._context)
        else:
            self._call("start_load_kv", self._context)

    def _guard_load(self, output: SchedulerOutput, call: Callable[..., Any], *args: object) -> None:
        """Call a hook of in-step loading: if it raises, the blocks to be loaded are invalid."""
        try:
            call(*args)
        except InterlaceError as error:  # a failed load, whatever was raised
            # Only the text is kept: a traceback would keep the step's activations alive.
            logger.error("%s; the blocks of this step's loads count as not loaded", str(error))
            self._failed_blocks = output.loading_block_ids

    def post_forward(self) -> None:
        """The forward is queued: let the connector finish with the pages it reads."""
        if not self._is_idle:
            self._call("wait_for_save")

    def collect(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What the connector reports with this step, after every hook that may add to it.

        None if it has nothing to say. Raises: `ConnectorError`.
        """
        if self._is_idle:
            return None
        ended = self._call("get_finished", set(output.finished_req_ids))
        match ended:
            case (Set() | None as sending, Set() | None as recving) if all(
                isinstance(request_id, str) for request_id in (*(sending or ()), *(recving or ()))
            ):
                pass
            case _:
                rule = "(set of request ids or None, set of request ids or None)"
                raise self._broken("get_finished", ended, rule)
        invalid = self._invalid_of("get_block_ids_with_load_errors")
        stats = self._checked("get_kv_connector_stats", KVConnectorStats)
        events = self._checked("get_kv_connector_kv_cache_events", KVConnectorKVEvents)
        meta = self._checked("build_connector_worker_meta", KVConnectorWorkerMetadata)
        self._call("clear_connector_metadata")
        has_news = stats is not None or events is not None or meta is not None
        if not (has_news or sending or recving or invalid or self._failed_blocks):
            return None  # as nearly always: sooner found than made
        reports = KVConnectorOutput(
            # Copies: the connector may go on using its own.
            finished_sending=set(sending) if sending else None,
            finished_recving=set(recving) if recving else None,
            kv_connector_stats=stats,
            kv_cache_events=events,
            kv_connector_worker_meta=meta,
            invalid_block_ids=invalid | self._failed_blocks,
        )
        return None if reports.is_empty() else reports

    def advance_transfers(self) -> bool:
        """While the device works: whether the connector would be called again soon.

        Raises: `ConnectorError`.
        """
        if self._is_idle:
            return False
        answer = self._call("advance_transfers")
        if isinstance(answer, bool):
            return answer
        raise self._broken("advance_transfers", answer, "True or False")

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """What the connector shows. The event loop's thread; never waits or raises."""
        return pictures_of(self._connector)

    def record_transfers(self, recorder: TransferRecorder | None) -> None:
        """Let the connector tell `recorder` of its copies; None: no more. Raises:
        `ConnectorError`."""
        self._call("record_transfers", recorder)

    def late_load_errors(self) -> set[int]:
        """The tokens of a step that loads within itself have come: blocks that are bad.

        Raises: `ConnectorError`.
        """
        return self._invalid_of("get_late_load_errors")

    def _invalid_of(self, hook: str) -> set[int]:
        """A copy of what the hook answers. Raises: `ConnectorError`."""
        invalid = self._call(hook)
        if not self._are_block_ids(invalid):
            rule = f"a set of block ids, which are whole numbers from 1 to {self._num_blocks - 1}"
            raise self._broken(hook, invalid, rule)
        return set(invalid)

    def _are_block_ids(self, answer: object) -> bool:
        """Whether it is a set of ids that blocks of the pool have; the null block is nobody's."""
        return isinstance(answer, Set) and all(
            isinstance(block_id, int) and 0 < block_id < self._num_blocks for block_id in answer
        )

    def no_forward(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """A step without tokens: transfers move all the same. Raises: `ConnectorError`."""
        self.pre_forward(output, None)
        return self.collect(output)

    def layer_hooks(self, output: SchedulerOutput) -> LayerHooks | None:
        """The hooks around the layers of this step; after `pre_forward`.

        None if the connector says that it has no metadata: then it is left alone, as the protocol
        has it.
        """
        if self._is_idle or not self._call("has_connector_metadata"):
            return None
        context, layers = self._context, list(self._layers.items())

        def wait(layer: int) -> None:
            self._wait_for_layer(output, layers[layer][0])

        def save(layer: int) -> None:
            # Asked here, since it may have to be made: by then the device has work.
            by_layer = context.attn_metadata
            assert by_layer is not None, "layers run in steps with tokens"
            name, one = layers[layer]
            self._call("save_kv_layer", name, one.kv_cache, by_layer[name])

        return LayerHooks(wait, save)

    def maybe_transfer_kv_layer(self, attend: Attend, output: SchedulerOutput) -> Attend:
        """`attend` with the layer hooks around it, if there are any: see `layer_hooks`."""
        return with_hooks(attend, self.layer_hooks(output))

    def write_cache_only(self, output: SchedulerOutput, write: Callable[[], None]) -> None:
        """`write` the cache-only layer, the last one, with the same hooks as around attention."""
        hooks = self.layer_hooks(output)
        if hooks is not None:
            hooks.wait(-1)
        write()
        if hooks is not None:
            hooks.save(-1)

    def _wait_for_layer(self, output: SchedulerOutput, name: str) -> None:
        if not output.loading_block_ids:
            self._call("wait_for_layer_load", name)
        elif not self._failed_blocks:
            self._guard_load(output, self._call, "wait_for_layer_load", name)

    def shutdown(self) -> None:
        """Let the connector release what it holds. Never raises: what it raises is logged."""
        try:
            self._connector.shutdown()
        except Exception:
            logger.exception("%s failed", self._name("shutdown"))

    def _broken(self, hook: str, answer: object, rule: str) -> ConnectorError:
        return ConnectorError(f"{self._name(hook)} answered {answer!r}, but it must be {rule}.")

    def _name(self, hook: str) -> str:
        """`Class.hook`, for messages."""
        return f"{type(self._connector).__name__}.{hook}"


def with_hooks(attend: Attend, hooks: LayerHooks | None) -> Attend:
    """`attend` with the hooks around it; None: without."""
    if hooks is None:
        return attend

    def attend_and_transfer(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        hooks.wait(layer)
        attended = attend(layer, q, k, v)
        hooks.save(layer)
        return attended

    return attend_and_transfer


def _layer(name: str, pages: torch.Tensor) -> AttentionLayer | CacheOnlyAttentionLayer:
    if name == CACHE_ONLY_LAYER:
        return CacheOnlyAttentionLayer(name, pages)
    return AttentionLayer(name, pages)
