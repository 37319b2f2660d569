"""PipelineConnector's worker side: one step's orders after another. Device thread.

Nothing here waits for a GPU, but `handshake` and `close`. On a CPU a layer waits for its load.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from interlace.connectors.pipeline.layer_pipeline import (
    DEFAULT_WINDOW_BYTES,
    FedTransfer,
    LaneCopies,
    LayerPipeline,
    Pace,
    SaveTransfer,
    Visit,
    transfer_of,
)
from interlace.connectors.pipeline.messages import (
    Load,
    LoadSample,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    RecordRun,
    Save,
    Share,
    ShareReport,
)
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.records import HostRecords
from interlace.connectors.pipeline.worker_bulk import BulkLoad, Chunk
from interlace.connectors.pipeline.worker_checks import LoadCheck
from interlace.connectors.pipeline.worker_files import FileWork
from interlace.connectors.pipeline.worker_pictures import WorkerPictures
from interlace.connectors.pipeline.worker_samples import StepSampler
from interlace.connectors.pipeline.worker_step_load import StepLoad
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Lanes, LayerGates, TransferRecorder
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.cuda_host_memory import CudaHostMemory, HostMemory
from interlace.layers.cuda_lanes import CudaLanes
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

_CLOSE_S = 10.0
_QUEUED_S = 0.004
"""Of loading beside the steps is under way at a time: what passes from one decode step to the next,
and what a load within a step has to wait for at most."""
_STEPS_AHEAD = 1.5
"""Of loading from the back is under way at a time: who feeds it comes by once a step."""
_HURRIED_S = 0.060
"""At least."""
_LAUNCH_S = 0.030
"""Of that, where it is fed while the device computes: as long as a long step's launch takes a slow
host, which feeds nothing meanwhile."""


class PipelineWorker:
    """What the hooks of the worker side do. They may come repeatedly, or not at all: a step begins
    once, however it is told, and what its forward should have begun begins with its reports."""

    def __init__(
        self,
        options: PipelineOptions,
        lanes: Lanes,
        *,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        make_space: Callable[[int, int], Space] | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        """`lanes` are for pages in host memory, and for files; for pages on a GPU, `register` makes
        streams.

        `window_bytes`: see `LayerPipeline`. `make_space`: (number of layers, bytes of a page) ->
        what a store of files is to hold; without it there is none. `host_memory` registers slabs of
        it; None: CUDA's where pages lie on a GPU, and elsewhere nothing is registered.
        """
        self._make_space = make_space
        self._host_memory = host_memory
        self._unsettled: list[BulkLoad] = []  # that have ended but for their reads
        self._unfetched: set[int] = set()  # records, for the next report
        self._unneeded: set[int] = set()
        self._damaged: set[int] = set()
        self._fetch_samples: list[LoadSample] = []
        self._options = options
        self._lanes = lanes
        self._window_bytes = window_bytes
        self._load_rate = 0.0
        self._opened: _Opened | None = None
        self._begun_step = 0
        self._has_forward = False  # of this step
        self._unsent: tuple[Save, ...] = ()  # saves of this step, until its forward is queued
        self._step_loads: list[StepLoad] = []
        self._bulk_loads: list[BulkLoad] = []
        self._saves: dict[int, SaveTransfer] = {}
        self._sent: set[str] = set()
        self._invalid: set[int] = set()
        self._loaded: set[int] = set()
        self._shares: list[ShareReport] = []
        self._failed_saves: set[int] = set()
        self._beside = collections.Counter[str]()  # of loads beside the steps, for the next report
        self._num_stuck = 0  # that were reported
        self._levels: dict[str, int] = {}  # likewise
        self._pictures = WorkerPictures()

    # ---------------------------------------------------------------- once

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Layer name -> its pages, in order of depth. Makes the records, and the lanes.

        Raises: `ConfigError` if there is no memory for records; `ConnectorError` for pages that
        records cannot hold.
        """
        layers = list(kv_caches.values())
        first = layers[0]
        page_bytes = first[0].numel() * first.itemsize
        records = HostRecords.allocate(
            self._options.host_bytes, (len(layers), page_bytes), first.device
        )
        lanes = self._lanes
        if first.device.type == "cuda" and not isinstance(lanes, CudaLanes):
            lanes = CudaLanes(CudaStreams(first.device))
        space = RecordSpace(records.tensor)
        try:
            pipeline = self.make_pipeline(space, layers, lanes)
            files = self._open_files(space, layers)
        except BaseException:
            records.close()
            raise
        places = {name: layer for layer, name in enumerate(kv_caches)}
        self._pictures.num_layers = len(layers)
        self._pictures.record_bytes = records.record_bytes
        self._opened = _Opened(records, pipeline, places, StepSampler(pipeline.watch), files)

    def _open_files(self, space: RecordSpace, layers: Sequence[torch.Tensor]) -> FileWork | None:
        """What there is of a store of files. Raises: `ConfigError`."""
        if self._make_space is None:
            return None
        memory, device = self._host_memory, layers[0].device
        if memory is None and device.type == "cuda":
            memory = CudaHostMemory(device)
        _, num_layers, page_bytes = space.host.shape
        held = self._make_space(num_layers, page_bytes)
        return FileWork.open(self._options, held, space, layers, self._lanes, memory)

    def make_pipeline(
        self, records: RecordSpace, layers: Sequence[torch.Tensor], lanes: Lanes
    ) -> LayerPipeline:
        """What moves blocks between these. Raises: `ConnectorError`, `ConfigError`."""
        return LayerPipeline(
            lanes,
            self.make_copies(records, layers),
            group_size=self._options.group_size,
            window_bytes=self._window_bytes,
        )

    def make_copies(self, records: RecordSpace, layers: Sequence[torch.Tensor]) -> LaneCopies:
        """How each lane copies: for who wants to look at copies, or to change them.

        Raises: `ConnectorError`.
        """
        return LaneCopies.over(records, layers)

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise ConnectorError(
                "PipelineConnector's worker side has no pages: call register_kv_caches before the"
                " other hooks, and none after shutdown."
            )
        return self._opened

    def handshake(self) -> PipelineHandshake:
        """What there is, and how fast it loads: measures that."""
        records = self._open.records
        load_rate = records.measure_load_rate()
        self.expect_load_rate(load_rate)
        files = self._open.files
        mapped = () if files is None else files.maps.take_news()[0]
        return PipelineHandshake(records.num_records, records.record_bytes, load_rate, mapped)

    def expect_load_rate(self, bytes_per_s: float) -> None:
        """Queue as much beside the steps as suits such a link."""
        self._load_rate = bytes_per_s

    @property
    def _beside_bytes(self) -> int:
        return int(self._load_rate * _QUEUED_S)

    def _hurried_bytes(self, step_s: float = 0.0) -> int:
        """Of a load from the back that are to be queued beside a step which takes so long."""
        queued_s = max(_HURRIED_S, _STEPS_AHEAD * step_s)
        if self._open.pipeline.is_advanced:
            queued_s = _LAUNCH_S
        return max(self._window_bytes, int(self._load_rate * queued_s))

    @property
    def layer_gates(self) -> LayerGates | None:
        """For captured graphs; None on a CPU."""
        return self._open.pipeline.layer_gates

    # ---------------------------------------------------------------- every step

    def handle_preemptions(self, metadata: PipelineMetadata) -> None:
        """What is computed from now on may overwrite the blocks of the fenced saves, and of lost
        loads.

        Waits on a CPU for one copy at most, on a GPU for nothing: there the step waits.
        """
        pipeline = self._open.pipeline
        for save_id in metadata.fences:
            save = self._saves.get(save_id)
            if save is not None:
                pipeline.fence(save)
        for one in self._bulk_loads:
            if one.load.load_id in metadata.lost_loads:
                for transfer in one.lose():
                    pipeline.fence(transfer)

    def start(self, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE) -> None:
        """Begin a step, unless it has begun: queue its loads, those within it at this pace."""
        if metadata.step_id == self._begun_step:
            return
        opened = self._open
        self._send_saves()  # of the step before, if its forward was never told of
        for one in self._step_loads:
            if one.owes_verdict:  # nobody asked, since no request of its step used what came
                one.take_late(opened.pipeline)
        self._begun_step = metadata.step_id
        self._has_forward = False
        self._unsent = metadata.saves
        self._sent |= metadata.release
        within = [load for load in metadata.loads if not load.is_async]
        assert not any(load.missing or load.fetches for load in within), "they go beside the steps"
        if opened.files is not None:
            opened.files.begin_step(metadata)
        if within:
            pipelined = opened.pipeline.submit_load(
                [load.runs for load in within],
                metadata.step_id,
                pace=pace,
                checks=[self._check(load.runs, load.checksums) for load in within],
                request_ids=[load.request_id for load in within],
            )
            self._step_loads.append(StepLoad(within, pipelined))
            self._pictures.note_step_load(pipelined, len(within))
        for load in metadata.loads:
            if load.is_async:
                self._start_beside(load)
        self._poll_fetches()
        for share in metadata.shares:
            self._follow(share)
        backwards = (one.backward for one in self._bulk_loads)
        hurried = [transfer for transfer in backwards if transfer is not None]
        for transfer in hurried:
            transfer.window_bytes = self._hurried_bytes(metadata.expected_s)
        if hurried or not (metadata.num_tokens and opened.pipeline.is_on_streams):
            # Else the forward goes first: `get_finished` polls behind it.
            is_before = metadata.num_tokens > 0
            opened.pipeline.poll(Visit.BEFORE_FORWARD if is_before else Visit.BEHIND_FORWARD)
        if within or metadata.timed_pairs is None:
            opened.sampler.forget()
        else:
            opened.sampler.begin(metadata.num_tokens, metadata.timed_pairs)

    def _check(self, runs: Sequence[RecordRun], checksums: Mapping[int, int]) -> LoadCheck | None:
        """Of those of these blocks that nobody has checked; None if there are none."""
        files = self._open.files
        if not checksums or files is None or files.sums is None:
            return None
        return LoadCheck(files.sums, runs, checksums)

    def _start_beside(self, load: Load) -> None:
        """What lies in files only comes first."""
        opened = self._open
        fetching = None
        if load.fetches and opened.files is not None:
            from_the_back = load.share is not None
            fetching = opened.files.fetch(load.fetches, from_the_back=from_the_back)
        one = BulkLoad(
            load, fetching, opened.pipeline.record_compute(), opened.records.record_bytes
        )
        self._bulk_loads.append(one)
        self._pictures.note_bulk_load(one)
        self._begin_ready(one)

    def _poll_fetches(self) -> None:
        """Load what has been fetched."""
        files = self._open.files
        waiting = [one for one in self._bulk_loads if one.has_waiting]
        if files is None or not (waiting or self._unsettled):
            return
        files.poll()
        for one in waiting:
            self._begin_ready(one)
            if one.advance_reads() and one.backward is not None:
                assert one.num_available is not None, "it is being read"
                self._open.pipeline.set_available(one.backward, one.num_available)
            if one.backward is None and not one.has_waiting:
                self._take_sample(one)

    def _take_sample(self, one: BulkLoad) -> None:
        """Reading for it is over."""
        files = self._open.files
        if files is not None and one.fetching is not None:
            sample = files.sample(one.fetching)
            self._fetch_samples += [] if sample is None else [sample]

    def _begin_ready(self, one: BulkLoad) -> None:
        for chunk in one.take_ready():
            try:
                chunk.transfer = self._begin(one, chunk)
                chunk.transfer.name = one.load.request_id
            except ConnectorError:  # its blocks are reported: see `Chunk.invalid`
                continue

    def _begin(self, one: BulkLoad, chunk: Chunk) -> FedTransfer:
        """Raises: `ConnectorError` if its runs do not fit."""
        pipeline, share = self._open.pipeline, one.load.share
        check = self._check(chunk.runs, one.checksums)
        if share is not None:
            return pipeline.submit_from_the_back(
                chunk.runs, share, self._hurried_bytes(), check, one.num_available
            )
        return pipeline.submit_bulk(
            chunk.runs,
            after=one.after,
            window_bytes=self._beside_bytes,
            begins_now=False,
            check=check,
        )

    def _follow(self, share: Share) -> None:
        for one in self._bulk_loads:
            if one.load.load_id == share.load_id and not one.is_lost:
                one.revision = share.revision
                if one.backward is not None:
                    self._open.pipeline.set_share(one.backward, share.num_blocks)

    def wait_for_layer(self, layer_name: str) -> None:
        """Let the step wait until what it loads of the layer is in its pages, or has failed."""
        layer = self._open.layers.get(layer_name)
        if layer is not None:
            self._open.pipeline.wait(layer)

    def finish_forward(self) -> None:
        """The forward is queued: its saves begin behind it."""
        self._has_forward = True
        self._open.sampler.end()
        self._send_saves()

    def _send_saves(self) -> None:
        saves, self._unsent = self._unsent, ()
        if not saves:
            return
        pipeline = self._open.pipeline
        submitted = pipeline.submit_saves([save.runs for save in saves], pipeline.record_compute())
        for save, transfer in zip(saves, submitted, strict=True):
            if isinstance(transfer, ConnectorError):  # the scheduler side hears of it
                self._failed_saves.add(save.save_id)
                continue
            transfer.name = f"save {save.save_id}"
            self._saves[save.save_id] = transfer
        sent = [one for one in submitted if not isinstance(one, ConnectorError)]
        self._pictures.note_saves(sent)

    def advance(self) -> bool:
        """While this thread waits for the device, or for this: feed a little; whether there is more
        to do. Where nothing computes it goes on until a load has ended: somebody waits for it."""
        if self._opened is None:
            return False
        self._poll_fetches()
        has_more = self._opened.pipeline.advance(
            Visit.WAITING if self._has_forward else Visit.IDLE  # nothing is held up then
        )
        if not self._has_forward and self._bulk_loads:
            return not any(one.is_done for one in self._bulk_loads)
        return has_more or any(one.has_waiting for one in self._bulk_loads)

    # ---------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(held requests whose saves have ended, requests whose asynchronous load has).

        Blocks of loads that failed come out of `take_invalid` from then on.
        """
        self._poll_fetches()
        self._open.pipeline.poll()
        sent, self._sent = self._sent, set()
        ended = [one for one in self._bulk_loads if one.is_done]  # asked once: they end any time
        self._bulk_loads = [one for one in self._bulk_loads if one not in ended]
        for one in ended:
            self._pictures.end_bulk_load(one)
            if one.backward is not None:
                self._take_sample(one)
                one.cancel_reads()
        self._unsettled += ended
        self._take_settled()
        received = [one for one in ended if not one.is_lost]
        for one in received:
            for transfer in one.transfers:
                self._time_beside("beside", transfer)
            self._invalid |= one.invalid()
            self._shares += one.news(has_ended=True)
        return sent or None, {one.load.request_id for one in received} or None

    def _time_beside(self, what: str, transfer: FedTransfer) -> None:
        stats = transfer.stats
        if transfer.error is None and stats.seconds is not None:
            self._beside[f"{what}_us"] += round(stats.seconds * 1e6)
            self._beside[f"{what}_timed_bytes"] += stats.num_bytes

    def take_invalid(self) -> set[int]:
        """The step is over: blocks that its loads, or those just received, did not fill."""
        self._open.pipeline.finish_step()
        for step_load in self._step_loads:
            self._invalid |= step_load.take_invalid()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_late_invalid(self) -> set[int]:
        """The step's tokens have come: blocks of its loads that have turned out bad since."""
        pipeline = self._open.pipeline
        self._pictures.end_step()
        return set().union(*(one.take_late(pipeline) for one in self._step_loads))

    def report(self) -> PipelineReport | None:
        """What the scheduler side is to know of this step; None if there is nothing."""
        opened = self._open
        self._send_saves()
        opened.sampler.forget()  # a step without forward
        opened.pipeline.poll(Visit.BEHIND_FORWARD if self._has_forward else Visit.IDLE)
        self._take_settled()
        if opened.files is not None:
            opened.files.maps.visit(is_computing=self._has_forward)
        if self._has_nothing_open:
            steps = opened.sampler.take()
            return PipelineReport(steps=steps) if steps else None
        copied, failed = self._take_ended_saves()
        loads = self._take_ended_loads()
        loaded, self._loaded = frozenset(self._loaded), set()
        shares, self._shares = self._shares, []
        for one in self._bulk_loads:
            shares += one.news()
        report = PipelineReport() if opened.files is None else self._of_files(opened.files)
        report = dataclasses.replace(
            report,
            copied=copied,
            failed=failed,
            loaded=loaded,
            shares=tuple(shares),
            steps=opened.sampler.take(),
            loads=loads,
            counts=(*report.counts, *self._take_counts(opened.pipeline)),
            levels=self._take_levels(opened),
        )
        return None if report == PipelineReport() else report

    @property
    def _has_nothing_open(self) -> bool:
        """Whether there is nothing to tell but how long steps took: in most steps."""
        loads = self._step_loads or self._bulk_loads or self._loaded or self._shares
        files = self._open.files
        reads = self._unsettled or self._fetch_samples
        has_news = files is not None and (files.is_storing or files.maps.has_news)
        return not (loads or self._saves or self._failed_saves or reads or has_news)

    def _take_settled(self) -> None:
        """Loads whose reads will write into no record any more."""
        files = self._open.files
        settled = [one for one in self._unsettled if one.is_settled]
        self._unsettled = [one for one in self._unsettled if one not in settled]
        for one in settled:
            self._end_load(one.load)
            unfetched = one.unfetched(checks_reads=files is None or files.sums is None)
            self._unfetched |= unfetched
            self._unneeded |= one.unneeded(unfetched)
            self._damaged |= one.damaged()

    def _end_load(self, load: Load) -> None:
        """It reads no record any more."""
        self._loaded.add(load.load_id)
        if self._open.files is not None:
            self._open.files.maps.end_load(load.load_id)

    def _take_counts(self, pipeline: LayerPipeline) -> list[tuple[str, int]]:
        """What was timed beside the steps, and what is stuck."""
        counts, self._beside = self._beside, collections.Counter()
        num_stuck = pipeline.num_stuck
        counts["transfers_stuck"] += num_stuck - self._num_stuck
        self._num_stuck = num_stuck
        return [(name, n) for name, n in counts.items() if n]

    def _take_levels(self, opened: _Opened) -> tuple[tuple[str, int], ...]:
        """How things stand, of those that have changed."""
        levels = {} if opened.files is None else opened.files.levels
        num_hanging = opened.pipeline.num_hanging
        levels["transfers_hanging"] = levels.get("transfers_hanging", 0) + num_hanging
        changed = [pair for pair in levels.items() if pair[1] != self._levels.get(pair[0], 0)]
        self._levels = levels
        return tuple(changed)

    def _of_files(self, files: FileWork) -> PipelineReport:
        """What is about them."""
        samples, self._fetch_samples = self._fetch_samples, []
        unfetched, self._unfetched = frozenset(self._unfetched), set()
        unneeded, self._unneeded = frozenset(self._unneeded), set()
        damaged, self._damaged = frozenset(self._damaged), set()
        stored, unstored = files.take_stored()
        mapped, closing = files.maps.take_news()
        return PipelineReport(
            stored=stored,
            unstored=unstored,
            unfetched=unfetched,
            unneeded=unneeded,
            damaged=damaged,
            fetches=tuple(samples),
            counts=files.take_counts(),
            mapped=mapped,
            closing=closing,
        )

    def _take_ended_saves(self) -> tuple[frozenset[int], frozenset[int]]:
        """(well, badly)."""
        ended = {number: save for number, save in self._saves.items() if save.is_done}
        for number in ended:
            del self._saves[number]
        failed = {number for number, save in ended.items() if save.error is not None}
        # Small saves of one step share a transfer.
        transfers = {id(one): one for one in map(transfer_of, ended.values())}
        for transfer in transfers.values():
            self._time_beside("save", transfer)
        unsent, self._failed_saves = self._failed_saves, set()
        return frozenset(ended.keys() - failed), frozenset(failed | unsent)

    def _take_ended_loads(self) -> tuple[LoadSample, ...]:
        """Take note of loads within a step that have ended; how long they took."""
        samples: list[LoadSample] = []
        under_way: list[StepLoad] = []
        for one in self._step_loads:
            if not one.pipelined.is_done or one.owes_verdict:
                under_way.append(one)
                continue
            self._invalid |= one.take_invalid()
            self._damaged |= one.damaged
            for load in one.loads:
                self._end_load(load)
            stats = one.pipelined.stats
            if stats.seconds is not None and not any(one.pipelined.errors):
                samples.append(LoadSample(stats.num_bytes, stats.seconds))
        self._step_loads = under_way
        return tuple(samples)

    def damage_stored(self, kind: str, block_hash: bytes) -> set[bytes]:
        """For `interlace check`: see `KVConnectorBase_V1.inject_store_fault`. Raises: `OSError`."""
        files = self._open.files
        return set() if files is None else files.damage(kind, block_hash)

    def pictures(self) -> ConnectorPicture | None:
        """What there is to be seen; None before the pages are known, and after `close`. On the
        event loop's thread: see `KVConnectorBase_V1.get_transfer_pictures`."""
        opened = self._opened
        if opened is None:
            return None
        return ConnectorPicture(
            "PipelineConnector",
            self._pictures.load(),
            self._pictures.save(),
            opened.pipeline.lanes_seen(),
            self._load_rate or None,
        )

    def record(self, recorder: TransferRecorder | None) -> None:
        """See `KVConnectorBase_V1.record_transfers`."""
        if self._opened is not None:
            self._opened.pipeline.record(recorder)

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and let go of the records. May be
        repeated."""
        opened, self._opened = self._opened, None
        self._pictures.forget()
        if opened is not None:
            opened.pipeline.close(_CLOSE_S)
            if opened.files is not None:
                opened.files.close(_CLOSE_S)
            opened.records.close()


class _Opened(NamedTuple):
    """What there is once pages are known."""

    records: HostRecords
    pipeline: LayerPipeline
    layers: dict[str, int]
    """Name -> place in the records."""
    sampler: StepSampler
    files: FileWork | None
