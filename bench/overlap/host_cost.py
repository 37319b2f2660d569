"""Host time of a decode step that a connector with nothing to do adds: on both sides, and what the
engine does on its behalf.

The scheduler plans and applies steps as ever; in place of a model is a runner that calls the worker
side's hooks as a replayed step does, and answers at once. Device thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from interlace.bench.kv_blocks import BLOCK_SIZE, blocks_for, page_shape
from interlace.bench.overlap.engines import consumer_config
from interlace.bench.overlap.sizes import Sizes
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, ModelConfig
from interlace.engine.events import EventBus
from interlace.engine.kv_connector import KVConnectorHandshakeMetadata, KVConnectorRole
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock, PendingStep
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, Timings
from interlace.engine.transfer_picture import ConnectorPicture

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel
    from interlace.layers.workers import Workers

HOST_RECORDS = 64
"""None of them is used."""
WARM_UP = 20
"""Steps that are not counted."""


class HostTimes(NamedTuple):
    """Seconds of each step, planned, launched without a model, and applied."""

    without: list[float]
    with_connector: list[float]


class HookRunner:
    """A `StepRunner` without a model."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def works_ahead(self) -> bool:
        """No."""
        return False

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """See `StepRunner`."""
        return self._workers.get_handshake_metadata()

    def set_finished_count(self, count: int | None) -> None:
        """See `StepRunner`."""
        self._workers.set_finished_count(count)

    def begin_recording(self, clock: Clock) -> RecordingFacts:
        """Not this one."""
        return RecordingFacts()

    def end_recording(self) -> Timings:
        """Nothing was."""
        return Timings()

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """See `StepRunner`."""
        return self._workers.get_transfer_pictures()

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """The hooks of a step that is one graph; some token for each request that samples."""
        from interlace.layers.graph_mode import GraphMode

        workers, output = self._workers, scheduler_output
        workers.handle_preemptions(output)
        workers.begin_loads(output, _no_metadata, GraphMode.FULL)
        workers.post_forward()
        sampled = ModelRunnerOutput(sampled_token_ids=dict.fromkeys(output.sampling_req_ids, (7,)))
        reports = workers.collect(output)
        return lambda: workers.with_reports(sampled, reports)

    def advance_transfers(self) -> bool:
        """Never: nothing goes on."""
        return False

    def close(self) -> None:
        """End the connector, and drop the pages."""
        self._workers.close()


def _no_metadata() -> NoReturn:
    raise AssertionError("nobody looks at the attention metadata of a replayed step")


class _Rig:
    """One scheduler over one runner."""

    def __init__(self, scheduler: Scheduler, runner: HookRunner, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock

    def step(self) -> float:
        """Seconds of it."""
        begin = self._clock.monotonic()
        output = self._scheduler.schedule()
        assert output is not None, "there are requests to run"
        answer = self._runner.launch(output)()
        self._scheduler.update_from_output(output, answer)
        return self._clock.monotonic() - begin

    def close(self) -> None:
        """End both sides of the connector."""
        self._scheduler.close()
        self._runner.close()


def measure_host_cost(loaded: LoadedModel, sizes: Sizes, clock: Clock) -> HostTimes:
    """Time steps with and without a connector, in turns. Raises: `ConfigError`."""
    with contextlib.ExitStack() as stack:
        rigs = []
        for has_connector in (False, True):
            rig = _make(loaded, sizes, clock, has_connector=has_connector)
            stack.callback(rig.close)
            rigs.append(rig)
        times = HostTimes([], [])
        for number in range(WARM_UP + sizes.host_steps):
            for rig, taken in zip(rigs, times, strict=True):
                seconds = rig.step()
                if number >= WARM_UP:
                    taken.append(seconds)
        return times


def _make(loaded: LoadedModel, sizes: Sizes, clock: Clock, *, has_connector: bool) -> _Rig:
    """With the prompts of a crowd computed, as it were. Raises: `ConfigError`."""
    from interlace.layers.kv_pages import KVPages
    from interlace.layers.workers import Workers

    shape = page_shape(loaded)
    config = _config(loaded, sizes, HOST_RECORDS * shape.block_bytes)
    cache = shape.describe(config.cache_config.num_gpu_blocks)
    factory, with_roles = KVConnectorFactory(), list(KVConnectorRole) if has_connector else []
    sides = {role: factory.create_connector(config, role, cache) for role in with_roles}
    # Nobody writes to the pages, so a few blocks stand for all.
    pages = KVPages.of(shape, num_blocks=2, device=loaded.decoder.device)
    workers = Workers([pages], [sides[KVConnectorRole.WORKER]] if sides else [])
    scheduler = Scheduler(
        config.scheduler_config,
        config.cache_config,
        (),
        clock,
        EventBus(),
        sides.get(KVConnectorRole.SCHEDULER),
    )
    rig = _Rig(scheduler, HookRunner(workers), clock)
    scheduler.connect(HookRunner(workers))
    for index in range(sizes.num_decoders):
        scheduler.add_request(_request(index, sizes))
    while len(scheduler.waiting) or any(not one.num_output_tokens for one in scheduler.running):
        rig.step()
    return rig


def _config(loaded: LoadedModel, sizes: Sizes, host_bytes: int) -> EngineConfig:
    """A pool for all that the requests will ever need."""
    longest = sizes.decoder_prompt + 2 * (WARM_UP + sizes.host_steps) + BLOCK_SIZE
    model = ModelConfig(
        loaded.name,
        str(loaded.decoder.dtype).removeprefix("torch."),
        longest,
        loaded.architecture.vocab_size,
        (),
        0,
        model_identity="none",
    )
    config = EngineConfig(
        max_num_seqs=sizes.num_decoders,
        block_size=BLOCK_SIZE,
        kv_transfer_config=consumer_config(host_bytes),
    )
    return config.resolved(
        model,
        max_model_len=longest,
        max_num_batched_tokens=max(8192, sizes.num_decoders),
        max_inflight_steps=1,
        num_gpu_blocks_override=1 + sizes.num_decoders * blocks_for(longest),
    )


def _request(index: int, sizes: Sizes) -> Request:
    # Lengths differ, so that not all requests need their next block in the same step.
    prompt = [index, *range(sizes.decoder_prompt - 1 + index % BLOCK_SIZE)]
    return Request(
        f"r{index}",
        prompt,
        SamplingParams(max_tokens=None),
        seed=0,
        arrival=index,
        block_size=BLOCK_SIZE,
    )
