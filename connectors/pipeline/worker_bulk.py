"""One load beside the steps: read first what lies in files only, then copied, part by part.

What is read is cut into chunks, so that one is copied while the next ones are read. What is loaded
from the back is one transfer, which comes as far as the reads have. Device thread.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Container, Iterable

from interlace.connectors.pipeline.messages import Load, RecordRun, ShareReport
from interlace.connectors.pipeline.worker_backward import BackwardTransfer
from interlace.connectors.pipeline.worker_feeder import FedTransfer
from interlace.connectors.pipeline.worker_files import Fetching, without_records
from interlace.engine.ports import Gate
from interlace.layers.page_copies import cut_runs

CHUNK_BYTES = 64 << 20
"""A millisecond of a PCIe 5 link, and 2.5 of reading from the page cache."""


@dataclasses.dataclass(slots=True)
class Chunk:
    """A part of a load, copied as one transfer when all of it has been read."""

    runs: tuple[RecordRun, ...]
    fetched: deque[int]
    """Of its records, those that are not known to have been read."""
    unfilled: set[int] = dataclasses.field(default_factory=set)
    """Blocks for which nothing could be read."""
    transfer: FedTransfer | None = None
    """None before it begins, or if it was refused."""

    def is_ready(self, fetching: Fetching) -> bool:
        """Whether all reads of it have ended, well or badly."""
        while self.fetched and fetching.has_ended(self.fetched[0]):
            self.fetched.popleft()
        return not self.fetched

    @property
    def invalid(self) -> set[int]:
        """Blocks that it was to fill and did not, now that it is done."""
        if self.transfer is None:
            return block_ids_of(self.runs) | self.unfilled
        if isinstance(self.transfer, BackwardTransfer) and self.transfer.error is not None:
            return block_ids_of(self.transfer.missing()) | self.unfilled
        if self.transfer.error is not None:
            return block_ids_of(self.runs) | self.unfilled
        bad = set() if self.transfer.check is None else self.transfer.check.bad
        return self.unfilled | bad

    @property
    def bad_records(self) -> set[int]:
        """Whose content is not what was stored."""
        check = None if self.transfer is None else self.transfer.check
        bad = set() if check is None else check.bad
        return records_of(self.runs, bad) if bad else set()

    @property
    def good_records(self) -> set[int]:
        """That have been copied, and checked if that was asked for."""
        if isinstance(self.transfer, BackwardTransfer):
            return records_of(self.runs, block_ids_of(self.transfer.loaded()))
        if self.transfer is None or self.transfer.error is not None or not self.transfer.is_done:
            return set()
        return records_of(self.runs, block_ids_of(self.runs) - self.invalid)


class BulkLoad:
    """See the module's docstring."""

    def __init__(
        self, load: Load, fetching: Fetching | None, after: Gate | None, record_bytes: int
    ) -> None:
        """`after`: behind it its blocks may be written to."""
        self.load = load
        self.fetching = fetching
        """What is read for it."""
        self.after = after
        self.is_lost = False
        """Its blocks were handed on."""
        self.revision = 0
        """Of its share."""
        fetched = {fetch.record: fetch.place.checksum for fetch in load.fetches}
        self.checksums = {**load.checksums, **fetched} if fetched else load.checksums
        """Of records, those of which nobody has checked what they hold."""
        self._waiting = deque(_chunks(load, fetching, record_bytes))
        self._backward_reads = _BackwardReads(load, fetching) if fetching is not None else None
        self._begun: list[Chunk] = []
        self._told: ShareReport | None = None

    def take_ready(self) -> list[Chunk]:
        """Parts that may be copied now: begin each."""
        ready: list[Chunk] = []
        while self._waiting and (self.fetching is None or self._waiting[0].is_ready(self.fetching)):
            chunk = self._waiting.popleft()
            if self.fetching is not None and self.load.share is None:
                left = without_records(chunk.runs, self.fetching.failed)
                chunk.unfilled |= block_ids_of(chunk.runs) - block_ids_of(left)
                chunk.runs = left
            ready.append(chunk)
        self._begun += ready
        return ready

    @property
    def has_waiting(self) -> bool:
        """Whether some of it is still being read."""
        backward = self.backward
        if backward is not None and self.fetching is not None:
            return not self.is_lost and not backward.is_done
        return bool(self._waiting)

    @property
    def num_available(self) -> int | None:
        """Of a load from the back: blocks, from there on, that may be copied. None: all."""
        return None if self._backward_reads is None else self._backward_reads.num_read

    def advance_reads(self) -> bool:
        """Of a load from the back: see what has been read since; whether more may be copied. If a
        read has failed, the load has."""
        backward, reads = self.backward, self._backward_reads
        if backward is None or reads is None or self.is_lost:
            return False
        before = reads.num_read
        error = reads.advance(backward.share)
        if error is not None:
            backward.fail(error)
        return error is None and reads.num_read > before

    def cancel_reads(self) -> None:
        """It is done, or lost: what was not in its share need not be read."""
        if self.fetching is not None:
            self.fetching.cancel(fetch.record for fetch in self.load.fetches)

    def lose(self) -> list[FedTransfer]:
        """Its blocks are handed on: nothing more of it begins. What has begun."""
        self.is_lost = True
        self._waiting.clear()
        self.cancel_reads()
        return self.transfers

    @property
    def begun(self) -> tuple[Chunk, ...]:
        """Parts of which copying was begun, or refused."""
        return tuple(self._begun)

    @property
    def transfers(self) -> list[FedTransfer]:
        """That have begun, in order."""
        return [one.transfer for one in tuple(self._begun) if one.transfer is not None]

    @property
    def backward(self) -> BackwardTransfer | None:
        """If it is loaded from the back."""
        for transfer in self.transfers:
            if isinstance(transfer, BackwardTransfer):
                return transfer
        return None

    @property
    def is_done(self) -> bool:
        """Whether it touches no page any more."""
        return not self._waiting and all(transfer.is_done for transfer in self.transfers)

    def invalid(self) -> set[int]:
        """Blocks that it was to fill and did not, now that it is done."""
        return set(self.load.missing).union(*(chunk.invalid for chunk in self._begun))

    @property
    def is_settled(self) -> bool:
        """Whether, beside that, nothing is read into a record of it any more."""
        return self.is_done and (self.fetching is None or self.fetching.is_settled)

    def unfetched(self, *, checks_reads: bool) -> set[int]:
        """Now that it is settled: records that were to be fetched and do not hold what was stored,
        as far as is known. `checks_reads`: whether who reads has checked it, and not this load."""
        if self.fetching is None:
            return set()
        if checks_reads:
            return self.fetching.failed
        good = (chunk.good_records for chunk in self._begun)
        return {fetch.record for fetch in self.load.fetches}.difference(*good)

    def unneeded(self, unfetched: set[int]) -> set[int]:
        """Now that it is settled: those of these whose blocks were not to be filled after all."""
        if not unfetched or self.load.share is None:
            return set()
        return unfetched - records_of(self.load.runs, self.invalid())

    def damaged(self) -> set[int]:
        """Now that it is settled: records that are of no use, see `PipelineReport.damaged`."""
        damaged = set() if self.fetching is None else self.fetching.damaged
        return damaged.union(*(chunk.bad_records for chunk in self._begun))

    def news(self, *, has_ended: bool = False) -> list[ShareReport]:
        """How far a load from the back has come, if that is not what was said last, or is final:
        `has_ended`."""
        share = self.load.share
        if share is None or self.is_lost:
            return []
        report = ShareReport(self.load.load_id, self.revision, share, 0, has_ended)
        if (backward := self.backward) is not None:
            report = report._replace(num_blocks=backward.share, num_loaded=backward.num_loaded)
        if report == self._told and not self.is_done:
            return []
        self._told = report
        return [report]


class _BackwardReads:
    """How far the reads of a load from the back have come."""

    def __init__(self, load: Load, fetching: Fetching) -> None:
        self._fetching = fetching
        fetched = {fetch.record for fetch in load.fetches}
        records = [run.record + i for run in load.runs for i in range(run.num_blocks)]
        self._records = [record if record in fetched else None for record in reversed(records)]
        """From the back, None of those that lie in memory."""
        self.num_read = 0
        """From the back, that are there."""

    def advance(self, most: int) -> BaseException | None:
        """Up to `most` blocks; the error of the first read that failed."""
        while self.num_read < min(most, len(self._records)):
            record = self._records[self.num_read]
            if record is not None:
                if not self._fetching.has_ended(record):
                    break
                if (error := self._fetching.error_of(record)) is not None:
                    return error
            self.num_read += 1
        return None


def _chunks(load: Load, fetching: Fetching | None, record_bytes: int) -> list[Chunk]:
    if fetching is None or load.share is not None:
        return [Chunk(load.runs, deque())]
    fetched = {fetch.record for fetch in load.fetches}
    return [
        Chunk(
            tuple(RecordRun(*run) for run in runs),
            deque(r for run in runs for r in range(run[0], run[0] + run[2]) if r in fetched),
        )
        for runs in cut_runs(load.runs, max(1, CHUNK_BYTES // record_bytes))
    ]


def block_ids_of(runs: Iterable[tuple[int, int, int]]) -> set[int]:
    """All of them."""
    return {block_id + i for _, block_id, num_blocks in runs for i in range(num_blocks)}


def records_of(runs: Iterable[tuple[int, int, int]], blocks: Container[int]) -> set[int]:
    """From which these blocks are loaded."""
    return {
        record + i
        for record, block_id, num_blocks in runs
        for i in range(num_blocks)
        if block_id + i in blocks
    }
