"""`interlace check` against mistakes that its own list does not have, and right connectors in
unusual styles. What it does not find yet is an expected failure."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from memory_connector import MemoryConnector
from memory_messages import LoadBlock, MemoryMetadata, SaveOrder
from memory_scheduler import Tracked
from memory_store import MemoryStore
from memory_worker import Load, StepSaves

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance import CheckReport, check_connector
from interlace.engine.kv_connector import KVCacheBlocks
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


def check(
    cls: type[KVConnectorBase_V1], *only: str, is_async: bool = False, workers: int = 1
) -> CheckReport:
    extra = {"store": MemoryStore(), "load_async": is_async, "save_async": is_async}
    return check_connector(cls, extra, only=only, fail_fast=True, workers=workers)


# -------------------------------------------------------------------- new mistakes, found


class LoadsOneBlockTooFew(MemoryConnector):
    """A range that ends one too soon."""

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        blocks = list(super().blocks_to_load(request, block_ids, start, end))
        yield from blocks[:-1] if len(blocks) > 1 else blocks


class SavesTheNextBlock(MemoryConnector):
    """Counts the blocks of later chunks from 1."""

    def _open_save(self, tracked: Tracked, index: int, key: bytes) -> SaveOrder:
        order = super()._open_save(tracked, index, key)
        if index < 2 or len(tracked.block_ids) <= index + 1:
            return order
        return dataclasses.replace(order, block_id=tracked.block_ids[index + 1])


class BlamesAnotherRequest(MemoryConnector):
    """Looks for the lost block's id in the step's last load, whoever's failed."""

    def blocks_to_report(self, load: Load) -> set[int]:
        if not load.lost or not self._step_loads:
            return load.lost
        blocks = self._step_loads[-1].order.blocks
        return {block.block_id for block in blocks[: len(load.lost)]}


class KeepsTheMessagesList(MemoryConnector):
    """Takes a new request's list of blocks as its own table, and appends to it."""

    def _follow_tables(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tracked[new.req_id].block_ids = new.block_ids[0]
        super()._follow_tables(output)


class AnswersFromItsFirstQuery(MemoryConnector):
    """Remembers how much was cached here when it was asked first."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = self._asked_at.get(request.request_id, num_computed_tokens)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._asked_at[request.request_id] = first
        return answer


class ShortensTheHashes(MemoryConnector):
    """Leaves a token to compute by dropping the request's last hash."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if len(request.block_hashes) * self._block_size == request.num_tokens:
            request.block_hashes.pop()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class OneRankHidesFailures(MemoryConnector):
    """Reports lost blocks from rank 0 alone."""

    def blocks_to_report(self, load: Load) -> set[int]:
        return set() if self._rank else load.lost


@pytest.mark.parametrize(
    ("cls", "only", "found", "workers"),
    [
        (LoadsOneBlockTooFew, "tokens-full-hit", "tokens-full-hit", 1),
        (SavesTheNextBlock, "tokens-full-hit", "tokens-full-hit", 1),
        (BlamesAnotherRequest, "failures-exact", "failures-exact", 1),
        (KeepsTheMessagesList, "tokens-chunked", "output-not-mutated", 1),
        (AnswersFromItsFirstQuery, "tokens-preempted", "layer-loads-complete", 1),
        (ShortensTheHashes, "tokens-cold", "match-has-no-effects", 1),
        (OneRankHidesFailures, "failures-exact", "failures-exact", 2),
    ],
)
def test_a_mistake_that_nobody_listed_is_found(
    cls: type[MemoryConnector], only: str, found: str, workers: int
) -> None:
    report = check(cls, only, workers=workers)
    assert found in report.failed, "\n".join(report.lines())


# -------------------------------------------------------------------- new mistakes, not found


class SleepsInTheQuery(MemoryConnector):
    """Asks a server, 30 ms each time, on the event loop."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        time.sleep(0.03)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class KeepsCopies(MemoryConnector):
    """Keeps the bytes of every block that it ever saved on the worker side."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        self._kept: list[Any] = []

    def copy_layer(self, saves: StepSaves, layer_name: str) -> None:
        super().copy_layer(saves, layer_name)
        self._kept += saves.copies[layer_name]


NOT_FOUND = [
    (SleepsInTheQuery, "tokens-cold", "slow hooks are logged only, and the command mutes the log"),
    (KeepsCopies, "tokens-hit", "only what knows a request's id is seen as left over"),
]


@pytest.mark.parametrize(
    ("cls", "only"),
    [
        pytest.param(cls, only, marks=pytest.mark.xfail(strict=True, reason=why), id=cls.__name__)
        for cls, only, why in NOT_FOUND
    ],
)
def test_a_mistake_that_the_check_does_not_look_for(cls: type[MemoryConnector], only: str) -> None:
    assert check(cls, only).failed


# -------------------------------------------------------------------- right ones, in odd styles


class KnowsTwoStepsLater(MemoryConnector):
    """Answers None in the step in which it is asked first, and in the next one."""

    def _begin_scheduler_side(self) -> None:
        super()._begin_scheduler_side()
        self._since: dict[str, int] = {}
        self._num_steps = 0

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        since = self._since.setdefault(request.request_id, self._num_steps)
        if self._num_steps < since + 2:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        self._num_steps += 1
        return super().build_connector_meta(scheduler_output)

    def forget(self, req_id: str) -> None:
        super().forget(req_id)
        self._since.pop(req_id, None)


class SavesAtTheEnd(MemoryConnector):
    """Saves when a request has ended: holds it, and copies at the start of the next step."""

    def _begin_scheduler_side(self) -> None:
        super()._begin_scheduler_side()
        self._at_end: list[SaveOrder] = []

    def full_blocks(self, tracked: Tracked, num_tokens: int) -> range:
        return range(0)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_loading = request.request_id in self._loading
        self.forget(request.request_id)
        if is_loading or request.status.finish_reason not in ("stop", "length"):
            return False, None
        orders = list(self._save_all(request, block_ids))
        self._at_end += orders
        if orders:
            self._held.add(request.request_id)
        return bool(orders), None

    def _save_all(self, request: Request, block_ids: list[int]) -> Iterator[SaveOrder]:
        owed = {save.key for save in self._open_saves.values()}
        for index in range((request.num_tokens - 1) // self._block_size):
            key = self.key_of(request, index)
            if key not in self.store and key not in owed:
                yield self._open_save(Tracked(request, block_ids), index, key)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        orders, self._at_end = self._at_end, []
        return dataclasses.replace(metadata, saves=tuple(orders))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        saves, self._step_saves = self._step_saves, None
        if saves is not None:
            for layer_name in self._pages:
                self._queue_copy(saves, layer_name)
            self.finish_copies([saves])


class _OwnGate:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ended.wait(timeout_s)

    def end(self) -> None:
        self._ended.set()


class _OwnLane:
    """A thread, a list and a lock."""

    name = "own"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[Callable[[], None], _OwnGate]] = []
        self._stops = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> _OwnGate:
        gate = _OwnGate()
        with self._changed:
            self._queue.append((work, gate))
            self._changed.notify()
        return gate

    def record(self) -> _OwnGate:
        return self.submit(lambda: None)

    def wait(self, gate: Any) -> None:
        self.submit(gate.wait)

    def query(self) -> bool:
        return not self._queue

    def close(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stops)
                if not self._queue:
                    return
                work, gate = self._queue.pop(0)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the gate's
                gate.error = error
            gate.end()
            del work, gate


class OwnThreads(MemoryConnector):
    """Knows nothing of lanes."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        self._load_lane, self._store_lane = _OwnLane(), _OwnLane()


class LastRankSpeaks(MemoryConnector):
    """`get_finished_count` is 1: the last rank reports what all ranks have done."""

    def get_finished_count(self) -> int:
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        answers = super().get_finished(finished_req_ids)
        done: dict[tuple[int, str], int] = self.store.__dict__.setdefault("done", {})
        for kind, ids in enumerate(answers):
            for req_id in ids or ():
                done[kind, req_id] = done.get((kind, req_id), 0) + 1
        size = self._vllm_config.parallel_config.world_size
        if self._rank < size - 1:
            return None, None
        whole = [key for key, count in done.items() if count == size]
        for key in whole:
            del done[key]
        sent, received = ({req_id for kind, req_id in whole if kind == k} for k in (0, 1))
        return sent or None, received or None


class LoadsShortOnesAtOnce(MemoryConnector):
    """A block within the step, more of them asynchronously."""

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        num_tokens = end * self._block_size - num_computed_tokens
        return num_tokens, num_tokens > self._block_size

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.load_async = num_external_tokens > self._block_size
        super().update_state_after_alloc(request, blocks, num_external_tokens)


@pytest.mark.parametrize(
    ("cls", "is_async", "workers", "only"),
    [
        (KnowsTwoStepsLater, True, 1, "aborted-in-every-state"),
        (SavesAtTheEnd, False, 1, "aborted-in-every-state"),
        (OwnThreads, True, 1, "tokens-full-hit"),
        (LastRankSpeaks, True, 2, "tokens-full-hit"),
        (LoadsShortOnesAtOnce, False, 1, "tokens-full-hit"),
    ],
)
def test_an_unusual_style_is_not_accused(
    cls: type[MemoryConnector], is_async: bool, workers: int, only: str
) -> None:
    report = check(cls, only, is_async=is_async, workers=workers)
    report.raise_if_failed()
    assert report.result(only).verdict == "ok", "\n".join(report.lines())
