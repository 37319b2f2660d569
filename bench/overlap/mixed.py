"""A load within a step that a batch decodes in: how much longer the batch waits for that step.

Requests decode; another one comes, with a short prefix and a few new tokens. Once its prefix lies
in host memory and is loaded layer by layer in its first step, once it lies on the device. The gap
between two tokens of the others that ends with that step is compared, and the one behind it too:
no step is planned while one that loads is under way.
"""

from __future__ import annotations

from typing import NamedTuple

from interlace.bench.overlap.arms import behind, require
from interlace.bench.overlap.crowd import Crowd, StepGaps, crowd_of
from interlace.bench.overlap.engines import Kind
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.overlap.sizes import BLOCK_SIZE
from interlace.bench.report import Row
from interlace.bench.spread import Spread
from interlace.bench.workload import Work

STEPS_BETWEEN = 3
"""Between two requests; also behind the last one."""


class _Pair(NamedTuple):
    loaded: StepGaps
    cached: StepGaps


async def mixed(rig: Rig) -> Outcome:
    """Each prefix is used twice, first from host memory.

    Raises: `InterlaceError` if one was not found where it should be. Cancelling ends all requests.
    """
    setting, sizes = rig.setting, rig.setting.sizes
    hit_tokens = max(1, min(sizes.short_hit, sizes.prompt_tokens) // BLOCK_SIZE) * BLOCK_SIZE
    opened = await rig.engines.get(Kind.PIPELINE)
    pairs: list[_Pair] = []
    crowd_work = decoders(setting)
    with setting.progress.task("mixed", (sizes.repeats + 1) * sizes.hits_a_round) as advance:
        for number in range(sizes.repeats + 1):
            prefixes = [setting.work(hit_tokens) for _ in range(sizes.hits_a_round)]
            for prefix in prefixes:
                await opened.arm.run(prefix)  # computed, and stored
            opened.arm.forget()
            opened.meter.load_mode = "layerwise"
            async with crowd_of(opened.engine, rig.clock, crowd_work) as crowd:
                await crowd.steps(sizes.settle_steps)
                for prefix in prefixes:
                    pair = await _pair(crowd, setting, prefix)
                    advance(1)
                    if number:  # the first round warms up
                        pairs.append(pair)
    return _outcome(setting, hit_tokens, pairs)


def decoders(setting: Setting) -> Work:
    """A crowd's prompts."""
    sizes = setting.sizes
    return setting.source.make(sizes.num_decoders, sizes.decoder_prompt, sizes.decoder_tokens)


async def _pair(crowd: Crowd, setting: Setting, prefix: Work) -> _Pair:
    count, hit_tokens = setting.sizes.short_new, prefix.prompt_tokens
    gaps = []
    for is_stored in (True, False):
        await crowd.steps(STEPS_BETWEEN)
        (prompt,) = behind(prefix, setting.source, count).prompts
        answer = await crowd.ask(prompt)
        await crowd.steps(STEPS_BETWEEN)
        if is_stored:
            require(answer.loaded_tokens, hit_tokens, "loaded")
        else:
            require(answer.cached_tokens, hit_tokens, "cached on the device")
        gaps.append(crowd.gaps_at(answer.arrived_s))
    return _Pair(*gaps)


def _outcome(setting: Setting, hit_tokens: int, pairs: list[_Pair]) -> Outcome:
    step = Spread.of(p.loaded.step_s / p.cached.step_s for p in pairs)
    both = Spread.of(sum(p.loaded) / sum(p.cached) for p in pairs)
    figures = {
        "step, cached, ms": Spread.of(p.cached.step_s * 1e3 for p in pairs),
        "step, loaded, ms": Spread.of(p.loaded.step_s * 1e3 for p in pairs),
        "loaded / cached": step,
        "with the next step": both,
    }
    sizes = setting.sizes
    name = f"{sizes.num_decoders} decoding + {hit_tokens} loaded, {sizes.short_new} new"
    check = judged(f"step with a load / without: {name}", step.median, at_most=setting.bars.mixed)
    return (Row(name, figures),), check
