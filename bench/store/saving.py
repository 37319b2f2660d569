"""What saving to files adds to a prefill: an engine that writes all it computes, beside one that
saves nothing."""

from __future__ import annotations

from interlace.bench.overlap.pairs import in_pairs
from interlace.bench.overlap.rig import Outcome
from interlace.bench.overlap.saving import prefill
from interlace.bench.store.rig import StoreRig


async def saving(store: StoreRig) -> Outcome:
    """Prompts that were never seen before, in turns; each run ends when its files are written.

    Raises: what the engines raise. Cancelling stops after the run in progress.
    """
    setting = store.rig.setting
    arms = await store.rig.saving_arms()
    row, checks = await in_pairs(prefill(setting), arms, setting.sizes.repeats, setting.progress)
    return (row,), checks
