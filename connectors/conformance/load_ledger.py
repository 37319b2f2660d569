"""Which loads are under way, into which blocks, and which requests are held.

Follows the hooks of all sides by itself, so that what the engine believes need not be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.connectors.step_tables import computed_before
from interlace.engine.block_pool import BlockPool
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


@dataclasses.dataclass(slots=True, eq=False)
class Load:
    """KV that a connector is to bring."""

    request: Request
    is_async: bool
    start: int
    stop: int
    """Positions [start, stop)."""
    block_ids: tuple[int, ...]
    """Of these positions."""
    cached_ids: tuple[int, ...]
    """Of the request's blocks before these, which are there already."""
    hashes: tuple[bytes | None, ...]
    """Of those blocks; None for one that is not full."""
    token_ids: tuple[int, ...]
    """All up to `stop`."""
    generations: tuple[int, ...]
    """When the blocks were handed out."""
    step_id: int = 0
    """The step that it begins with; 0 while that is being planned."""
    open_ranks: set[int] = dataclasses.field(default_factory=set)
    """Workers on which it has not ended."""
    in_graph: bool = False
    """Whether its step is replayed as one CUDA graph, which calls no hooks of layers."""
    waited: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """(rank, layer) that were waited for, or could not be, since the step is one graph."""
    invalid: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """(rank, block id) that were reported as lost."""
    is_from_the_back: bool = False
    """Whether the request runs meanwhile, and computes what is before."""
    num_planned: int = 0
    """Tokens of such a request that steps compute or have computed: not the load's to write."""
    is_lost: bool = False
    """Whether the request was preempted: the load ends with `handle_preemptions`."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"the load of {self.request.request_id}"

    def parts(self, block_size: int) -> Iterator[tuple[int, int, int]]:
        """(block id, begin, end): which positions come into each block."""
        first = self.start // block_size
        for index, block_id in enumerate(self.block_ids, first):
            begin = max(self.start, index * block_size)
            yield block_id, begin, min(self.stop, (index + 1) * block_size)

    def may_write(self, block_id: int, block_size: int) -> bool:
        """Whether the block is one that it brings, as far as is known."""
        return any(
            found == block_id and (not self.is_from_the_back or begin >= self.num_planned)
            for found, begin, _ in self.parts(block_size)
        )


class LoadLedger(Detector):
    """See the module's docstring. `block_size` is in tokens."""

    hooks = frozenset(
        (
            "get_num_new_matched_tokens",
            "get_compute_end",
            "update_state_after_alloc",
            "build_connector_meta",
            "handle_preemptions",
            "request_finished",
            "request_finished_all_groups",
        )
    )

    def __init__(
        self,
        watch: Watch,
        pool: BlockPool,
        *,
        block_size: int,
        num_ranks: int,
        generation_of: Callable[[int], int],
    ) -> None:
        self._watch = watch
        self._pool = pool
        self.block_size = block_size
        self._num_ranks = num_ranks
        self._generation_of = generation_of
        self._asked: dict[str, tuple[int, bool]] = {}
        """Request id -> (computed tokens, answered "asynchronously") of the latest match query."""
        self._runs_at_once: set[str] = set()
        """Requests of which the latest promise is a load from the back."""
        self.loads: list[Load] = []
        """Planned or under way."""
        self._complete: dict[int, int] = {}
        """Block id -> its generation when a load into it was found complete."""
        self.held: dict[str, set[int]] = {}
        """Ended requests that the connector holds -> ranks that have not reported them."""

    # ---------------------------------------------------------------- following the hooks

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if call.error is not None:
            return
        match call.hook:
            case "get_num_new_matched_tokens":
                request, computed = call.args
                self._asked[request.request_id] = (computed, call.answer[1])
                self._runs_at_once.discard(request.request_id)
            case "get_compute_end":
                self._follow_compute_end(call.args[0].request_id, call.answer)
            case "update_state_after_alloc":
                request, blocks, num_tokens = call.args
                if num_tokens:
                    self._plan(request, blocks.get_block_ids()[0], num_tokens)
            case "build_connector_meta":
                self._follow_step(call.args[0])
            case "handle_preemptions":
                for load in [load for load in self.loads if load.is_lost]:
                    self.end(load, call.rank, is_complete=False)
            case "request_finished" | "request_finished_all_groups":
                request = call.args[0]
                self._asked.pop(request.request_id, None)
                self._runs_at_once.discard(request.request_id)
                if call.answer[0]:
                    self.held[request.request_id] = set(range(self._num_ranks))
                    self._watch.evidence["held"] += 1

    def _follow_compute_end(self, request_id: str, compute_end: int | None) -> None:
        """With nothing to compute, the request waits for its load."""
        num_computed, _ = self._asked.get(request_id, (0, False))
        if compute_end is not None and compute_end > num_computed:
            self._runs_at_once.add(request_id)

    def _follow_step(self, output: SchedulerOutput) -> None:
        before = computed_before(output)
        for load in self.loads:
            load.step_id = load.step_id or output.step_id
            request_id = load.request.request_id
            if request_id in before:
                planned = before[request_id] + output.num_scheduled_tokens[request_id]
                load.num_planned = max(load.num_planned, planned)
            load.is_lost |= load.is_from_the_back and request_id in output.preempted_req_ids

    def _plan(self, request: Request, table: list[int], num_tokens: int) -> None:
        start, is_async = self._asked.get(request.request_id, (0, False))
        size = self.block_size
        stop = start + num_tokens
        blocks = range(start // size, -(-stop // size))
        hashes = request.block_hashes
        ids = tuple(table[index] for index in blocks)
        self.loads.append(
            Load(
                request,
                is_async,
                start,
                stop,
                ids,
                tuple(table[: blocks.start]),
                tuple(hashes[i] if i < len(hashes) else None for i in blocks),
                tuple(request.all_token_ids[:stop]),
                tuple(self._generation_of(block_id) for block_id in ids),
                open_ranks=set(range(self._num_ranks)),
                is_from_the_back=request.request_id in self._runs_at_once,
            )
        )
        self._watch.evidence["async loads" if is_async else "sync loads"] += 1
        self._watch.evidence["loaded tokens"] += num_tokens

    # ---------------------------------------------------------------- loads under way

    def running(self, rank: int) -> Iterator[Load]:
        """Loads that the worker has been told of and that have not ended there."""
        for load in self.loads:
            if rank not in load.open_ranks or not 0 < load.step_id <= self._watch.step_id:
                continue
            if load.is_async or load.step_id == self._watch.step_id:
                yield load

    def load_to_report(self, request_id: str, rank: int) -> Load | None:
        """The asynchronous load of that request which is under way on that worker."""
        for load in self.loads:
            if load.is_async and load.request.request_id == request_id and rank in load.open_ranks:
                return load if 0 < load.step_id <= self._watch.step_id else None
        return None

    def running_step_loads(self, rank: int) -> list[Load]:
        """Those of the step that runs."""
        return [load for load in self.running(rank) if not load.is_async]

    def end(self, load: Load, rank: int, *, is_complete: bool) -> None:
        """A load has ended on a worker."""
        load.open_ranks.discard(rank)
        if load.open_ranks:
            return
        self.loads.remove(load)
        if is_complete and not load.is_from_the_back:
            self._complete.update(zip(load.block_ids, load.generations, strict=True))

    def may_write(self, block_id: int, rank: int, layer: str) -> bool:
        """Whether a load into that block of that layer goes on."""
        return any(
            load.may_write(block_id, self.block_size)
            and (load.is_async or (rank, layer) not in load.waited)
            for load in self.running(rank)
        )

    def is_late(self, block_id: int, rank: int) -> bool:
        """Whether the step that runs loads the block, in a layer that was waited for."""
        return any(block_id in load.block_ids for load in self.running_step_loads(rank))

    def was_loaded(self, block_id: int) -> bool:
        """Whether its content was loaded, completely, since it was handed out."""
        return self._complete.get(block_id) == self._generation_of(block_id)

    def exists(self, block_id: int) -> bool:
        """Whether it is a block of the pool, other than the null block."""
        return 0 < block_id < len(self._pool.blocks)

    def describe(self, block_id: int) -> str:
        """Who has the block."""
        if block_id == 0:
            return "the null block"
        if not self.exists(block_id):
            return "which does not exist"
        holders = self._pool.blocks[block_id].ref_cnt
        return {0: "which is free", 1: "which a request holds"}.get(
            holders, f"which {holders} requests share"
        )
