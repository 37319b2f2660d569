"""What saving to host memory costs: a long prefill, and a batch that decodes, with and without."""

from __future__ import annotations

from interlace.bench.overlap.engines import Kind
from interlace.bench.overlap.pairs import Comparison, in_pairs
from interlace.bench.overlap.rig import Outcome, Rig, Setting


async def saving(rig: Rig) -> Outcome:
    """Prompts and answers that were never seen before, so all of it is saved.

    Decode steps count on average, since few of them save. Raises: what the engines raise.
    Cancelling stops after the run in progress.
    """
    setting, sizes = rig.setting, rig.setting.sizes
    arms = (await rig.plain_arm(), (await rig.engines.get(Kind.PIPELINE)).arm)
    decode = Comparison(
        f"saving on / off: {sizes.num_decoders} decoding",
        lambda: setting.source.make(sizes.num_decoders, sizes.decoder_prompt, sizes.pair_tokens),
        lambda sample: sample.step_s,
        forgets=True,
        at_most=setting.bars.saving,
    )
    comparisons = (prefill(setting), decode)
    done = [await in_pairs(what, arms, sizes.repeats, setting.progress) for what in comparisons]
    return tuple(row for row, _ in done), tuple(check for _, checks in done for check in checks)


def prefill(setting: Setting) -> Comparison:
    """Of prompts that were never seen before."""
    sizes = setting.sizes
    return Comparison(
        f"saving on / off: prefill of {sizes.prompt_tokens}",
        lambda: setting.work(sizes.prompt_tokens),
        lambda sample: sample.first_token_s,
        forgets=True,
        at_most=setting.bars.saving,
    )
