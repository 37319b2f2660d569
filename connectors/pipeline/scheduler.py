"""PipelineConnector's scheduler side: promises what host records hold, orders loads and saves.

Runs on the event loop and never waits. What can be saved follows from each step's message and the
request's hashes, never from a count of its own, so preemption and truncation need no care.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import (
    Load,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    Share,
    num_pairs,
)
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.planner import SavePlanner, Tracked
from interlace.connectors.pipeline.rates import Forecast, LoadRate, StepTimes, Way, choose_way
from interlace.connectors.pipeline.sched_files import (
    NOTHING_AT_HAND,
    FileTier,
    Found,
    Stored,
    Taken,
)
from interlace.connectors.pipeline.sched_params import (
    SKIP_LOAD,
    SKIP_SAVE,
    check_params,
    has_flag,
)
from interlace.connectors.pipeline.sched_runs import record_runs
from interlace.connectors.pipeline.sched_samples import TimedSteps
from interlace.connectors.pipeline.sched_split import PlannedStep, Split, balance, stop_of_step
from interlace.connectors.pipeline.sched_stats import Counter, PipelineStats
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.connectors.step_tables import computed_before, follow_blocks
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput


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
    at_hand: Mapping[bytes, Found] = NOTHING_AT_HAND
    """Of its blocks, what was found in registered slabs."""
    fetched_share: float = 0.0
    """Of its blocks, what has to be read first."""
    runs_at_once: bool = False
    """Whether the engine has asked for it."""


class _Loading(NamedTuple):
    """What a load beside the steps depends on, besides its size."""

    bytes_ahead: int
    """That are copied before."""
    fetched_share: float
    """See `_Offer`."""


class _Choice(NamedTuple):
    """How a request's stored KV is to come."""

    way: Way
    floor: int
    """See `_Offer`."""


class _OpenLoad(NamedTuple):
    """A load that was ordered, until the worker side has done with its records."""

    prefix: tuple[bytes, ...]
    """Hashes from the request's first block to the last one that is loaded."""
    records: dict[int, int]
    """Block id -> the record that it is loaded from, or may be, in order of position."""
    is_async: bool
    split: Split | None = None
    """Of a load from the back."""
    fetched: tuple[int, ...] = ()
    """The records among these into which blocks are read from files."""
    mapped: tuple[Found, ...] = ()
    """Those that lie in registered slabs."""
    offers_from: int | None = None
    """Blocks of the prefix from there on may be written to files; None: nothing."""
    failed: frozenset[int] = frozenset()
    """Block ids that were not filled, once that was reported: a read or a copy that is late goes on
    for a while, and the load with it."""

    @property
    def num_open_blocks(self) -> int:
        """Blocks that are still to be loaded, as far as is known."""
        return len(self.records) if self.split is None else self.split.num_open_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that are loaded in all."""
        return len(self.records) if self.split is None else self.split.num_blocks


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
        self._load_rate = LoadRate(handshake.load_bytes_per_s)
        self._step_times = StepTimes()
        self.last_forecast: Forecast | None = None
        """Of the request that was matched last and had something stored: for measurements."""
        self._timed_steps = TimedSteps(settings.max_inflight_steps)
        self._counter = Counter()
        self._files = None
        if stored is not None:
            self._files = FileTier(
                stored, self.index, self._counter, keeps_in_memory=settings.keeps_in_memory
            )
            self._files.note_mapped(handshake.mapped)
        self._fetch_rate = LoadRate(0)
        self._planner = SavePlanner(
            self.index, self._counter, self._files if settings.may_save else None
        )
        self._requests: dict[str, Tracked] = {}
        self._offers: dict[str, _Offer] = {}
        # For the next metadata.
        self._loads: list[Load] = []
        self._shares: list[Share] = []
        self._lost_loads: set[int] = set()
        self._last_load_id = 0
        self._open_loads: dict[int, _OpenLoad] = {}
        self._splits: dict[str, Split] = {}
        """Request id -> how it is split, from its load from the back on until it ends."""

    @property
    def load_mode(self) -> LoadMode:
        """How loads are forced, if they are. May be set: requests that are matched from then on
        follow it."""
        return self._settings.load_mode

    @load_mode.setter
    def load_mode(self, load_mode: LoadMode) -> None:
        self._settings = dataclasses.replace(self._settings, load_mode=load_mode)

    def restart_load_rate(self, bytes_per_s: float) -> None:
        """Expect such a rate of loads, as if it had been measured at the start."""
        self._load_rate = LoadRate(bytes_per_s)

    @property
    def is_idle(self) -> bool:
        """Whether no request, load or save is remembered."""
        return not (
            self._requests
            or self._offers
            or self._loads
            or self._open_loads
            or self._splits
            or self._planner.num_open
            or (self._files is not None and self._files.has_orders)
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
            choice = self._choose(request, num_computed_tokens, stored)
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
            first, end, self._block_size, self._computing_s, others_wait_s=others_wait_s
        )

    def _stored_from(self, request: Request, first: int) -> Stored:
        """Of the request's blocks from `first` on, but for the one that holds the last token."""
        last = (request.num_tokens - 1) // self._block_size
        hashes = request.block_hashes[first:last]
        if self._files is not None:
            self._files.refresh()
            return self._files.look_up(hashes)
        known = itertools.takewhile(self.index.__contains__, hashes)
        return Stored(sum(1 for _ in known))

    def _choose(self, request: Request, num_local: int, stored: Stored) -> _Choice:
        """How what is stored of the request behind `num_local` tokens is to come."""
        first, num_blocks = num_local // self._block_size, stored.num_blocks
        end = first + num_blocks
        num_loaded = num_blocks * self._block_size
        num_rest = request.num_tokens - num_local - num_loaded
        num_running = self._num_running()
        num_first = min(num_rest + num_running, self._settings.max_step_tokens)
        step_bytes, beside_bytes = self._bytes_ahead()
        loading = _Loading(beside_bytes, stored.fetched_share)
        floor, hybrid_s = self._split(first, end, loading)
        forecast = self.last_forecast = Forecast(
            load_s=self._load_rate.seconds(step_bytes + num_blocks * self._record_bytes),
            bulk_load_s=self._loading_s(num_blocks, loading),
            hybrid_s=hybrid_s,
            recompute_s=self._step_times.seconds(num_loaded + num_rest, num_local),
            rest_s=self._step_times.seconds(num_rest, num_local + num_loaded),
            first_step_s=self._step_times.seconds(num_first, num_local + num_loaded),
            num_running=num_running,
            may_load_within=stored.num_fetched == 0,
        )
        way = choose_way(self._settings.load_mode, forecast, self._settings.max_stall_s)
        if way is Way.HYBRID and num_blocks == 1:
            way = Way.BULK  # there is nothing to split
        return _Choice(way, min(max(floor, first + 1), end - 1))

    def _split(self, first: int, end: int, loading: _Loading) -> tuple[int, float | None]:
        """(the block before which blocks [first, end) are best computed, and from which they are
        loaded; seconds until both are done). In the middle if rates are not known."""

        def computing_s(block: int) -> float:
            return self._computing_s(first * self._block_size, block * self._block_size) or 0.0

        def loading_s(block: int) -> float:
            return self._loading_s(end - block, loading) or 0.0

        if not computing_s(end) or not loading_s(first):
            return (first + end) // 2, None
        floor = balance(first, end, computing_s, loading_s)
        hybrid_s = max(computing_s(floor), loading_s(floor))
        return floor, None if floor in (first, end) else hybrid_s

    def _computing_s(self, first: int, end: int) -> float | None:
        return self._step_times.seconds(end - first, first)

    def _loading_s(self, num_blocks: int, loading: _Loading) -> float | None:
        """Reading goes on while what was read is copied: the slower one counts. None if a rate is
        not known."""
        num_bytes = num_blocks * self._record_bytes
        copy_s = self._load_rate.seconds(loading.bytes_ahead + num_bytes)
        if not loading.fetched_share:
            return copy_s
        fetch_s = self._fetch_rate.seconds(round(num_bytes * loading.fetched_share))
        return None if copy_s is None or fetch_s is None else max(copy_s, fetch_s)

    def _num_running(self) -> int:
        running = RequestStatus.RUNNING
        return sum(one.request.status is running for one in self._requests.values())

    def _bytes_ahead(self) -> tuple[int, int]:
        """Bytes that go before a further load of the next step: (within the step, beside it)."""
        in_step = sum(run.num_blocks for one in self._loads if not one.is_async for run in one.runs)
        beside = sum(one.num_open_blocks for one in self._open_loads.values() if one.is_async)
        # Of a load from the back much is under way at a time.
        hurried = sum(one.num_open_blocks for one in self._open_loads.values() if one.split)
        in_step += hurried
        return in_step * self._record_bytes, (in_step + beside - hurried) * self._record_bytes

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks, and order the load of those that were promised."""
        (block_ids,) = blocks.get_block_ids()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, skips_save=has_flag(request, SKIP_SAVE))
            self._requests[request.request_id] = tracked
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
        # What is loaded is pinned, and goes last when it has come: see `_end_load`.
        self.index.touch(request.block_hashes[:first])
        hashes, block_ids = request.block_hashes[first:end], tracked.block_ids[first:end]
        taken = self._take(hashes, offer.at_hand)
        if taken.missing and offer.runs_at_once:
            # What is loaded from the back has no holes.
            taken = self._give_back(taken, hashes)
        missing: tuple[int, ...] = ()
        if taken.missing:
            blocks = dict[bytes, int](zip(hashes, block_ids, strict=True))
            missing = tuple(blocks[one] for one in taken.missing)
            hashes = [one for one in hashes if one in taken.records]
            block_ids = [blocks[one] for one in hashes]
        records = list(map(taken.records.__getitem__, hashes))
        is_async = offer.way in (Way.BULK, Way.HYBRID)
        self._last_load_id += 1
        load_id = self._last_load_id
        split = None
        if offer.runs_at_once:
            split = self._splits[request.request_id] = Split(
                load_id, offer.floor, end, self._block_size, fetched_share=offer.fetched_share
            )
        self._loads.append(
            Load(
                load_id,
                request.request_id,
                record_runs(records, block_ids),
                is_async,
                None if split is None else split.num_blocks,
                taken.fetches,
                missing,
                {one.record: one.place.entry.checksum for one in taken.mapped},
            )
        )
        self._open_loads[load_id] = _OpenLoad(
            tuple(request.block_hashes[:end]),
            dict(zip(block_ids, records, strict=True)),
            is_async,
            split,
            tuple(taken.records[one] for one in taken.fetched),
            taken.mapped,
            offers_from=None if tracked.skips_save else first,
        )
        tracked.is_loading = is_async
        if first == 0:
            tracked.num_settled = end  # all of it is stored: nothing is to be saved

    def _give_back(self, taken: Taken, block_hashes: Sequence[bytes]) -> Taken:
        """Nothing is loaded of what was taken for these blocks."""
        assert self._files is not None, "else nothing is missing"
        fetched = [taken.records[block_hash] for block_hash in taken.fetched]
        self._unpin(taken.records.values(), fetched, taken.mapped)
        self._files.settle(fetched, frozenset(fetched), frozenset(), {}, fetched)
        return Taken({}, (), (), tuple(block_hashes))

    def _unpin(
        self, records: Iterable[int], fetched: Iterable[int], mapped: Iterable[Found]
    ) -> None:
        """A load reads these no more: what is fetched, or mapped, is not pinned."""
        others = {*fetched, *(one.record for one in mapped)}
        self.index.unpin([record for record in records if record not in others])

    def _take(self, block_hashes: Sequence[bytes], at_hand: Mapping[bytes, Found]) -> Taken:
        if self._files is not None:
            return self._files.take(block_hashes, at_hand)
        records = self.index.pin(block_hashes)
        return Taken(dict(zip(block_hashes, records, strict=True)), (), (), ())

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
        loads_within = any(not load.is_async for load in self._loads)
        is_timed = not loads_within and self._timed_steps.choose(num_tokens)
        if not (is_timed or self._timed_steps.expects_report or self._has_orders):
            return PipelineMetadata(
                step_id=scheduler_output.step_id, num_tokens=num_tokens, is_idle=True
            )
        orders = self._planner.take_orders()
        loads, self._loads = self._loads, []
        shares, self._shares = self._shares, []
        lost_loads, self._lost_loads = self._lost_loads, set()
        return PipelineMetadata(
            step_id=scheduler_output.step_id,
            loads=tuple(loads),
            saves=tuple(orders.saves),
            fences=frozenset(orders.fences),
            release=frozenset(orders.release),
            shares=tuple(shares),
            stores=() if self._files is None else self._files.take_orders(),
            closed=frozenset() if self._files is None else self._files.take_closed(),
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
        times = (self._computing_s(before[i], before[i] + counts[i]) for i in fronts)
        return max((seconds for seconds in times if seconds is not None), default=0.0)

    @property
    def _has_orders(self) -> bool:
        """Whether the worker side is to do something, or has something under way."""
        return bool(
            self._open_loads or self._shares or self._lost_loads or self._planner.has_orders
        ) or (self._files is not None and self._files.has_orders)

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
        if split is not None and split.load_id in self._open_loads:
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
            loading = _Loading(0, split.fetched_share)
            share = split.adjust(
                step, self._computing_s, functools.partial(self._loading_s, loading=loading)
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
        for name, number in report.counts:
            self._counter.add(name, number)
        for share in report.shares:
            opened = self._open_loads.get(share.load_id)
            if opened is not None and opened.split is not None:
                opened.split.follow(share)
        for load_id in report.loaded:
            self._end_load(load_id, report)
        if self._files is not None:
            self._files.end_stores(report.stored, report.unstored)
            self._files.note_mapped(report.mapped, report.closing)
            self._fetch_rate.add(report.fetches)
        self._planner.allow(report.copied)
        self._planner.fail(report.failed)
        self._load_rate.add(report.loads)
        self._step_times.add(report.steps)

    def _distrust_loads(self, invalid: set[int]) -> None:
        """Records that could not be loaded are not promised again, and who lost some is promised
        nothing more: a load that fails each time would be promised for ever."""
        for load_id, opened in self._open_loads.items():
            failed = frozenset(opened.records.keys() & invalid)
            if opened.failed or not failed:  # what is said later is about others' loads
                continue
            self._open_loads[load_id] = opened._replace(failed=failed)
            records = [opened.records[block_id] for block_id in failed]
            for record in records:
                self.index.forget(record)
            if self._files is not None:
                self._files.avoid(records, opened.mapped)
        for tracked in self._requests.values():
            tracked.num_settled = 0
            tracked.load_failed |= not invalid.isdisjoint(tracked.block_ids)

    def _end_load(self, load_id: int, report: PipelineReport) -> None:
        """A load reads no record any more. What it loaded was used last of all only now, and its
        head still goes last."""
        opened = self._open_loads.pop(load_id, None)
        if opened is None:
            return
        self._offer_loaded(opened)
        self._unpin(opened.records.values(), opened.fetched, opened.mapped)
        if self._files is not None and (opened.fetched or opened.mapped):
            parents = dict(zip(opened.prefix[1:], opened.prefix, strict=False))
            self._files.settle(
                opened.fetched, report.unfetched, report.damaged, parents, report.unneeded
            )
            self._files.settle_mapped(opened.mapped, report.damaged)
        self.index.touch(opened.prefix)
        num_failed = len(opened.failed)
        self._counter.add("blocks_loaded", max(0, opened.num_blocks - num_failed))
        self._counter.add("blocks_failed_to_load", num_failed)

    def _offer_loaded(self, opened: _OpenLoad) -> None:
        """What lies in memory only may be worth a file by now."""
        first = opened.offers_from
        if self._files is not None and self._settings.may_save and first is not None:
            self._files.offer(opened.prefix[first:], opened.prefix[first - 1] if first else None)

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
        if self._files is not None:
            self._files.forget()

    def close(self, timeout_s: float) -> None:
        """Look at no files any more."""
        if self._files is not None:
            self._files.close(timeout_s)

    def take_stats(self) -> PipelineStats | None:
        """What was counted since the last call; None if it is nothing."""
        return self._counter.take()

    def __repr__(self) -> str:
        return (
            f"<PipelineScheduler requests={len(self._requests)} {self.index!r} {self._planner!r}>"
        )


def _num_pairs(output: SchedulerOutput) -> float:
    """Of all of the step's requests."""
    before = computed_before(output)
    counts = output.num_scheduled_tokens
    return sum(num_pairs(count, before[request_id]) for request_id, count in counts.items())
