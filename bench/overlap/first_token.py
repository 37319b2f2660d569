"""How much of a load hides behind computing: a long prefix in host memory, new tokens behind it.

    cached      the prefix lies on the device: computing alone
    bulk        it is loaded first, and then computed on: one after the other
    layer-wise  each layer is loaded while those before it compute
    auto        whatever the connector chooses
    computed    it is computed again, with nothing loaded

All to the first token as a caller sees it, in turns, on one engine. The rest are times of the
device, from what was queued first to the sampled token: `load` is the load alone, `compute` the
step behind a cached prefix, `serial` their sum, `pipelined` the layer-wise step. The hidden share
is (serial - pipelined) / min(load, compute): of a step that waits for nothing it is 1. The serial
way that the engine has, bulk, waits for the host between the two as well; "against bulk" is what
layer-wise loading saves against it, as a caller sees it, by the shorter of bulk - cached and
cached.

Where prefixes lie in files, each load finds host memory empty: it reads them into host memory, and
copies them to the device from there. `load` is both, `read ms` the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from interlace.bench.figures import Figures
from interlace.bench.overlap.arms import Hit, HitArm, require
from interlace.bench.overlap.meter import LoadTimes
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.workload import Work
from interlace.engine.errors import InterlaceError


class Round(NamedTuple):
    """One of each, with one number of new tokens."""

    cached: Hit
    bulk: Hit
    layerwise: Hit
    auto: Hit | None = None
    computed: Hit | None = None

    @property
    def load_s(self) -> float:
        """Of the load alone: the faster of both, since other work may slow either of them."""
        return min(only_load(self.bulk).whole_s, only_load(self.layerwise).whole_s)

    @property
    def read_s(self) -> float:
        """Of its part that reads files, likewise."""
        return min(only_load(self.bulk).read_s, only_load(self.layerwise).read_s)

    @property
    def serial_s(self) -> float:
        """One after the other, and nothing in between."""
        return self.load_s + self.cached.device_s

    @property
    def hidden(self) -> float:
        """Share of the shorter of loading and computing."""
        least = min(self.load_s, self.cached.device_s)
        return _by(self.serial_s - self.layerwise.device_s, least)

    @property
    def against_bulk(self) -> float:
        """What layer-wise loading saves, as a caller sees it."""
        bulk, cached = _seen(self.bulk), _seen(self.cached)
        return _by(bulk - _seen(self.layerwise), min(bulk - cached, cached))


def only_load(hit: Hit) -> LoadTimes:
    """The load of a request that has one; what is read from files comes in several transfers, the
    later ones while others are read. Raises: `InterlaceError`."""
    if not hit.loads or (len(hit.loads) > 1 and not hit.loads[0].read_s):
        raise InterlaceError(
            f"a request was loaded in {len(hit.loads)} transfers and not in one: nothing else may"
            " load meanwhile."
        )
    return LoadTimes(*(sum(column) for column in zip(*hit.loads, strict=True)))


async def first_token(rig: Rig) -> Outcome:
    """Measure each number of new tokens, in turns.

    Raises: `InterlaceError` if the prefix was not found where it should be. Cancelling stops after
    the request in progress.
    """
    setting = rig.setting
    arm = rig.restarted_arm() if rig.is_registered else await rig.hit_arm()
    return await measure(arm, setting, setting.sizes.new)


async def measure(arm: HitArm, setting: Setting, new: Sequence[int]) -> Outcome:
    """`first_token` on any arm."""
    prefix = setting.work(setting.sizes.prompt_tokens)
    await arm.keep(prefix)
    rounds = await run_rounds(arm, setting, prefix, new, "first token", is_whole=True)
    rows = [row(f"{count} new", setting, arm, taken) for count, taken in rounds.items()]
    checks = [check for count, taken in rounds.items() for check in _checks(setting, count, taken)]
    return tuple(rows), tuple(checks)


async def run_rounds(
    arm: HitArm, setting: Setting, prefix: Work, new: Sequence[int], title: str, *, is_whole: bool
) -> Mapping[int, list[Round]]:
    """The measured rounds of each number of new tokens; one more before them warms up.

    `is_whole`: with the arms that say nothing of how much is hidden, too.
    """
    rounds: dict[int, list[Round]] = {count: [] for count in new}
    repeats = setting.sizes.repeats
    with setting.progress.task(title, len(new) * (repeats + 1)) as advance:
        for number in range(repeats + 1):
            for count, taken in rounds.items():
                one = await _round(arm, setting, prefix, count, is_whole=is_whole)
                if number:
                    taken.append(one)
                advance(1)
    return rounds


async def _round(
    arm: HitArm, setting: Setting, prefix: Work, count: int, *, is_whole: bool
) -> Round:
    whole, source = prefix.prompt_tokens, setting.source
    arm.forget()
    bulk = await arm.run(source.behind(prefix, count), "bulk")
    arm.forget()
    layerwise = await arm.run(source.behind(prefix, count), "layerwise")
    for loaded in (bulk, layerwise):
        require(loaded.sample.loaded_tokens, whole, "loaded")
    cached = await arm.run(source.behind(prefix, count))
    require(cached.sample.cached_tokens, whole, "cached on the device")
    found = Round(cached, bulk, layerwise)
    if not is_whole:
        return found
    arm.forget()
    auto = await arm.run(source.behind(prefix, count), "auto")
    computed = await arm.run(setting.work(whole + count))
    return found._replace(auto=auto, computed=computed)


def row(case: str, setting: Setting, arm: HitArm, taken: Sequence[Round]) -> Row:
    """All figures of some rounds."""
    num_bytes = setting.sizes.prompt_tokens * setting.token_bytes
    ideal_s = num_bytes / arm.link_bytes_per_s if arm.link_bytes_per_s else 0.0
    figures: Figures = {}
    for name, ways in (
        ("cached", [r.cached for r in taken]),
        ("bulk", [r.bulk for r in taken]),
        ("layer-wise", [r.layerwise for r in taken]),
        ("auto", [r.auto for r in taken]),
        ("computed", [r.computed for r in taken]),
    ):
        seen = [_seen(hit) * 1e3 for hit in ways if hit is not None]
        if seen:
            figures[f"{name} ms"] = Spread.of(seen)
    figures |= {name: Spread.of(map(of_round, taken)) for name, of_round in _DEVICE_FIGURES.items()}
    if setting.store == "file":
        figures["read ms"] = Spread.of(r.read_s * 1e3 for r in taken)
    figures["added, in loads"] = Spread.of(
        _by(_seen(r.layerwise) - _seen(r.cached), ideal_s) for r in taken
    )
    figures["of link"] = Spread.of(_by(ideal_s, only_load(r.layerwise).seconds) for r in taken)
    return Row(case, figures)


_DEVICE_FIGURES: Mapping[str, Callable[[Round], float]] = {
    "load ms": lambda r: r.load_s * 1e3,
    "compute ms": lambda r: r.cached.device_s * 1e3,
    "serial ms": lambda r: r.serial_s * 1e3,
    "pipelined ms": lambda r: r.layerwise.device_s * 1e3,
    "hidden share": lambda r: r.hidden,
    "against bulk": lambda r: r.against_bulk,
    "submit ms": lambda r: only_load(r.layerwise).submit_s * 1e3,
    "copies": lambda r: only_load(r.layerwise).num_copies,
    "runs": lambda r: only_load(r.layerwise).num_runs,
}


def _checks(setting: Setting, count: int, taken: Sequence[Round]) -> tuple[Check, ...]:
    bars = setting.bars
    layerwise, bulk = (
        Spread.of(_seen(hit) for hit in ways).median
        for ways in ([r.layerwise for r in taken], [r.bulk for r in taken])
    )
    ms = layerwise * 1e3
    bar = bars.first_token_ms.get(count)
    checks = judged(f"first token, layer-wise, {count} new, ms", ms, at_most=bar)
    if count in bars.hidden_new:
        checks += hidden_check(setting, f"{count} new", taken)
    if setting.store == "file":  # there is one way for what lies in files
        return checks
    return (*checks, Check(f"layer-wise / bulk, {count} new", layerwise / bulk, at_most=1))


def hidden_check(setting: Setting, case: str, taken: Sequence[Round]) -> tuple[Check, ...]:
    """The hidden share against its bar, if there is one."""
    share = Spread.of(r.hidden for r in taken).median
    return judged(f"hidden share, {case}", share, at_least=setting.bars.hidden)


def _seen(hit: Hit) -> float:
    """Seconds to the first token, as the caller sees it."""
    return hit.sample.first_token_s


def _by(amount: float, unit: float) -> float:
    """0 where there is nothing to divide by."""
    return amount / unit if unit > 0 else 0.0
