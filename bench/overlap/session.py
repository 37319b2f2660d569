"""Opens the engines of `bench/overlap.py` over one loaded model, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from interlace.bench.bars import LONG_PROMPT, bars_for
from interlace.bench.engine_arm import EngineArm
from interlace.bench.overlap import OverlapBench, overlap
from interlace.bench.report import Report
from interlace.bench.session import SEED, Prepared
from interlace.bench.workload import WorkSource
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig

BLOCK_SIZE = 16
RECORDS_FACTOR = 4
"""Host memory, in prompts of the longest kind: what was computed in between must not push the
prefix out."""
POOL_FACTOR = 4
"""The pool of each engine, likewise: blocks of ended requests are runs of neighbours again."""


async def run_overlap(
    prepared: Prepared,
    prefix_tokens: int,
    new: Sequence[int],
    repeats: int,
    clock: Clock,
    progress: Progress,
) -> Report:
    """Run `overlap`. Raises: what the engines raise. Cancelling stops after the run in progress."""
    from interlace import AsyncEngine

    longest = prefix_tokens + max(new)
    token_bytes = _token_bytes(prepared)
    async with AsyncExitStack() as stack:
        arms = {}
        for mode in ("bulk", "layerwise"):
            config = _config(prepared, mode, longest, token_bytes)
            engine = await stack.enter_async_context(
                AsyncEngine.from_loaded(
                    config, prepared.loaded, device=prepared.device, progress=progress, clock=clock
                )
            )
            arms[mode] = EngineArm(engine, clock, mode)
        bars = bars_for(prepared.gpu, prepared.settings.model, prepared.dtype)
        is_asked = prefix_tokens == LONG_PROMPT
        bench = OverlapBench(
            arms["bulk"],
            arms["layerwise"],
            WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED),
            progress,
            prefix_bytes=prefix_tokens * token_bytes,
            first_token_bars=bars.layerwise_loads if is_asked else {},
            hidden_bars=frozenset(bars.hidden_shares) if is_asked else frozenset(),
        )
        rows, checks = await overlap(bench, prefix_tokens, new, repeats)
    shape = {"prompt_tokens": prefix_tokens, "new": list(new), "repeats": repeats}
    settings = prepared.settings.facts() | {"dtype": prepared.dtype} | shape
    return Report("overlap", settings, prepared.machine, rows, checks)


def _token_bytes(prepared: Prepared) -> int:
    """KV of one token."""
    a = prepared.loaded.architecture
    itemsize = prepared.loaded.decoder.dtype.itemsize
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * itemsize


def _config(prepared: Prepared, mode: str, longest: int, token_bytes: int) -> EngineConfig:
    from interlace import EngineConfig, KVTransferConfig

    settings = prepared.settings
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        cudagraph_mode=settings.cudagraph_mode,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + POOL_FACTOR * -(-longest // BLOCK_SIZE),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "load_mode": mode,
                "host_bytes": RECORDS_FACTOR * longest * token_bytes,
            },
        ),
    )
