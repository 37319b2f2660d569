"""Long hits that arrive while a batch decodes, as the connector chooses to load them: how long the
batch waits for a token, at the 99th percentile.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import NamedTuple

from interlace.bench.overlap.beside import P99, Cycle
from interlace.bench.overlap.crowd import Answer, Crowd, crowd_of
from interlace.bench.overlap.engines import Kind
from interlace.bench.overlap.mixed import decoders
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Row
from interlace.bench.spread import Spread, percentile
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.engine.errors import InterlaceError

STEPS_ALONE = 16
"""That the batch decodes before the first hit, to tell how long a step takes."""
STEPS_BEHIND = 2


class _Window(NamedTuple):
    """One round."""

    step_s: float
    """Of the batch alone, at the median."""
    gaps: list[float]
    answers: list[Answer]


async def gaps(rig: Rig) -> Outcome:
    """Rounds of a few hits each, over a crowd of its own.

    Raises: `InterlaceError` if a hit had nothing to load. Cancelling ends all requests.
    """
    setting, sizes = rig.setting, rig.setting.sizes
    opened = await rig.engines.get(Kind.PIPELINE)
    cycle = Cycle(opened, setting)
    windows: list[_Window] = []
    crowd_work = decoders(setting)
    with setting.progress.task("gaps", sizes.repeats + 1) as advance:
        for number in range(sizes.repeats + 1):
            await cycle.store()
            opened.meter.load_mode = "auto"
            async with crowd_of(opened.engine, rig.clock, crowd_work) as crowd:
                await crowd.steps(sizes.settle_steps)
                window = await _window(crowd, setting, cycle)
            advance(1)
            if number:  # the first round warms up, and teaches the connector how long things take
                windows.append(window)
    return _outcome(setting, windows)


async def _window(crowd: Crowd, setting: Setting, cycle: Cycle) -> _Window:
    begin = crowd.now()
    await crowd.steps(STEPS_ALONE)
    first = crowd.now()
    step_s = statistics.median(crowd.gaps(begin, first))
    sizes = setting.sizes
    new = min(sizes.short_new, max(sizes.new))
    prompts = [setting.source.behind(cycle.next(), new).prompts[0] for _ in range(sizes.arrivals)]
    async with asyncio.TaskGroup() as group:
        asked = []
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(max(0.0, first + number / sizes.arrivals_per_s - crowd.now()))
            asked.append(group.create_task(crowd.ask(prompt)))
    await crowd.steps(STEPS_BEHIND)
    return _Window(step_s, crowd.gaps(first, crowd.now()), [task.result() for task in asked])


def _outcome(setting: Setting, windows: list[_Window]) -> Outcome:
    answers = [answer for window in windows for answer in window.answers]
    if any(2 * answer.cached_tokens > setting.sizes.prompt_tokens for answer in answers):
        raise InterlaceError(
            "a prompt was on the device still, so that there was nothing to choose: use a longer"
            " --prompt-tokens, or leave the part gaps out."
        )
    worst = percentile([gap for window in windows for gap in window.gaps], P99) * 1e3
    step = Spread.of(window.step_s * 1e3 for window in windows)
    figures = {
        "step alone ms": step,
        "p99 gap ms": Spread.of(percentile(w.gaps, P99) * 1e3 for w in windows),
        "longest gap ms": Spread.of(max(w.gaps) * 1e3 for w in windows),
        "first token of a hit ms": Spread.of((a.arrived_s - a.started_s) * 1e3 for a in answers),
        "loaded tokens": Spread.of(answer.loaded_tokens for answer in answers),
    }
    sizes = setting.sizes
    name = (
        f"{sizes.num_decoders} decoding, {sizes.arrivals_per_s:g} hits of {sizes.prompt_tokens}"
        " a second"
    )
    bar = setting.bars.gap_steps
    stall_ms = PipelineOptions().max_load_stall_ms
    at_most = None if bar is None else bar * step.median + stall_ms
    return (Row(name, figures),), judged(f"p99 gap, ms: {name}", worst, at_most=at_most)
