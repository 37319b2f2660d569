"""What is to be recorded, the engine that it is recorded of, and what records it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from interlace.bench.kv_blocks import BLOCK_SIZE, blocks_for, token_bytes
from interlace.bench.session import Prepared
from interlace.bench.step_trace.trace import AnyTrace
from interlace.bench.timeline import Sample
from interlace.engine.errors import ConfigError

if TYPE_CHECKING:
    from interlace.engine.async_engine import AsyncEngine
    from interlace.engine.config import EngineConfig, KVTransferConfig

T = TypeVar("T")
M_co = TypeVar("M_co", covariant=True)

Run: TypeAlias = Callable[[], Awaitable[Sample]]
"""Sends one request, and returns when the engine is idle again."""
LoadMode: TypeAlias = Literal["layerwise", "hybrid"]
"""How the prefix is loaded: see `PipelineOptions`."""
DEFAULT_GROUP_SIZE = 2
RECORDS_FACTOR = 4
"""Host memory, in prompts: what is computed behind the prefix must not push it out."""
POOL_FACTOR = 4
"""The pool, likewise: blocks of ended requests are runs of neighbours again."""


class StepRecorder(Protocol[M_co]):
    """Sees what steps do."""

    async def record(self, run: Callable[[], Awaitable[T]]) -> tuple[T, M_co]:
        """Await `run()`; beside its outcome, what was seen of its steps.

        Loop thread. Raises: what `run` raises; `InterlaceError` if that cannot be told. Cancelling
        cancels `run`, and returns when the recording has ended.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TimelinePlan:
    """What to record."""

    prefix_tokens: int
    """A multiple of the block size, 16; two blocks at least to load from the back."""
    new_tokens: int
    repeats: int
    """Recorded hits; one more before them warms up."""
    group_size: int | None = None
    """See `TraceFacts`; at most as many as there are layers. Only for loads layer by layer; None
    leaves it as it is by itself."""
    load_mode: LoadMode = "layerwise"

    @property
    def is_hybrid(self) -> bool:
        """Whether the prefix is loaded from its back while its front is computed."""
        return self.load_mode == "hybrid"

    def check(self) -> None:
        """Raises: `ConfigError`."""
        if self.prefix_tokens % BLOCK_SIZE:
            raise ConfigError(
                f"--prompt-tokens {self.prefix_tokens} is not whole blocks: take a multiple of"
                f" {BLOCK_SIZE}."
            )
        if self.is_hybrid and self.prefix_tokens < 2 * BLOCK_SIZE:
            raise ConfigError(
                f"--prompt-tokens {self.prefix_tokens} is one block, which cannot be both computed"
                f" and loaded: take {2 * BLOCK_SIZE} or more for --load-mode hybrid."
            )
        if self.is_hybrid and self.group_size is not None:
            raise ConfigError(
                "--group-size is of loads layer by layer: leave it out for --load-mode hybrid."
            )

    def groups_of(self, num_layers: int) -> int:
        """Layers that share a gate, in a model with so many."""
        return min(self.group_size or DEFAULT_GROUP_SIZE, num_layers)

    def shape(self) -> dict[str, object]:
        """For a report."""
        return {
            "load_mode": self.load_mode,
            "prompt_tokens": self.prefix_tokens,
            "new": self.new_tokens,
            "repeats": self.repeats,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """A kind of PipelineConnector, and what it is told."""

    name: str = "PipelineConnector"
    module_path: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Beside the host memory."""


def engine_config(
    prepared: Prepared, plan: TimelinePlan, connector: ConnectorChoice
) -> EngineConfig:
    """One with room for the plan. Raises: `ConfigError`."""
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
        kv_transfer_config=_kv_transfer_config(prepared, connector, longest),
    )


def _kv_transfer_config(
    prepared: Prepared, connector: ConnectorChoice, longest: int
) -> KVTransferConfig:
    from interlace import KVTransferConfig

    host_bytes = RECORDS_FACTOR * longest * token_bytes(prepared.loaded)
    return KVTransferConfig(
        kv_connector=connector.name,
        kv_connector_module_path=connector.module_path,
        kv_role="kv_both",
        kv_connector_extra_config={"host_bytes": host_bytes, **connector.options},
    )


class HitTracer(Protocol):
    """Makes timelines of hits that are loaded in one way. Loop thread."""

    @property
    def connector(self) -> ConnectorChoice:
        """What the engine needs for it."""
        ...

    def shape(self) -> dict[str, object]:
        """For a report, beside the plan's."""
        ...

    async def trace(self, engine: AsyncEngine, run: Run) -> AnyTrace:
        """A timeline of `run`, one hit on an `engine` that is idle and has `connector`.

        Raises: what `run` raises; `InterlaceError` if what was seen is not understood. Cancelling
        cancels `run`, and returns when the recording has ended.
        """
        ...
