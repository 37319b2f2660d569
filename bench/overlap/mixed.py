"""A load within a step that a batch decodes in: how much longer that step takes.

Requests decode; another one comes, with a short prefix and a few new tokens. Once its prefix lies
in host memory and is loaded layer by layer in its first step, once it lies on the device. The times
of that step on the device are compared. Beside them stand the gaps that the others see between
their tokens, with that step and the one behind it: no step is planned while one that loads is under
way, so the host's part of it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.bench.overlap.arms import noted, require
from interlace.bench.overlap.crowd import Answer, Crowd, StepGaps, crowd_of
from interlace.bench.overlap.engines import Kind
from interlace.bench.overlap.meter import Meter, Metered
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Row
from interlace.bench.spread import Spread
from interlace.bench.workload import Work
from interlace.engine.device_thread import DeviceThread
from interlace.engine.errors import InterlaceError

STEPS_BETWEEN = 3
"""Between two requests; also behind the last one."""


class _Seen(NamedTuple):
    """Of one request's first step."""

    device_s: float
    gaps: StepGaps


class _Pair(NamedTuple):
    loaded: _Seen
    cached: _Seen


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
                    pair = await _pair(crowd, setting, prefix, opened.meter, rig.prepared.device)
                    advance(1)
                    if number:  # the first round warms up
                        pairs.append(pair)
    return _outcome(setting, hit_tokens, pairs)


def decoders(setting: Setting) -> Work:
    """A crowd's prompts."""
    sizes = setting.sizes
    return setting.source.make(sizes.num_decoders, sizes.decoder_prompt, sizes.decoder_tokens)


async def _pair(
    crowd: Crowd, setting: Setting, prefix: Work, meter: Meter, device: DeviceThread
) -> _Pair:
    count, hit_tokens = setting.sizes.short_new, prefix.prompt_tokens
    seen = []
    for is_stored in (True, False):
        await crowd.steps(STEPS_BETWEEN)
        (prompt,) = setting.source.behind(prefix, count).prompts
        answer, metered = await noted(meter, device, partial(_ask, crowd, prompt))
        if is_stored:
            require(answer.loaded_tokens, hit_tokens, "loaded")
        else:
            require(answer.cached_tokens, hit_tokens, "cached on the device")
        seen.append(_Seen(_first_step(metered, count), crowd.gaps_at(answer.arrived_s)))
    return _Pair(*seen)


async def _ask(crowd: Crowd, prompt: Sequence[int]) -> Answer:
    """Its answer, when steps have followed it."""
    answer = await crowd.ask(prompt)
    await crowd.steps(STEPS_BETWEEN)
    return answer


def _first_step(metered: Metered, num_new: int) -> float:
    """Seconds of the first step that computed all of the request's new tokens, and more."""
    for step in metered.steps:
        if step.num_tokens > num_new:
            return step.seconds
    raise InterlaceError(
        "the device did not tell of a step in which the request joined the batch: let fewer"
        " requests decode, or raise max_num_batched_tokens."
    )


def _outcome(setting: Setting, hit_tokens: int, pairs: list[_Pair]) -> Outcome:
    step = Spread.of(p.loaded.device_s / p.cached.device_s for p in pairs)
    figures = {
        "step, cached, ms": Spread.of(p.cached.device_s * 1e3 for p in pairs),
        "step, loaded, ms": Spread.of(p.loaded.device_s * 1e3 for p in pairs),
        "loaded / cached": step,
        "gap, cached, ms": Spread.of(p.cached.gaps.step_s * 1e3 for p in pairs),
        "gap, loaded, ms": Spread.of(p.loaded.gaps.step_s * 1e3 for p in pairs),
        "with the next gap": Spread.of(sum(p.loaded.gaps) / sum(p.cached.gaps) for p in pairs),
    }
    sizes = setting.sizes
    name = f"{sizes.num_decoders} decoding + {hit_tokens} loaded, {sizes.short_new} new"
    check = judged(f"step with a load / without: {name}", step.median, at_most=setting.bars.mixed)
    return (Row(name, figures),), check
