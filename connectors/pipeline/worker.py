"""PipelineConnector's worker side: one step's orders after another. Device thread.

Nothing here waits for a GPU, but `handshake` and `close`. On a CPU a layer waits for its load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from interlace.connectors.pipeline.layer_pipeline import (
    DEFAULT_WINDOW_BYTES,
    BackwardTransfer,
    FedTransfer,
    LaneCopies,
    LayerPipeline,
    PipelinedLoad,
    SaveTransfer,
    Visit,
)
from interlace.connectors.pipeline.messages import (
    Load,
    LoadSample,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
    Save,
    Share,
    ShareReport,
)
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.records import HostRecords
from interlace.connectors.pipeline.worker_files import Fetching, FileWork, without_records
from interlace.connectors.pipeline.worker_samples import StepSampler
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Lanes, LayerGates
from interlace.layers.cuda_lanes import CudaLanes
from interlace.layers.cuda_streams import CudaStreams

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
    ) -> None:
        """`lanes` are for pages in host memory, and for files; for pages on a GPU, `register` makes
        streams.

        `window_bytes`: see `LayerPipeline`. `make_space`: (number of layers, bytes of a page) ->
        what a store of files is to hold; without it there is none.
        """
        self._make_space = make_space
        self._fetching: list[tuple[Load, Fetching]] = []
        self._unsettled: list[tuple[int, Fetching]] = []  # loads that have ended but for this
        self._failed_fetches: dict[int, Fetching] = {}  # by load
        self._fetch_samples: list[LoadSample] = []
        self._options = options
        self._lanes = lanes
        self._window_bytes = window_bytes
        self._load_rate = 0.0
        self._opened: _Opened | None = None
        self._begun_step = 0
        self._has_forward = False  # of this step
        self._unsent: tuple[Save, ...] = ()  # saves of this step, until its forward is queued
        self._step_loads: list[_StepLoad] = []
        self._bulk_loads: list[_BulkLoad] = []
        self._saves: dict[int, SaveTransfer] = {}
        self._sent: set[str] = set()
        self._invalid: set[int] = set()
        self._loaded: set[int] = set()
        self._shares: list[ShareReport] = []
        self._failed_saves: set[int] = set()

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
        try:
            pipeline = self.make_pipeline(records.tensor, layers, lanes)
        except BaseException:
            records.close()
            raise
        places = {name: layer for layer, name in enumerate(kv_caches)}
        files = None
        if self._make_space is not None:
            space = self._make_space(len(layers), page_bytes)
            files = FileWork(self._options, space, records.tensor.numpy(), self._lanes)
        self._opened = _Opened(records, pipeline, places, StepSampler(pipeline.watch), files)

    def make_pipeline(
        self, records: torch.Tensor, layers: Sequence[torch.Tensor], lanes: Lanes
    ) -> LayerPipeline:
        """What moves blocks between these. Raises: `ConnectorError`, `ConfigError`."""
        return LayerPipeline(
            lanes,
            self.make_copies(records, layers),
            group_size=self._options.group_size,
            window_bytes=self._window_bytes,
        )

    def make_copies(self, records: torch.Tensor, layers: Sequence[torch.Tensor]) -> LaneCopies:
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
        return PipelineHandshake(records.num_records, records.record_bytes, load_rate)

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
                one.is_lost = True
                if one.transfer is not None:
                    pipeline.fence(one.transfer)

    def start(self, metadata: PipelineMetadata, *, by_layer: bool = False) -> None:
        """Begin a step, unless it has begun: queue its loads. `by_layer`: its layers will come by
        `wait_for_layer`."""
        if metadata.step_id == self._begun_step:
            return
        opened = self._open
        self._send_saves()  # of the step before, if its forward was never told of
        self._begun_step = metadata.step_id
        self._has_forward = False
        self._unsent = metadata.saves
        self._sent |= metadata.release
        within = [load for load in metadata.loads if not load.is_async]
        assert not any(load.missing or load.fetches for load in within), "they go beside the steps"
        if within:
            pipelined = opened.pipeline.submit_load(
                [load.runs for load in within], metadata.step_id, by_layer=by_layer
            )
            self._step_loads.append(_StepLoad(within, pipelined))
        for load in metadata.loads:
            if load.is_async:
                self._start_beside(load)
        if opened.files is not None:
            for order in metadata.stores:
                opened.files.store(order)
        self._poll_fetches()
        for share in metadata.shares:
            self._follow(share)
        hurried = [one.transfer for one in self._bulk_loads if one.is_hurried]
        for transfer in hurried:
            assert transfer is not None
            transfer.window_bytes = self._hurried_bytes(metadata.expected_s)
        if hurried or not (metadata.num_tokens and opened.pipeline.is_on_streams):
            # Else the forward goes first: `get_finished` polls behind it.
            is_before = metadata.num_tokens > 0
            opened.pipeline.poll(Visit.BEFORE_FORWARD if is_before else Visit.BEHIND_FORWARD)
        if within or metadata.timed_pairs is None:
            opened.sampler.forget()
        else:
            opened.sampler.begin(metadata.num_tokens, metadata.timed_pairs)

    def _start_beside(self, load: Load) -> None:
        """What it fetches comes first."""
        files = self._open.files
        if load.fetches and files is not None:
            self._fetching.append((load, files.fetch(load.fetches)))
        else:
            self._start_bulk(load)

    def _poll_fetches(self) -> None:
        """Load what has been fetched."""
        files = self._open.files
        if files is None or not (self._fetching or self._unsettled):
            return
        files.poll()
        asked = [(*pair, pair[1].is_done) for pair in self._fetching]  # once: a read ends any time
        self._fetching = [(load, fetching) for load, fetching, is_done in asked if not is_done]
        for load, fetching, is_done in asked:
            if not is_done:
                continue
            sample = files.sample(fetching)
            if sample is not None:
                self._fetch_samples.append(sample)
            self._start_bulk(load, fetching)

    def _start_bulk(self, load: Load, fetching: Fetching | None = None) -> None:
        pipeline = self._open.pipeline
        failed = set() if fetching is None else fetching.failed
        runs = without_records(load.runs, failed)
        try:
            if load.share is None:
                transfer = pipeline.submit_bulk(
                    runs, window_bytes=self._beside_bytes, begins_now=False
                )
                one = _BulkLoad(load, transfer)
            else:
                one = _BulkLoad(
                    load,
                    pipeline.submit_from_the_back(load.runs, load.share, self._hurried_bytes()),
                )
        except ConnectorError as error:
            one = _BulkLoad(load, None, error)
        if one.transfer is not None:
            one.transfer.name = load.request_id
        one.fetching = fetching
        one.unfilled = set(load.missing) | _block_ids(load.runs) - _block_ids(runs)
        if fetching is not None and failed:
            self._failed_fetches[load.load_id] = fetching
        self._bulk_loads.append(one)

    def _follow(self, share: Share) -> None:
        for one in self._bulk_loads:
            if one.load.load_id == share.load_id and not one.is_lost:
                one.revision = share.revision
                if isinstance(one.transfer, BackwardTransfer):
                    self._open.pipeline.set_share(one.transfer, share.num_blocks)

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

    def advance(self) -> bool:
        """While this thread waits for the device: feed a little; whether there is more to do."""
        if self._opened is None:
            return False
        self._poll_fetches()
        return self._opened.pipeline.advance() or bool(self._fetching)

    # ---------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(held requests whose saves have ended, requests whose asynchronous load has).

        Blocks of loads that failed come out of `take_invalid` from then on.
        """
        self._poll_fetches()
        self._open.pipeline.poll()
        sent, self._sent = self._sent, set()
        ended = [one for one in self._bulk_loads if one.is_done]
        self._bulk_loads = [one for one in self._bulk_loads if not one.is_done]
        self._unsettled += [(one.load.load_id, one.fetching) for one in ended if one.fetching]
        self._loaded |= {one.load.load_id for one in ended if not one.fetching}
        received = [one for one in ended if not one.is_lost]
        for one in received:
            self._invalid |= one.invalid()
            self._shares += one.news()
        return sent or None, {one.load.request_id for one in received} or None

    def take_invalid(self) -> set[int]:
        """The step is over: blocks that its loads, or those just received, did not fill."""
        self._open.pipeline.finish_step()
        for step_load in self._step_loads:
            self._invalid |= step_load.take_invalid()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> PipelineReport | None:
        """What the scheduler side is to know of this step; None if there is nothing."""
        opened = self._open
        self._send_saves()
        opened.sampler.forget()  # a step without forward
        opened.pipeline.poll(Visit.BEHIND_FORWARD if self._has_forward else Visit.IDLE)
        self._take_settled()
        if self._has_nothing_open:
            steps = opened.sampler.take()
            return PipelineReport(steps=steps) if steps else None
        copied, failed = self._take_ended_saves()
        loads = self._take_ended_loads()
        loaded, self._loaded = frozenset(self._loaded), set()
        shares, self._shares = self._shares, []
        for one in self._bulk_loads:
            shares += one.news()
        report = PipelineReport(copied, failed, loaded, tuple(shares), opened.sampler.take(), loads)
        if opened.files is not None:
            report = self._with_files(report, opened.files)
        return None if report == PipelineReport() else report

    @property
    def _has_nothing_open(self) -> bool:
        """Whether there is nothing to tell but how long steps took: in most steps."""
        loads = self._step_loads or self._bulk_loads or self._loaded or self._shares
        files = self._open.files
        reads = self._fetching or self._unsettled or self._fetch_samples
        writes = files is not None and files.is_storing
        return not (loads or self._saves or self._failed_saves or reads or writes)

    def _take_settled(self) -> None:
        """Loads whose reads will write into no record any more."""
        settled = {load_id for load_id, fetching in self._unsettled if fetching.is_settled}
        self._unsettled = [pair for pair in self._unsettled if pair[0] not in settled]
        self._loaded |= settled

    def _with_files(self, report: PipelineReport, files: FileWork) -> PipelineReport:
        samples, self._fetch_samples = self._fetch_samples, []
        ended = self._failed_fetches.keys() & report.loaded
        failed = [self._failed_fetches.pop(load_id) for load_id in ended]
        stored, unstored = files.take_stored()
        return dataclasses.replace(
            report,
            stored=stored,
            unstored=unstored,
            unfetched=frozenset().union(*(one.failed for one in failed)),
            damaged=frozenset().union(*(one.damaged for one in failed)),
            fetches=tuple(samples),
            counts=files.take_counts(),
        )

    def _take_ended_saves(self) -> tuple[frozenset[int], frozenset[int]]:
        """(well, badly)."""
        ended = {number: save for number, save in self._saves.items() if save.is_done}
        for number in ended:
            del self._saves[number]
        failed = {number for number, save in ended.items() if save.error is not None}
        unsent, self._failed_saves = self._failed_saves, set()
        return frozenset(ended.keys() - failed), frozenset(failed | unsent)

    def _take_ended_loads(self) -> tuple[LoadSample, ...]:
        """Take note of loads within a step that have ended; how long they took."""
        samples: list[LoadSample] = []
        under_way: list[_StepLoad] = []
        for one in self._step_loads:
            if not one.pipelined.is_done:
                under_way.append(one)
                continue
            self._loaded |= {load.load_id for load in one.loads}
            self._invalid |= one.take_invalid()
            stats = one.pipelined.stats
            if stats.seconds is not None and not any(one.pipelined.errors):
                samples.append(LoadSample(stats.num_bytes, stats.seconds))
        self._step_loads = under_way
        return tuple(samples)

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and let go of the records. May be
        repeated."""
        opened, self._opened = self._opened, None
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


class _StepLoad:
    """What a step loads within itself, and for whom."""

    def __init__(self, loads: list[Load], pipelined: PipelinedLoad) -> None:
        self.loads = loads
        self.pipelined = pipelined
        self._is_judged = False

    def take_invalid(self) -> set[int]:
        """Blocks of the loads that failed, once: the step that loads them is over."""
        if self._is_judged:
            return set()
        self._is_judged = True
        results = zip(self.loads, self.pipelined.errors, strict=True)
        return {i for load, error in results if error is not None for i in _block_ids(load.runs)}


@dataclasses.dataclass(slots=True)
class _BulkLoad:
    """A load beside the steps."""

    load: Load
    transfer: FedTransfer | None
    """None if it was refused."""
    refused: ConnectorError | None = None
    is_lost: bool = False
    """Its blocks were handed on."""
    revision: int = 0
    """Of its share."""
    fetching: Fetching | None = None
    """What was read for it first."""
    unfilled: set[int] = dataclasses.field(default_factory=set)
    """Blocks for which nothing could be read."""
    _told: ShareReport | None = None

    @property
    def is_done(self) -> bool:
        """Whether it touches nothing any more."""
        return self.transfer is None or self.transfer.is_done

    @property
    def is_hurried(self) -> bool:
        """Whether somebody computes towards it."""
        return self.transfer is not None and self.transfer.is_hurried

    def invalid(self) -> set[int]:
        """Blocks that it was to fill and did not, now that it is done."""
        if self.transfer is None:
            return _block_ids(self.load.runs) | self.unfilled
        if self.transfer.error is None:
            return self.unfilled
        if isinstance(self.transfer, BackwardTransfer):
            return _block_ids(self.transfer.missing())
        return _block_ids(self.load.runs) | self.unfilled

    def news(self) -> list[ShareReport]:
        """How far a load from the back has come, if that is not what was said last, or is final."""
        share = self.load.share
        if share is None or self.is_lost:
            return []
        report = ShareReport(self.load.load_id, self.revision, share, 0)
        if isinstance(self.transfer, BackwardTransfer):
            report = report._replace(
                num_blocks=self.transfer.share, num_loaded=self.transfer.num_loaded
            )
        if report == self._told and not self.is_done:
            return []
        self._told = report
        return [report]


def _block_ids(runs: Iterable[tuple[int, int, int]]) -> set[int]:
    return {block_id + i for _, block_id, num_blocks in runs for i in range(num_blocks)}
