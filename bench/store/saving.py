"""What saving to files adds to a prefill: an engine that writes all it computes, beside one that
saves nothing."""

from __future__ import annotations

import asyncio

from interlace.bench.overlap.pairs import in_pairs
from interlace.bench.overlap.rig import Outcome
from interlace.bench.overlap.saving import prefill
from interlace.bench.store.rig import StoreRig
from interlace.bench.store.shelf import count_records
from interlace.engine.errors import InterlaceError


async def saving(store: StoreRig) -> Outcome:
    """Prompts that were never seen before, in turns; each run ends when its files are written.

    Raises: what the engines raise; `InterlaceError` if not all was written. Cancelling stops after
    the run in progress.
    """
    setting, writer = store.rig.setting, await store.rig.writing_arm()
    arms = (await store.rig.plain_arm(), writer)
    before = await asyncio.to_thread(count_records, store.engine_files)
    row, checks = await in_pairs(prefill(setting), arms, setting.sizes.repeats, setting.progress)
    written = await asyncio.to_thread(count_records, store.engine_files) - before
    if written < writer.num_blocks:
        raise InterlaceError(
            f"only {written} of {writer.num_blocks} blocks were written, so saving did less than it"
            " should: is the disk full, or too slow?"
        )
    return (row,), checks
