"""Runs parts of `interlace bench overlap` over one loaded model, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from interlace.bench.bars import NO_OVERLAP_BARS, bars_for
from interlace.bench.kv_blocks import BLOCK_SIZE, token_bytes
from interlace.bench.overlap.engines import Engines, Room, opener
from interlace.bench.overlap.names import CROWDED, Part
from interlace.bench.overlap.parts import PARTS
from interlace.bench.overlap.rig import Rig, Setting
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.part_reports import Seen, naming, part_title
from interlace.bench.report import Report
from interlace.bench.session import SEED, Prepared
from interlace.bench.workload import WorkSource
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Clock, Progress
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.host import file_system


async def run_overlap(
    prepared: Prepared,
    parts: Sequence[Part],
    sizes: Sizes,
    clock: Clock,
    progress: Progress,
    seen: Seen,
    folder: Path | None = None,
) -> None:
    """Run the parts, one after the other; engines are shared. With a `folder`, which is empty, they
    are of `FROM_FILES`, and files lie there.

    Raises: what the engines raise; `InterlaceError` that names the part if one could not be
    measured. Cancelling stops after what is in progress.
    """
    check_room(prepared, parts, sizes)
    room = Room.of(
        sizes,
        has_crowd=not CROWDED.isdisjoint(parts),
        only_decodes=set(parts) <= {Part.IDLE, Part.LINK},
        files=folder,
    )
    bars = bars_for(prepared.gpu, prepared.settings.model, prepared.dtype)
    setting = Setting(
        WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED),
        progress,
        sizes,
        NO_OVERLAP_BARS
        if folder is not None  # the bars are about host memory
        else bars.overlapping(sizes.prompt_tokens, sizes.num_decoders),
        token_bytes(prepared.loaded),
        "memory" if folder is None else "file",
    )
    async with AsyncExitStack() as stack:
        engines = Engines(stack, opener(prepared, sizes, room, clock, progress))
        rig = Rig(setting, engines, prepared, clock)
        for part in parts:
            with naming(part):
                rows, checks = await PARTS[part](rig)
            facts = prepared.settings.facts() | {"dtype": prepared.dtype} | sizes.facts()
            if folder is not None:
                facts |= await asyncio.to_thread(file_facts, folder)
            seen(Report(part_title("overlap", part), facts, prepared.machine, rows, checks))


def file_facts(folder: Path) -> dict[str, object]:
    """For a report: that KV lies in files, and in a file system of which kind. Blocks."""
    kind = file_system(folder)
    return {"store": "file", "file_system": None if isinstance(kind, Unknown) else kind}


def check_room(prepared: Prepared, parts: Sequence[Part], sizes: Sizes) -> None:
    """Raises: `InterlaceError` for work that no request of this model can be."""
    limit = prepared.loaded.max_model_len
    lengths = [sizes.longest]
    if not CROWDED.isdisjoint(parts):
        lengths.append(sizes.decoder_prompt + sizes.decoder_tokens)
    if not {Part.SAVING, Part.IDLE}.isdisjoint(parts):
        lengths.append(sizes.decoder_prompt + sizes.pair_tokens)
    if max(lengths) >= limit:
        raise InterlaceError(
            f"requests of {max(lengths)} tokens do not fit into {limit}, which is the model's limit"
            " or --max-model-len: choose shorter --prompt-tokens or --new, other parts, or another"
            " model."
        )
    if sizes.prompt_tokens % BLOCK_SIZE:
        raise InterlaceError(
            f"{sizes.prompt_tokens} tokens are no whole number of blocks of {BLOCK_SIZE}, and only"
            " whole blocks are stored: choose such --prompt-tokens."
        )
