"""Runs parts of `interlace bench store` over one loaded model, and reports."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from interlace.bench.bars import NO_OVERLAP_BARS
from interlace.bench.kv_blocks import page_shape, token_bytes
from interlace.bench.overlap.engines import Engines, Room, opener
from interlace.bench.overlap.rig import Rig, Setting
from interlace.bench.overlap.session import check_room, file_facts
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.part_reports import Seen, naming, part_title
from interlace.bench.report import Report
from interlace.bench.session import SEED, Prepared
from interlace.bench.store.names import Part
from interlace.bench.store.parts import PARTS
from interlace.bench.store.rig import CUDA_SAVING, USUAL_SIZES, StoreRig, StoreSizes, bars_for
from interlace.bench.workload import WorkSource
from interlace.engine.ports import Clock, Progress


@dataclasses.dataclass(frozen=True, slots=True)
class StoreWork:
    """How much is done, and where files lie."""

    sizes: Sizes
    folder: Path
    """Exists, and is empty."""
    store_sizes: StoreSizes = USUAL_SIZES


async def run_store(
    prepared: Prepared,
    parts: Sequence[Part],
    work: StoreWork,
    clock: Clock,
    progress: Progress,
    seen: Seen,
) -> None:
    """Run the parts, one after the other; engines are shared.

    Raises: what the engines raise; `InterlaceError` that names the part if one could not be
    measured; `OSError`. Cancelling stops after what is in progress.
    """
    sizes, settings = work.sizes, prepared.settings
    check_room(prepared, (), sizes)
    engine_files = work.folder / "engines"
    is_cuda = settings.device == "cuda"
    setting = Setting(
        WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED),
        progress,
        sizes,
        dataclasses.replace(NO_OVERLAP_BARS, saving=CUDA_SAVING if is_cuda else None),
        token_bytes(prepared.loaded),
        "file",
    )
    room = Room.of(sizes, has_crowd=False, only_decodes=False, files=engine_files)
    facts = settings.facts() | {
        "dtype": prepared.dtype,
        "prompt_tokens": sizes.prompt_tokens,
        "new": list(sizes.new),
        "repeats": sizes.repeats,
    }
    facts |= await asyncio.to_thread(file_facts, work.folder)
    async with AsyncExitStack() as stack:
        engines = Engines(stack, opener(prepared, sizes, room, clock, progress))
        store = StoreRig(
            Rig(setting, engines, prepared, clock),
            page_shape(prepared.loaded),
            work.folder,
            engine_files,
            work.store_sizes,
            bars_for(settings.device, settings.model, sizes.prompt_tokens),
        )
        for part in parts:
            with naming(part):
                rows, checks = await PARTS[part](store)
            seen(Report(part_title("store", part), facts, prepared.machine, rows, checks))
