"""The worker side of a MultiConnector: every hook reaches every child. Device thread."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from interlace.connectors.base import CopyBlocksOp, KVConnectorBase_V1
from interlace.connectors.multi_children import Child, Children
from interlace.connectors.multi_ledger import ReportLedger
from interlace.connectors.multi_messages import (
    MultiHandshakeMetadata,
    MultiKVEvents,
    MultiMetadata,
    MultiWorkerMetadata,
)
from interlace.connectors.multi_stats import MultiKVConnectorStats
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import (
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from interlace.engine.ports import LateLayerGates, LayerGates, TransferRecorder
from interlace.engine.step_timings import TransferTiming
from interlace.engine.transfer_picture import ConnectorPicture, pictures_of

if TYPE_CHECKING:
    import torch

    from interlace.layers.forward_context import ForwardContext

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _AllGates:
    """Gates of several children: `LayerGates`."""

    def __init__(self, gates: Sequence[LayerGates]) -> None:
        self._gates = tuple(gates)

    def wait_here(self, layer: int) -> None:
        for gates in self._gates:
            gates.wait_here(layer)

    def are_armed(self, step_id: int) -> bool:
        return all(gates.are_armed(step_id) for gates in self._gates)


class _AllLateGates(_AllGates):
    """The same, some of which may be armed late: `LateLayerGates`."""

    def __init__(self, gates: Sequence[LayerGates], late: Sequence[LateLayerGates]) -> None:
        """`late` are those among `gates`, one at least."""
        super().__init__(gates)
        self._late = tuple(late)
        self._at_once = tuple(one for one in gates if one not in self._late)

    @property
    def num_first_layers(self) -> int:
        return min(gates.num_first_layers for gates in self._late)

    def are_first_armed(self, step_id: int) -> bool:
        return all(gates.are_armed(step_id) for gates in self._at_once) and all(
            gates.are_first_armed(step_id) for gates in self._late
        )

    def arm_rest(self, step_id: int) -> None:
        for gates in self._late:
            gates.arm_rest(step_id)


class _ChildRecorder:
    """One child's `TransferRecorder`."""

    def __init__(self, recorder: TransferRecorder, key: str) -> None:
        self._recorder = recorder
        self._key = key
        self.mark = recorder.mark

    def add(self, begin: Any, end: Any, tell: Callable[[float, float], TransferTiming]) -> None:
        def told(begin_s: float, end_s: float) -> TransferTiming:
            piece = tell(begin_s, end_s)
            return dataclasses.replace(piece, lane=f"{self._key} {piece.lane}")

        self._recorder.add(begin, end, told)


def _silence(child: Child) -> None:
    child.connector.record_transfers(None)


class MultiWorkerSide(KVConnectorBase_V1):
    """A MultiConnector without the scheduler side's methods, and without those of the class."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Makes the children, of either role. Raises: `ConfigError`, naming the child."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._children = Children.made(vllm_config, role, kv_cache_config)
        self._ledger = ReportLedger()
        self._awake = self._children  # those whose metadata of this step are not idle
        self._layer_children: Children | None = None  # those whose layer hooks this step needs
        self._has_told_of_strays = False

    def _each(self, hook: str, call: Callable[[KVConnectorBase_V1], object]) -> list[Any]:
        return self._children.each(hook, lambda child: call(child.connector))

    def _each_awake(self, hook: str, call: Callable[[KVConnectorBase_V1], object]) -> list[Any]:
        return self._awake.each(hook, lambda child: call(child.connector))

    def _slots(self, hook: str, call: Callable[[KVConnectorBase_V1], T]) -> list[T | None]:
        """What each child answers, in its slot; None of those that are left alone."""
        awake = {child.index for child in self._awake}
        return self._children.each(hook, lambda c: call(c.connector) if c.index in awake else None)

    def _wake(self, metadata: MultiMetadata) -> None:
        """Leave alone the children that have nothing to do, as an engine would."""
        parts = metadata.parts
        self._awake = Children([c for c in self._children if not parts[c.index].is_idle])

    @property
    def num_stray_reports(self) -> int:
        """What children of this worker reported and nobody waited for."""
        return self._ledger.num_strays

    # ---------------------------------------------------------------- for `interlace check`

    @property
    def kv_is_synthetic(self) -> bool:  # type: ignore[override]
        """Whether any child invents KV."""
        return any(child.connector.kv_is_synthetic for child in self._children)

    @property
    def store_fault_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those that all children have: a block is lost if no child can bring it."""
        first, *others = [child.connector.store_fault_kinds for child in self._children]
        return tuple(kind for kind in first if all(kind in kinds for kinds in others))

    def inject_store_fault(self, kind: str, block_hash: bytes) -> set[bytes]:
        """Damage the block in the store of every child, since any of them may be the one to load.
        Returns what any of them has lost."""
        hook = "inject_store_fault"
        lost = self._each(hook, lambda c: set(c.inject_store_fault(kind, block_hash)))
        return set().union(*lost)

    # ---------------------------------------------------------------- once

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Only if all children do: one tensor has to serve them all."""
        return all(self._each("prefer_cross_layer_blocks", lambda c: c.prefer_cross_layer_blocks))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """All children get the same pages."""
        self._each("register_kv_caches", lambda c: c.register_kv_caches(dict(kv_caches)))

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """All children get the same tensor."""
        hook = "register_cross_layers_kv_cache"
        self._each(hook, lambda c: c.register_cross_layers_kv_cache(kv_cache, attn_backend))

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """For all children."""
        hook = "set_host_xfer_buffer_ops"
        self._each(hook, lambda c: c.set_host_xfer_buffer_ops(copy_operation))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """A slot per child; None if none has any."""
        parts = self._each("get_handshake_metadata", lambda c: c.get_handshake_metadata())
        return MultiHandshakeMetadata(tuple(parts)) if _any(parts) else None

    def get_layer_gates(self) -> LayerGates | None:
        """All children's gates as one; None if none has any. A step for which one child's alone
        are armed runs with its layer hooks."""
        gates = [one for one in self._each("get_layer_gates", lambda c: c.get_layer_gates()) if one]
        late = [one for one in gates if isinstance(one, LateLayerGates)]
        if late:
            return _AllLateGates(gates, late)
        return _AllGates(gates) if gates else None

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """Those of all children, which go by their keys."""
        return tuple(
            dataclasses.replace(one, name=_name_in(child, number))
            for child in self._children
            for number, one in enumerate(pictures_of(child.connector))
        )

    def record_transfers(self, recorder: TransferRecorder | None) -> None:
        """Of all children, whose lanes have the child's key before their names; of none if one
        raises."""

        def tell(child: Child) -> None:
            own = None if recorder is None else _ChildRecorder(recorder, child.key)
            child.connector.record_transfers(own)

        try:
            self._children.each("record_transfers", tell)
        except ConnectorError:
            if recorder is not None:
                self._children.try_each("record_transfers", _silence)
            raise

    # ---------------------------------------------------------------- every step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Each child with its own metadata."""
        metadata = _metadata(kv_connector_metadata)
        self._wake(metadata)
        parts = metadata.parts

        def tell(child: Child) -> None:
            child.connector.handle_preemptions(parts[child.index])

        self._awake.each("handle_preemptions", tell)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Each child's own; before that, what the step says of loads and holds."""
        super().bind_connector_metadata(connector_metadata)
        metadata = _metadata(connector_metadata)
        self._ledger.begin_step(metadata.loads, metadata.holds)
        self._layer_children = None
        self._wake(metadata)
        self._awake.each(
            "bind_connector_metadata",
            lambda child: child.connector.bind_connector_metadata(metadata.parts[child.index]),
        )

    def clear_connector_metadata(self) -> None:
        """Of all children."""
        super().clear_connector_metadata()
        self._layer_children = None
        self._each_awake("clear_connector_metadata", lambda c: c.clear_connector_metadata())

    def has_connector_metadata(self) -> bool:
        """Whether any child has: the layer hooks reach only those that have."""
        said = self._each_awake("has_connector_metadata", lambda c: c.has_connector_metadata())
        return super().has_connector_metadata() and any(said)

    def _each_with_layers(self, hook: str, call: Callable[[KVConnectorBase_V1], None]) -> None:
        """Decided once a step, at its first layer, as the engine decides for one connector."""
        if self._layer_children is None:
            self._layer_children = Children(
                [child for child in self._awake if child.connector.has_connector_metadata()]
            )
        self._layer_children.each(hook, lambda child: call(child.connector))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Let each child begin its loads."""
        self._each_awake("start_load_kv", lambda c: c.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for all children."""
        self._each_with_layers("wait_for_layer_load", lambda c: c.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let each child save."""
        self._each_with_layers(
            "save_kv_layer",
            lambda c: c.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs),
        )

    def wait_for_save(self) -> None:
        """Wait for all children."""
        self._each_awake("wait_for_save", lambda c: c.wait_for_save())

    def advance_transfers(self) -> bool:
        """Of all children; whether any has more."""
        return any(self._each_awake("advance_transfers", lambda c: c.advance_transfers()))

    def get_late_load_errors(self) -> set[int]:
        """Of all children."""
        return set().union(
            *self._each_awake("get_late_load_errors", lambda c: c.get_late_load_errors())
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that their own child has ended, and requests that every child is done with."""

        def ask(child: Child) -> None:
            answer: Any = child.connector.get_finished(set(finished_req_ids))
            if not _is_pair_of_sets(answer):
                rule = f"answered {answer!r}, but it must be (set or None, set or None)."
                raise child.broke("get_finished", rule)
            sent, received = answer
            self._ledger.receive(child.index, received or ())
            self._ledger.send(child.index, sent or ())

        self._awake.each("get_finished", ask)
        if self._ledger.num_strays and not self._has_told_of_strays:
            self._has_told_of_strays = True
            logger.warning(
                "a child of MultiConnector reported ids that nobody waits for; such reports are"
                " counted and ignored"
            )
        sent, received = self._ledger.take()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those of all children."""
        hook = "get_block_ids_with_load_errors"
        return set().union(*self._each_awake(hook, lambda c: c.get_block_ids_with_load_errors()))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Those of this side of each child, by child; None if none has any."""
        hook = "get_kv_connector_stats"
        parts = self._slots(hook, lambda c: c.get_kv_connector_stats())
        keys = [child.key for child in self._children]
        return MultiKVConnectorStats.of(zip(keys, parts, strict=True)) if _any(parts) else None

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        """Those of all children, each in its slot; None if none has any."""
        hook = "get_kv_connector_kv_cache_events"
        parts = self._slots(hook, lambda c: c.get_kv_connector_kv_cache_events())
        return MultiKVEvents(parts) if _any(parts) else None

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        """A slot per child; None if none has anything to say."""
        hook = "build_connector_worker_meta"
        parts = self._slots(hook, lambda c: c.build_connector_worker_meta())
        return MultiWorkerMetadata(tuple(parts)) if _any(parts) else None


def _metadata(metadata: KVConnectorMetadata) -> MultiMetadata:
    assert isinstance(metadata, MultiMetadata)
    return metadata


def _any(parts: Iterable[object]) -> bool:
    """Whether there is one that is not None."""
    return any(part is not None for part in parts)


def _is_pair_of_sets(answer: object) -> bool:
    return (
        isinstance(answer, tuple)
        and len(answer) == 2
        and all(part is None or isinstance(part, set | frozenset) for part in answer)
    )


def _name_in(child: Child, number: int) -> str:
    """Of its pictures the first one has its own name."""
    return child.key if number == 0 else f"{child.key}.{number}"
