"""PipelineConnector's scheduler side: promises what host records hold, orders loads and saves.

Runs on the event loop and never waits. What can be saved follows from each step's message and the
request's hashes, never from a count of its own, so preemption and truncation need no care.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import (
    IDLE,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    Share,
    num_pairs,
)
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.planner import SavePlanner, Tracked
from interlace.connectors.pipeline.rates import Way
from interlace.connectors.pipeline.sched_choice import Hit, Loading, Sizes, Traffic, WayChooser
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.pipeline.sched_loads import OpenLoads, Wanted
from interlace.connectors.pipeline.sched_params import (
    SKIP_LOAD,
    SKIP_SAVE,
    check_params,
    has_flag,
)
from interlace.connectors.pipeline.sched_samples import TimedSteps
from interlace.connectors.pipeline.sched_split import PlannedStep, Split, stop_of_step
from interlace.connectors.pipeline.sched_stats import Counter, PipelineStats
from interlace.connectors.pipeline.sched_tier import NOTHING_AT_HAND, AtHand, MemoryTier, Stored
from interlace.connectors.slab_store.layout import MOST_TOKENS
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.connectors.step_tables import computed_before, follow_blocks
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.transfer_picture import ConnectorPicture


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What the configuration says to the scheduler side."""

    block_size: int
    """Tokens."""
    max_step_tokens: int
    """That a step computes at most."""
    max_inflight_steps: int
    load_mode: LoadMode
    max_stall_s: float
    """See `choose_way`."""
    may_load: bool
    """A producer may not."""
    may_save: bool
    """A consumer may not."""
    keeps_in_memory: bool = True
    """See `PipelineOptions.tiers`."""


class _Offer(NamedTuple):
    """The answer to a request's latest match query; void unless blocks are allocated for it."""

    num_local: int
    """Tokens that were cached on the device."""
    way: Way | None
    """None: nothing is stored."""
    floor: int = 0
    """With `Way.HYBRID`: the block up to which the request is computed."""
    at_hand: AtHand = NOTHING_AT_HAND
    """Of its blocks, what was found in registered slabs."""
    fetched_share: float = 0.0
    """Of its blocks, what has to be read first."""
    runs_at_once: bool = False
    """Whether the engine has asked for it."""


class PipelineScheduler:
    """See the module's docstring. The methods are the protocol's, on the event loop."""

    def __init__(
        self,
        handshake: PipelineHandshake,
        settings: SchedulerSettings,
        stored: StoredBlocks | None = None,
    ) -> None:
        """`handshake` is the worker side's, which has made the records. `stored`: what lies in
        files, if there is such a store."""
        self.index = HostIndex(handshake.num_records)
        self._settings = settings
        self._block_size = settings.block_size
        self._record_bytes = handshake.record_bytes
        sizes = Sizes(handshake.record_bytes, settings.block_size, settings.max_step_tokens)
        self.chooser = WayChooser(
            sizes, handshake.load_bytes_per_s, settings.load_mode, settings.max_stall_s
        )
        self._timed_steps = TimedSteps(settings.max_inflight_steps)
        self._counter = Counter()
        self._told: tuple[int, ...] = ()  # of what stands somehow
        self._tier = MemoryTier(self.index)
        if stored is not None:
            self._tier = files = FileTier(
                stored, self.index, self._counter, keeps_in_memory=settings.keeps_in_memory
            )
            files.note_mapped(handshake.mapped)
        self._planner = SavePlanner(self.index, self._counter, self._tier)
        self._loads = OpenLoads(self._tier, self.index, self._counter)
        self._requests: dict[str, Tracked] = {}
        self._offers: dict[str, _Offer] = {}
        # For the next metadata.
        self._shares: list[Share] = []
        self._lost_loads: set[int] = set()
        self._splits: dict[str, Split] = {}
        """Request id -> how it is split, from its load from the back on until it ends."""

    @property
    def is_idle(self) -> bool:
        """Whether no request, load or save is remembered."""
        return not (
            self._requests
            or self._offers
            or self._loads
            or self._splits
            or self._planner.num_open
            or self._tier.has_orders
        )

    # ---------------------------------------------------------------- loads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens in whole stored blocks, with at least one token left to compute, if loading them
        is the best way. Changes nothing but which answer is the latest.

        Raises: `RequestError` for bad `kv_transfer_params`, see `sched_params.py`.
        """
        check_params(request)
        tracked = self._requests.get(request.request_id)
        if not self._settings.may_load or (tracked is not None and tracked.load_failed):
            return 0, False
        if has_flag(request, SKIP_LOAD):
            return 0, False
        first = num_computed_tokens // self._block_size
        stored = self._stored_from(request, first)
        end = first + stored.num_blocks
        offer = _Offer(num_computed_tokens, None)
        if end > first:
            num_rest = request.num_tokens - end * self._block_size
            hit = Hit(first, stored, num_rest)
            choice = self.chooser.choose(hit, self._traffic())
            offer = _Offer(num_computed_tokens, *choice, stored.at_hand, stored.fetched_share)
        self._offers[request.request_id] = offer
        if offer.way is None or offer.way is Way.RECOMPUTE:
            return 0, False
        is_async = offer.way in (Way.BULK, Way.HYBRID)
        return end * self._block_size - num_computed_tokens, is_async

    def get_compute_end(self, request: Request) -> int | None:
        """What the split says, of a load from the back that is promised or under way."""
        split = self._splits.get(request.request_id)
        if split is not None:
            if not self._requests[request.request_id].is_loading:
                return split.compute_end
            return self._next_stop(request, request.num_computed_tokens, split.compute_end)
        offer = self._offers.get(request.request_id)
        if offer is None or offer.way is not Way.HYBRID:
            return None
        self._offers[request.request_id] = offer._replace(runs_at_once=True)
        return self._next_stop(request, offer.num_local, offer.floor * self._block_size)

    def _next_stop(self, request: Request, first: int, end: int) -> int:
        """Up to where the next step should compute tokens [first, end) while a load goes on.

        Between two steps the split is looked at again, and others get their tokens: so none is very
        long, and shorter where others run.
        """
        has_others = any(
            one.request.status is RequestStatus.RUNNING and not one.is_loading
            for one in self._requests.values()
            if one.request is not request
        )
        others_wait_s = self._settings.max_stall_s if has_others else None
        return stop_of_step(
            first, end, self._block_size, self.chooser.computing_s, others_wait_s=others_wait_s
        )

    def _stored_from(self, request: Request, first: int) -> Stored:
        """Of the request's blocks from `first` on, but for the one that holds the last token."""
        last = (request.num_tokens - 1) // self._block_size
        self._tier.refresh()
        return self._tier.look_up(request.block_hashes[first:last])

    def _traffic(self) -> Traffic:
        running = RequestStatus.RUNNING
        num_running = sum(one.request.status is running for one in self._requests.values())
        in_step, beside = self._loads.blocks_ahead()
        return Traffic(num_running, in_step * self._record_bytes, beside * self._record_bytes)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks, and order the load of those that were promised."""
        (block_ids,) = blocks.get_block_ids()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, skips_save=has_flag(request, SKIP_SAVE))
            self._requests[request.request_id] = tracked
            if request.block_hashes:
                first_tokens = request.prompt_token_ids[:MOST_TOKENS]
                self._tier.note_prompt(request.block_hashes[0], first_tokens)
        tracked.block_ids = block_ids
        tracked.num_settled = 0
        self._splits.pop(request.request_id, None)
        offer = self._offers.pop(request.request_id, None)
        if offer is not None and offer.way is not None:
            self._count_choice(offer.way, num_external_tokens)
        if num_external_tokens == 0:
            self.index.touch(request.block_hashes[: len(block_ids)])
            return
        assert offer is not None, "blocks are loaded that were not promised"
        self._order_load(tracked, offer, num_external_tokens)

    def _count_choice(self, way: Way, num_external_tokens: int) -> None:
        """Another connector, or a part of a block, may have been taken in place of ours."""
        if way is Way.RECOMPUTE or num_external_tokens:
            self._counter.add(f"chose_{way.name.lower()}")

    def _order_load(self, tracked: Tracked, offer: _Offer, num_tokens: int) -> None:
        request = tracked.request
        first = offer.num_local // self._block_size
        end = (offer.num_local + num_tokens) // self._block_size
        # What is loaded is pinned, and goes last when it has come: see `OpenLoads.end`.
        self.index.touch(request.block_hashes[:first])
        split = None
        if offer.runs_at_once:
            split = self._splits[request.request_id] = Split(
                self._loads.next_id(),
                offer.floor,
                end,
                self._block_size,
                fetched_share=offer.fetched_share,
            )
        wanted = Wanted(
            request.request_id,
            request.block_hashes[:end],
            first,
            tracked.block_ids[first:end],
            offer.at_hand,
            is_async=offer.way in (Way.BULK, Way.HYBRID),
            may_store=self._settings.may_save and not tracked.skips_save,
        )
        self._loads.order(wanted, split)
        tracked.is_loading = wanted.is_async
        if first == 0:
            tracked.num_settled = end  # all of it is stored: nothing is to be saved

    # ---------------------------------------------------------------- steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        """The step's orders."""
        preempted = scheduler_output.preempted_req_ids
        if self._settings.may_save or preempted:  # else blocks that come later are never asked for
            follow_blocks(scheduler_output, self._requests)
        for request_id in preempted & self._requests.keys() if preempted else ():
            self._planner.fence(self._requests[request_id])
            self._lose_load(self._requests[request_id])
        expected_s = 0.0
        if self._splits or self._settings.may_save:
            before = computed_before(scheduler_output)
            self._follow_computed(scheduler_output, before)
            expected_s = self._expected_s(scheduler_output, before)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        is_timed = not self._loads.has_orders_within and self._timed_steps.choose(num_tokens)
        if not (is_timed or self._timed_steps.expects_report or self._has_orders):
            return IDLE
        orders = self._planner.take_orders()
        shares, self._shares = self._shares, []
        lost_loads, self._lost_loads = self._lost_loads, set()
        return PipelineMetadata(
            step_id=scheduler_output.step_id,
            loads=self._loads.take_orders(),
            saves=tuple(orders.saves),
            fences=frozenset(orders.fences),
            release=frozenset(orders.release),
            shares=tuple(shares),
            stores=self._tier.take_orders(),
            closed=self._tier.take_closed(),
            lost_loads=frozenset(lost_loads),
            num_tokens=num_tokens,
            timed_pairs=_num_pairs(scheduler_output) if is_timed else None,
            expected_s=expected_s,
        )

    def _expected_s(self, output: SchedulerOutput, before: Mapping[str, int]) -> float:
        """How long the device will compute for the longest of the fronts in the step; 0 if there is
        none, or if that is not known. Decodes beside it hardly count."""
        counts = output.num_scheduled_tokens
        fronts = [request_id for request_id in self._splits if request_id in counts]
        times = (self.chooser.computing_s(before[i], before[i] + counts[i]) for i in fronts)
        return max((seconds for seconds in times if seconds is not None), default=0.0)

    @property
    def _has_orders(self) -> bool:
        """Whether the worker side is to do something, or has something under way."""
        return bool(
            self._loads
            or self._shares
            or self._lost_loads
            or self._planner.has_orders
            or self._tier.has_orders
        )

    def _follow_computed(self, output: SchedulerOutput, before: Mapping[str, int]) -> None:
        """What the step computes may be saved, and may meet what is loaded from the back."""
        self._adjust_splits(output, before)
        if self._settings.may_save:
            self._plan_saves(output, before)

    def _plan_saves(self, output: SchedulerOutput, before: Mapping[str, int]) -> None:
        requests, block_size = self._requests, self._block_size
        for request_id, num_new in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None:
                continue
            num_filled = (before[request_id] + num_new) // block_size
            if num_filled > tracked.num_settled:  # not so in most steps: no call then
                self._planner.plan(tracked, num_filled)

    def _lose_load(self, tracked: Tracked) -> None:
        """The request was preempted: a load from the back ends with it."""
        tracked.is_loading = False
        split = self._splits.pop(tracked.request.request_id, None)
        if split is not None and split.load_id in self._loads:
            split.lose()
            self._lost_loads.add(split.load_id)

    def _adjust_splits(self, output: SchedulerOutput, before: Mapping[str, int]) -> None:
        for request_id, split in self._splits.items():
            request = self._requests[request_id].request
            num_computed = before.get(request_id, request.num_computed_tokens)
            step = PlannedStep(
                output.step_id,
                num_computed,
                num_computed + output.num_scheduled_tokens.get(request_id, 0),
                self._settings.max_inflight_steps,
            )
            loading = Loading(0, split.fetched_share)
            chooser = self.chooser
            share = split.adjust(
                step, chooser.computing_s, functools.partial(chooser.loading_s, loading=loading)
            )
            if share is not None:
                self._shares.append(share)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bad blocks first, then what the worker side reports of loads and saves."""
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._planner.distrust(invalid)
            self._distrust_loads(invalid)
        for request_id in (connector_output.finished_recving or set()) & self._requests.keys():
            self._requests[request_id].is_loading = False
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, PipelineReport):
            return
        self._count(report)
        self._loads.follow(report.shares)
        self._loads.end(report)
        self._tier.follow(report)
        self._planner.allow(report.copied)
        self._planner.fail(report.failed)
        self.chooser.learn(report)

    def _count(self, report: PipelineReport) -> None:
        for name, number in report.counts:
            self._counter.add(name, number)
        for what, samples in (("load", report.loads), ("fetch", report.fetches)):
            for sample in samples:
                self._counter.add(f"{what}_us", round(sample.seconds * 1e6))
                self._counter.add(f"{what}_timed_bytes", sample.num_bytes)
        self._counter.set_levels(dict(report.levels))

    def _distrust_loads(self, invalid: set[int]) -> None:
        """Records that could not be loaded are not promised again, and who lost some is promised
        nothing more: a load that fails each time would be promised for ever."""
        self._loads.distrust(invalid)
        for tracked in self._requests.values():
            tracked.num_settled = 0
            tracked.load_failed |= not invalid.isdisjoint(tracked.block_ids)

    # ---------------------------------------------------------------- ends

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request while a save of it is open; plan what is known to be full only now: it
        is copied in the next step.

        Plan nothing of a request that failed. Hold none that still loads: the end of its load
        frees its blocks, and no second report may come. Nor one without blocks: the next step may
        hand on what a preemption took. So their saves are fenced, and a load from the back is lost
        if no step has told of the preemption yet.
        """
        self._offers.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        if not block_ids:
            self._lose_load(tracked)
        split = self._splits.pop(request.request_id, None)
        if split is not None and (share := split.cancel()) is not None:
            self._shares.append(share)
        if tracked.is_loading or not block_ids:
            self._planner.fence(tracked)
            return False, None
        self.index.touch(request.block_hashes[: len(block_ids)])
        if self._settings.may_save and request.status is not RequestStatus.FINISHED_ERROR:
            tracked.block_ids = list(block_ids)
            self._planner.plan(tracked, request.num_computed_tokens // self._block_size)
        return self._planner.hold(tracked), None

    def reset_cache(self) -> None:
        """Forget all that is stored or being saved. Records are free when nothing reads or fills
        them any more."""
        self.index.clear()
        self._planner.distrust_all()
        self._tier.forget()

    def close(self, timeout_s: float) -> None:
        """Look at no files any more."""
        self._tier.close(timeout_s)

    def picture(self) -> ConnectorPicture:
        """Where blocks are kept: for people. Constant time."""
        tiers = self._tier.tiers_seen(self._counter, self._record_bytes)
        return ConnectorPicture("PipelineConnector", tiers=tiers)

    def take_stats(self) -> PipelineStats | None:
        """What was counted since the last call, and what stands otherwise; None if it is
        nothing."""
        index = self.index
        num_stored, num_free = index.num_stored, index.num_free
        now = (self._loads.num_open, self._planner.num_open, num_stored, num_free)
        if now != self._told:  # not so after most steps
            self._told = now
            names = ("open_loads", "open_saves", "records_stored", "records_free")
            self._counter.set_levels(dict(zip(names, now, strict=True)))
            num_busy = index.num_records - num_stored - num_free
            self._counter.set_levels({"records_busy": num_busy})
        stats = self._counter.take()
        if stats is not None:
            stats.add_bytes(self._record_bytes)
        return stats

    def __repr__(self) -> str:
        return (
            f"<PipelineScheduler requests={len(self._requests)} {self.index!r} {self._planner!r}>"
        )


def _num_pairs(output: SchedulerOutput) -> float:
    """Of all of the step's requests."""
    before = computed_before(output)
    counts = output.num_scheduled_tokens
    return sum(num_pairs(count, before[request_id]) for request_id, count in counts.items())
