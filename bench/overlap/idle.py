"""What a connector costs that has nothing to load and saves nothing: decode steps with it and
without, and the host time that it adds to a step.
"""

from __future__ import annotations

from interlace.bench.overlap.engines import Kind
from interlace.bench.overlap.host_cost import HostTimes, measure_host_cost
from interlace.bench.overlap.pairs import Comparison, in_pairs
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.engine.device_thread import finish_despite_cancel


async def idle(rig: Rig) -> Outcome:
    """Batches of one request and of a crowd, the same prompts each time.

    Raises: what the engines raise. Cancelling stops after the run in progress.
    """
    setting, sizes = rig.setting, rig.setting.sizes
    arms = ((await rig.engines.get(Kind.NONE)).arm, (await rig.engines.get(Kind.CONSUMER)).arm)
    rows: list[Row] = []
    checks: list[Check] = []
    for batch_size in sorted({1, sizes.num_decoders}):
        work = setting.source.make(batch_size, sizes.decoder_prompt, sizes.pair_tokens)
        what = Comparison(
            f"idle connector / none: {batch_size} decoding",
            lambda work=work: work,  # type: ignore[misc]
            lambda sample: sample.median_step_s,
            forgets=False,
            at_most=setting.bars.idle,
        )
        row, found = await in_pairs(what, arms, sizes.repeats, setting.progress)
        rows.append(row)
        checks += found
    with setting.progress.task("host time of an idle connector", None):
        prepared = rig.prepared
        times = await finish_despite_cancel(
            prepared.device.submit(measure_host_cost, prepared.loaded, sizes, rig.clock)
        )
    row, found = _host_outcome(setting, times)
    return (*rows, row), (*checks, *found)


def _host_outcome(setting: Setting, times: HostTimes) -> tuple[Row, tuple[Check, ...]]:
    added = Spread.of(
        (b - a) * 1e6 for a, b in zip(times.without, times.with_connector, strict=True)
    )
    name = f"host time added to a step of {setting.sizes.num_decoders}, us"
    figures = {
        "host, without, us": Spread.of(s * 1e6 for s in times.without),
        "host, with, us": Spread.of(s * 1e6 for s in times.with_connector),
        "added us": added,
    }
    return Row(name, figures), judged(name, added.median, at_most=setting.bars.idle_host_us)
