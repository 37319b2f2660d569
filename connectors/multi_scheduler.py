"""The scheduler side of a MultiConnector: who loads what, who is told what, who holds what.

Event loop, no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from interlace.connectors.multi_children import Child, Children, checked_match, log_errors
from interlace.connectors.multi_messages import Hold, MultiMetadata
from interlace.connectors.multi_views import share_of, with_loads_as_computed
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorMetadata, KVConnectorOutput
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

Finish = tuple[bool, "dict[str, Any] | None"]
"""Whether blocks are held, and parameters for the caller."""


class _Choice(NamedTuple):
    """A match query's outcome: who brings the request's KV, from where on, and how."""

    child: int
    begin: int
    """Tokens that were there."""
    is_async: bool


class MultiScheduler:
    """The methods are the protocol's. Every child is told of every request and every step."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._choices: dict[str, _Choice] = {}  # of each request's last query
        self._step_loads: dict[str, _Choice] = {}  # within the step that is being planned
        self._loads: dict[str, int] = {}  # asynchronous ones, until reported: id -> child
        self._parked: dict[str, int] = {}  # the same, until the request may run
        self._holds: dict[str, frozenset[int]] = {}  # ended requests -> who asked for it
        self._new_loads: dict[str, int] = {}  # for the next message, as the next one
        self._new_holds: dict[str, Hold] = {}

    # ---------------------------------------------------------------- loads

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The first child that has something is chosen; all are asked, and all must know."""
        most = request.num_tokens - num_computed_tokens
        self._choices.pop(request.request_id, None)

        def ask(child: Child) -> tuple[int | None, bool]:
            query = child.connector.get_num_new_matched_tokens
            return checked_match(child, query(request, num_computed_tokens), most)

        answers = self._children.each("get_num_new_matched_tokens", ask)
        if any(num_tokens is None for num_tokens, _ in answers):
            return None, False
        for index, (num_tokens, is_async) in enumerate(answers):
            if num_tokens:
                choice = _Choice(index, num_computed_tokens, is_async)
                self._choices[request.request_id] = choice
                return num_tokens, is_async
        return 0, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """The chosen child is to load `num_tokens`; all others may use the blocks as well.

        Blocks that are loaded asynchronously are the loader's alone until the load has ended: the
        others hear of them when the request may run.
        """
        request_id = request.request_id
        choice = self._choices.pop(request_id, None)
        self._parked.pop(request_id, None)
        loader = None
        if num_tokens:
            if choice is None:
                raise ConnectorError(
                    f"MultiConnector: {num_tokens} tokens of {request_id} are to be loaded, but its"
                    " last match query found none."
                )
            loader = choice.child
            if choice.is_async:
                for loads in (self._loads, self._parked, self._new_loads):
                    loads[request_id] = loader
                self._tell([self._children[loader]], request, blocks, num_tokens, loader)
                return
            self._step_loads[request_id] = choice
        self._tell(self._children, request, blocks, num_tokens, loader)

    def _tell(
        self,
        children: Iterable[Child],
        request: Request,
        blocks: KVCacheBlocks,
        num_tokens: int,
        loader: int | None,
    ) -> None:
        def tell(child: Child) -> None:
            own = num_tokens if child.index == loader else 0
            child.connector.update_state_after_alloc(request, blocks, own)

        Children(list(children)).each("update_state_after_alloc", tell)

    # ---------------------------------------------------------------- steps

    def build(self, output: SchedulerOutput) -> MultiMetadata:
        """All children's orders, and what the worker side has to know of loads and holds."""

        def ask(child: Child) -> KVConnectorMetadata:
            seen = self._as_seen_by(child, output)
            metadata: Any = child.connector.build_connector_meta(seen)
            if not isinstance(metadata, KVConnectorMetadata):
                rule = f"returned {metadata!r}; return a KVConnectorMetadata in every step."
                raise child.broke("build_connector_meta", rule)
            return metadata

        parts = tuple(self._children.each("build_connector_meta", ask))
        loads, self._new_loads = self._new_loads, {}
        holds, self._new_holds = self._new_holds, {}
        self._step_loads.clear()
        return MultiMetadata(parts, loads, holds)

    def _as_seen_by(self, child: Child, output: SchedulerOutput) -> SchedulerOutput:
        others = {
            request_id: choice.begin
            for request_id, choice in self._step_loads.items()
            if choice.child != child.index
        }
        return with_loads_as_computed(output, others) if others else output

    def applied(self, output: KVConnectorOutput) -> None:
        """Show each child what it has reported, if that is anything, and which blocks are bad."""
        received: list[set[str]] = [set() for _ in self._children]
        sent: list[set[str]] = [set() for _ in self._children]
        for request_id in output.finished_recving or ():
            loader = self._loads.pop(request_id, None)
            if loader is not None:
                received[loader].add(request_id)
        for request_id in (output.finished_recving or set()) | (output.finished_sending or set()):
            for index in self._holds.pop(request_id, ()):
                sent[index].add(request_id)

        def show(child: Child) -> None:
            share = share_of(output, child, sent[child.index], received[child.index])
            if not share.is_empty():
                child.connector.update_connector_output(share)

        self._children.each("update_connector_output", show)

    # ---------------------------------------------------------------- the end of a request

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> Finish:
        """Hold the request if any child wants it; it is held until all of those have reported.

        If a child raises, or two give the same parameter, the request ends with that error, unless
        another child holds its blocks: then they stay, and the error is logged.
        """
        request_id = request.request_id
        self._choices.pop(request_id, None)
        loader = self._parked.pop(request_id, None)

        def ask(child: Child) -> Finish:
            knows = loader is None or loader == child.index
            ids = tuple(list(group) if knows else [] for group in block_ids)
            return _finish(child, request, ids)

        answers, errors = self._children.try_each("request_finished", ask)
        params, clashes = _merged((child, params) for child, (_, params) in answers)
        errors += clashes
        holders = frozenset(child.index for child, (holds, _) in answers if holds)
        if errors and not holders:
            log_errors(errors[1:])
            raise errors[0]
        log_errors(errors)
        if holders:
            self._holds[request_id] = holders
            self._new_holds[request_id] = Hold(holders, self._loads.get(request_id))
        return bool(holders), params

    @property
    def is_idle(self) -> bool:
        """Whether no request is remembered."""
        left = (self._choices, self._step_loads, self._loads, self._parked, self._holds)
        return not any((*left, self._new_loads, self._new_holds))


def _finish(child: Child, request: Request, block_ids: tuple[list[int], ...]) -> Finish:
    """Ask one child, in the way that it knows."""
    for_groups = getattr(child.connector, "request_finished_all_groups", None)
    answer: Any
    if for_groups is None:
        answer = child.connector.request_finished(request, block_ids[0])
    else:
        answer = for_groups(request, block_ids)
    match answer:
        case (bool() as holds, dict() | None as params):
            return holds, params
    rule = f"answered {answer!r}, but it must be (whether the blocks stay, a dict or None)."
    raise child.broke("request_finished", rule)


def _merged(
    said: Iterable[tuple[Child, dict[str, Any] | None]],
) -> tuple[dict[str, Any] | None, list[ConnectorError]]:
    """All children's parameters as one dict, the first child's value where two give one."""
    merged: dict[str, Any] | None = None
    owners: dict[str, Child] = {}
    errors = []
    for child, params in said:
        if params is None:
            continue
        merged = {} if merged is None else merged
        for name, value in params.items():
            if name in owners:
                errors.append(
                    ConnectorError(
                        f"MultiConnector: children {owners[name].key} and {child.key} both answer"
                        f" kv_transfer_params with {name!r}: let one of them be a consumer only, or"
                        " leave it out."
                    )
                )
                continue
            owners[name], merged[name] = child, value
    return merged, errors


def finished_count(children: Children, world_size: int) -> int | None:
    """How many workers report each id.

    A child of several of which not all workers report cannot be told apart from a slow one when a
    request is held for another child too. Raises: `ConfigError`.
    """
    counts = children.each("get_finished_count", lambda child: child.connector.get_finished_count())
    if len(counts) == 1 or all(count is None for count in counts):
        return counts[0]
    for child, count in zip(children, counts, strict=True):
        if count not in (None, world_size):
            raise ConfigError(
                f"MultiConnector's child {child.key}: get_finished_count answers {count} of"
                f" {world_size} workers. Beside other children every worker must report each id:"
                " let it answer None, or use it alone."
            )
    return world_size
