"""The engine that a timeline is recorded of, and what records it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from interlace.bench.kv_blocks import BLOCK_SIZE, blocks_for, page_shape, token_bytes
from interlace.bench.session import Prepared
from interlace.bench.step_trace.build import StepMarks
from interlace.bench.step_trace.device import LoadShape
from interlace.bench.step_trace.profiler import ProfiledSteps
from interlace.bench.step_trace.tape import TAPE, StepTape, TapedSteps
from interlace.engine.errors import ConfigError

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig, KVTransferConfig

T = TypeVar("T")

RECORDS_FACTOR = 4
"""Host memory, in prompts: what is computed behind the prefix must not push it out."""
POOL_FACTOR = 4
"""The pool, likewise: blocks of ended requests are runs of neighbours again."""


class StepRecorder(Protocol):
    """Sees what a step does."""

    async def record(self, run: Callable[[], Awaitable[T]]) -> tuple[T, StepMarks]:
        """Await `run()`; beside its outcome, what was seen of its one step that loads.

        Loop thread. Raises: what `run` raises; `InterlaceError` if that cannot be told. Cancelling
        cancels `run`, and returns when the recording has ended.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TimelinePlan:
    """What to record."""

    prefix_tokens: int
    """A multiple of the block size, 16."""
    new_tokens: int
    repeats: int
    """Recorded hits; one more before them warms up."""
    group_size: int
    """See `TraceFacts`; at most as many as there are layers."""

    def check(self) -> None:
        """Raises: `ConfigError`."""
        if self.prefix_tokens % BLOCK_SIZE:
            raise ConfigError(
                f"--prompt-tokens {self.prefix_tokens} is not whole blocks: take a multiple of"
                f" {BLOCK_SIZE}."
            )

    def shape(self) -> dict[str, object]:
        """For a report."""
        return {
            "prompt_tokens": self.prefix_tokens,
            "new": self.new_tokens,
            "repeats": self.repeats,
            "group_size": self.group_size,
        }


def make_recorder(prepared: Prepared, plan: TimelinePlan, tape: StepTape | None) -> StepRecorder:
    """For the engine of `engine_config`: by its tape, or, without one, by profiling the GPU."""
    if tape is not None:
        return TapedSteps(tape)
    block = page_shape(prepared.loaded)
    shape = LoadShape(
        num_layers=block.num_layers,
        page_bytes=block.page_bytes,
        layer_bytes=blocks_for(plan.prefix_tokens) * block.page_bytes,
    )
    return ProfiledSteps(prepared.device, shape)


def engine_config(prepared: Prepared, plan: TimelinePlan, tape: StepTape | None) -> EngineConfig:
    """One that loads layer by layer, and whose connector writes on `tape`, if there is one.

    Raises: `ConfigError`.
    """
    from interlace import EngineConfig

    settings = prepared.settings
    longest = plan.prefix_tokens + plan.new_tokens + 1
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        cudagraph_mode=settings.cudagraph_mode,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + POOL_FACTOR * blocks_for(longest),
        kv_transfer_config=_kv_transfer_config(prepared, plan, longest, tape),
    )


def _kv_transfer_config(
    prepared: Prepared, plan: TimelinePlan, longest: int, tape: StepTape | None
) -> KVTransferConfig:
    from interlace import KVTransferConfig

    extra: dict[str, Any] = {
        "load_mode": "layerwise",
        "host_bytes": RECORDS_FACTOR * longest * token_bytes(prepared.loaded),
        "group_size": plan.group_size,
    }
    if tape is None:
        return KVTransferConfig(
            kv_connector="PipelineConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    return KVTransferConfig(
        kv_connector="TapedPipelineConnector",
        kv_connector_module_path="interlace.bench.step_trace.connector",
        kv_role="kv_both",
        kv_connector_extra_config={**extra, TAPE: tape},
    )
