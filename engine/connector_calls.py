"""Calls on a KV connector's scheduler side: answers are checked, exceptions named, slow hooks told.

What a hook raises comes out as `ConnectorError`; whether that ends one request or the engine is
the scheduler's to decide. Loop thread, never awaits. Knows no queue and no block pool.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from interlace.engine.block_pool import BlockPool
from interlace.engine.connector_errors import blaming, call_hook
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
)
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.kv_events import KVCacheEvent
from interlace.engine.ports import Clock, SchedulerConnector
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

SLOW_HOOK_S = 0.020
"""A hook that takes longer holds up every request and every consumer: it is named in the log."""


class Match(NamedTuple):
    """Tokens that a connector can bring beyond those that are computed, and in which way."""

    num_tokens: int
    is_async: bool


class ConnectorCalls:
    """The scheduler side of one connector, as the scheduler calls it."""

    def __init__(self, connector: SchedulerConnector, clock: Clock) -> None:
        self._connector = connector
        self._clock = clock
        self._named_slow: set[str] = set()
        self.name = type(connector).__name__

    def _call(self, hook: str, *args: object) -> Any:
        """Call a hook, and see how long it takes. Raises: `ConnectorError`."""
        began_s = self._clock.monotonic()
        answer = call_hook(self._connector, hook, *args)
        took_s = self._clock.monotonic() - began_s
        if took_s > SLOW_HOOK_S:
            self._warn_of(hook, took_s)
        return answer

    def _warn_of(self, hook: str, took_s: float) -> None:
        """Once for each hook."""
        if hook not in self._named_slow:
            self._named_slow.add(hook)
            logger.warning(
                "%s.%s took %.0f ms on the event loop; it must answer from memory",
                self.name,
                hook,
                took_s * 1e3,
            )

    def bind_pool(self, pool: BlockPool) -> None:
        """Show the engine's block pool. Raises: `ConnectorError`."""
        self._call("bind_gpu_block_pool", pool)

    def finished_count(self) -> int | None:
        """How many workers report each id; None means all. Device thread.

        Raises: `ConnectorError`.
        """
        with blaming(self._connector, "get_finished_count"):
            count = self._connector.get_finished_count()
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise ConnectorError(
                f"{self.name}.get_finished_count answered {count!r}, but it must be a number of"
                " workers or None."
            )
        return count

    def shake_hands(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Hand over what the workers have to say. Device thread, where it may take its time.

        Raises: `ConnectorError`.
        """
        with blaming(self._connector, "set_xfer_handshake_metadata"):
            self._connector.set_xfer_handshake_metadata(metadata)

    def take_stats(self) -> KVConnectorStats | None:
        """The scheduler side's statistics since the last call. Raises: `ConnectorError`."""
        stats = self._call("get_kv_connector_stats")
        if stats is None or isinstance(stats, KVConnectorStats):
            return stats
        raise ConnectorError(
            f"{self.name}.get_kv_connector_stats answered {stats!r}, but it must be a"
            " KVConnectorStats or None."
        )

    def take_events(self) -> list[KVCacheEvent]:
        """Cache events since the last call. Raises: `ConnectorError`."""
        answer = self._call("take_events")
        if answer == ():
            return []
        with blaming(self._connector, "take_events"):  # it may be a generator
            events = list(answer)
        for event in events:
            if not isinstance(event, KVCacheEvent):
                raise ConnectorError(
                    f"{self.name}.take_events gave {event!r}, but they must be of"
                    " interlace.engine.kv_events."
                )
        return events

    def match(self, request: Request, num_computed_tokens: int) -> Match | None:
        """What the connector can bring; None if it does not know yet.

        Raises: `ConnectorError` if it raises, or answers what the protocol forbids.
        """
        answer = self._call("get_num_new_matched_tokens", request, num_computed_tokens)
        return self._checked(answer, request.num_tokens - num_computed_tokens)

    def _checked(self, answer: Any, most: int) -> Match | None:
        match answer:
            case (None, bool()):
                return None
            case (bool(), _):
                pass
            case (int() as num_tokens, bool() as is_async):
                if is_async and num_tokens == 0:
                    raise self._broken(answer, "a load without tokens cannot be asynchronous")
                if not 0 <= num_tokens <= most:
                    rule = f"the request has {most} tokens beyond the computed ones"
                    raise self._broken(answer, rule)
                return Match(num_tokens, is_async)
        raise self._broken(answer, "it must be (tokens or None, whether asynchronous)")

    def _broken(self, answer: Any, rule: str) -> ConnectorError:
        return ConnectorError(
            f"{self.name}.get_num_new_matched_tokens answered {answer!r}, but {rule}."
        )

    def compute_end(self, request: Request, load_end: int, block_size: int) -> int | None:
        """Up to where the engine computes a request whose back is loaded, up to `load_end`; None if
        it does not compute before all is loaded. Raises: `ConnectorError`."""
        end = self._call("get_compute_end", request)
        if end is None:
            return None
        if isinstance(end, bool) or not isinstance(end, int):
            raise ConnectorError(f"{self.name}.get_compute_end answered {end!r}: give an int.")
        most = min(load_end, request.num_tokens - 1)
        if end % block_size or not request.num_computed_tokens <= end <= most:
            raise ConnectorError(
                f"{self.name}.get_compute_end answered {end}, but it must be a multiple of the"
                f" block size ({block_size}), at least {request.num_computed_tokens} (up to where"
                f" steps are planned), and at most {most}."
            )
        return end

    def allocated(self, request: Request, num_external_tokens: int) -> None:
        """The request has all blocks that it needs for now. Raises: `ConnectorError`."""
        blocks = KVCacheBlocks((tuple(request.blocks),))
        self._call("update_state_after_alloc", request, blocks, num_external_tokens)

    def with_metadata(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step's message with the connector's metadata. Raises: `ConnectorError`."""
        metadata = self._call("build_connector_meta", output)
        if not isinstance(metadata, KVConnectorMetadata):
            raise ConnectorError(
                f"{self.name}.build_connector_meta returned {metadata!r}; "
                "return a KVConnectorMetadata in every step."
            )
        if metadata.is_idle and (output.loading_block_ids or output.async_loading_req_ids):
            raise ConnectorError(
                f"{self.name}.build_connector_meta says that its worker side is idle in a step that"
                " loads; is_idle must be False there."
            )
        # Nobody else has the message yet, and `dataclasses.replace` takes longer than most hooks.
        object.__setattr__(output, "kv_connector_metadata", metadata)
        return output

    def report(self, connector_output: KVConnectorOutput) -> None:
        """Hand over what the worker side reported. Raises: `ConnectorError`."""
        self._call("update_connector_output", connector_output)

    def reset_cache(self) -> bool:
        """Let the connector forget what it stored. Raises: `ConnectorError`."""
        return self._call("reset_cache") is not False

    def shutdown(self) -> None:
        """End the connector's scheduler side; what it raises is logged. Any thread."""
        try:
            self._connector.shutdown()
        except Exception:
            logger.exception("%s.shutdown failed", self.name)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and parameters for the caller. Raises: `ConnectorError`."""
        block_ids = [block.block_id for block in request.blocks]
        # A connector for several KV-cache groups (SupportsHMA) has a hook of its own for this.
        for_groups = getattr(self._connector, "request_finished_all_groups", None)
        if for_groups is None:
            hook = "request_finished"
            answer = self._call(hook, request, block_ids)
        else:
            hook = "request_finished_all_groups"
            answer = self._call(hook, request, (block_ids,))
        match answer:
            case (bool() as stays, dict() | None as params):
                return stays, params
        raise ConnectorError(
            f"{self.name}.{hook} answered {answer!r}, "
            "but it must be (whether the blocks stay, a dict or None)."
        )
