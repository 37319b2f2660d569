"""Loads beside the steps of a batch that decodes: how much they stretch its gaps, at the 99th
percentile.

One long prompt after the other is loaded in bulk, and one token of it computed: in a step of the
batch that has one request more. The other arm is such requests whose KV lies on the device, at the
same pace. So what is compared is loading alone. Prompts are so many that each has left the device
when it comes again.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from interlace.bench.overlap.arms import require
from interlace.bench.overlap.crowd import Answer, Crowd, crowd_of
from interlace.bench.overlap.engines import Kind, OpenEngine
from interlace.bench.overlap.mixed import decoders
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Row
from interlace.bench.spread import Spread, percentile
from interlace.bench.workload import Work

P99 = 0.99
LEAST_LOADED = 0.9
"""Of a prompt that has left the device; a few of its blocks may be there yet."""


class _Window(NamedTuple):
    """What the batch saw while requests came."""

    gaps: list[float]
    """Seconds."""
    pace_s: float
    """From one request to the next, on average."""


class Cycle:
    """Long prompts in host memory, the least recently used one next."""

    def __init__(self, opened: OpenEngine, setting: Setting) -> None:
        """Nothing is stored yet."""
        sizes = setting.sizes
        self._opened = opened
        self._setting = setting
        self._prefixes = [setting.work(sizes.prompt_tokens) for _ in range(sizes.num_cycled)]
        self._endless: Iterator[Work] = itertools.cycle(self._prefixes)
        self.newest = self._prefixes[-1]
        """The one that was used last."""

    async def store(self) -> None:
        """Let all of them lie in host memory, as what was used last, and nothing on the device.

        Computes what is not stored. Cancelling stops after the prompt in progress.
        """
        self._opened.meter.load_mode = "bulk"
        for prefix in self._prefixes:
            await self._opened.arm.run(self._setting.source.behind(prefix, 1))
        self._opened.arm.forget()

    def next(self) -> Work:
        """The next one."""
        self.newest = next(self._endless)
        return self.newest


async def beside(rig: Rig) -> Outcome:
    """Rounds of both arms in turns, each over a crowd of its own.

    Raises: `InterlaceError` if a prompt was not found where it should be. Cancelling ends all
    requests.
    """
    setting, sizes = rig.setting, rig.setting.sizes
    opened = await rig.engines.get(Kind.PIPELINE)
    cycle = Cycle(opened, setting)
    loaded: list[_Window] = []
    cached: list[_Window] = []
    crowd_work, pace_s = decoders(setting), 0.0
    with setting.progress.task("beside", sizes.repeats + 1) as advance:
        for number in range(sizes.repeats + 1):
            await cycle.store()
            async with crowd_of(opened.engine, rig.clock, crowd_work) as crowd:
                await crowd.steps(sizes.settle_steps)
                for is_loaded in (True, False) if number % 2 == 0 else (False, True):
                    if is_loaded:
                        window = await _loads(crowd, setting, cycle)
                        pace_s = window.pace_s
                    else:
                        window = await _hits(crowd, setting, cycle, pace_s)
                    if number:  # the first round warms up
                        (loaded if is_loaded else cached).append(window)
            advance(1)
    return _outcome(setting, loaded, cached)


async def _loads(crowd: Crowd, setting: Setting, cycle: Cycle) -> _Window:
    begin = crowd.now()
    for _ in range(setting.sizes.beside_loads):
        answer = await _ask_behind(crowd, setting, cycle.next())
        require(answer.loaded_tokens, round(LEAST_LOADED * setting.sizes.prompt_tokens), "loaded")
    return _window(crowd, setting, begin)


async def _hits(crowd: Crowd, setting: Setting, cycle: Cycle, pace_s: float) -> _Window:
    """The prompt that was loaded last, again and again; computed first, if it was pushed out."""
    await _ask_behind(crowd, setting, cycle.newest)
    begin = crowd.now()
    for number in range(1, setting.sizes.beside_loads + 1):
        answer = await _ask_behind(crowd, setting, cycle.newest)
        require(answer.cached_tokens, setting.sizes.prompt_tokens, "cached on the device")
        await asyncio.sleep(max(0.0, begin + number * pace_s - crowd.now()))
    return _window(crowd, setting, begin)


async def _ask_behind(crowd: Crowd, setting: Setting, prefix: Work) -> Answer:
    (prompt,) = setting.source.behind(prefix, 1).prompts
    return await crowd.ask(prompt)


def _window(crowd: Crowd, setting: Setting, begin: float) -> _Window:
    end = crowd.now()
    return _Window(crowd.gaps(begin, end), (end - begin) / setting.sizes.beside_loads)


def _outcome(setting: Setting, loaded: list[_Window], cached: list[_Window]) -> Outcome:
    all_loaded, all_cached = (
        [gap for window in windows for gap in window.gaps] for windows in (loaded, cached)
    )
    ratio = percentile(all_loaded, P99) / percentile(all_cached, P99)
    figures = {
        "p99 gap, loads, ms": Spread.of(percentile(w.gaps, P99) * 1e3 for w in loaded),
        "p99 gap, cached, ms": Spread.of(percentile(w.gaps, P99) * 1e3 for w in cached),
        "median gap, loads, ms": Spread.of(statistics.median(w.gaps) * 1e3 for w in loaded),
        "median gap, cached, ms": Spread.of(statistics.median(w.gaps) * 1e3 for w in cached),
        "p99, loads / cached": Spread.of([ratio]),
        "loads GB/s": Spread.of(
            setting.sizes.prompt_tokens * setting.token_bytes / w.pace_s / 1e9 for w in loaded
        ),
    }
    name = f"{setting.sizes.num_decoders} decoding, loads of {setting.sizes.prompt_tokens} in a row"
    check = judged(f"p99 gap with loads / without: {name}", ratio, at_most=setting.bars.beside)
    return (Row(name, figures),), check
