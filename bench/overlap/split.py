"""Loads from both ends, where loading is slower than computing, or about as fast: a prompt's front
is computed while its back is loaded, in the shares that the connector chooses.

Host memory is too near for that on most machines, so the link is made slower: as often as it takes
until loading the prompt takes as long as computing it, and half and twice as often. Beside each
way stands what the connector's rates predict for the split that it balances: `predicted`, to the
first token, without the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from interlace.bench.overlap.arms import Hit, HitArm, require
from interlace.bench.overlap.modes import MODES, best_fixed
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode
from interlace.engine.errors import InterlaceError

RATIOS = (0.5, 1.0, 2.0)
"""Of loading to computing the prompt."""

Taken = Mapping[LoadMode, Sequence[Hit]]


class Link(NamedTuple):
    """How much slower the link is made."""

    ratio: float
    """See `RATIOS`."""
    slowdown: int
    """Times: see `slow_link.py`."""

    def __str__(self) -> str:
        return f"loading / computing about {self.ratio:g}, link slower {self.slowdown} times"


async def split(rig: Rig) -> Outcome:
    """Measure all ways over each link, in turns.

    Raises: `InterlaceError` if the prefix was not found where it should be. Cancelling stops after
    the request in progress; the link is as it was then.
    """
    return await measure(await rig.hit_arm(), rig.setting)


async def measure(arm: HitArm, setting: Setting) -> Outcome:
    """`split` on any arm."""
    prefix = setting.work(setting.sizes.prompt_tokens)
    await arm.run(prefix)  # computed, and stored
    rows: list[Row] = []
    checks: list[Check] = []
    for link in await find_links(arm, setting, prefix):
        arm.slow_down(link.slowdown)
        try:
            taken = await _run(arm, setting, prefix, str(link))
        finally:
            arm.slow_down(1)
        rows.append(_row(link, taken))
        checks += _checks(setting, link, taken)
    return tuple(rows), tuple(checks)


async def find_links(arm: HitArm, setting: Setting, prefix: Work) -> list[Link]:
    """Those over which loading `prefix` takes as `RATIOS` say, none faster than the machine's.

    Raises: `InterlaceError` if it is not known how fast that is.
    """
    if not arm.link_bytes_per_s:
        raise InterlaceError(
            "the connector could not measure its link: use longer --prompt-tokens."
        )
    load_s = prefix.prompt_tokens * setting.token_bytes / arm.link_bytes_per_s
    compute_s = 0.0
    for _ in range(2):  # the first one warms up
        arm.forget()
        work = setting.source.behind(prefix, min(setting.sizes.new))
        compute_s = (await arm.run(work, "recompute")).device_s
    slowdowns: dict[int, Link] = {}
    for ratio in RATIOS:
        slowdown = max(1, round(ratio * compute_s / load_s))
        slowdowns[slowdown] = Link(slowdown * load_s / compute_s, slowdown)
    return [link._replace(ratio=round(link.ratio, 2)) for link in slowdowns.values()]


async def _run(
    arm: HitArm, setting: Setting, prefix: Work, title: str
) -> dict[LoadMode, list[Hit]]:
    """The first round warms up, and lets the connector learn the rates."""
    new, repeats = min(setting.sizes.new), setting.sizes.repeats
    taken: dict[LoadMode, list[Hit]] = {mode: [] for mode in MODES}
    with setting.progress.task(title, len(MODES) * (repeats + 1)) as advance:
        for number in range(repeats + 1):
            for mode, hits in taken.items():
                arm.forget()
                hit = await arm.run(setting.source.behind(prefix, new), mode)
                if mode in ("bulk", "layerwise"):
                    require(hit.sample.loaded_tokens, prefix.prompt_tokens, "loaded")
                if number:
                    hits.append(hit)
                advance(1)
    return taken


def _row(link: Link, taken: Taken) -> Row:
    figures = {f"{mode} ms": _ms(hits) for mode, hits in taken.items()}
    hybrid = taken["hybrid"]
    predicted = _predicted(taken)
    if predicted is not None:
        figures["predicted ms"] = Spread.of(seconds * 1e3 for seconds in predicted)
        figures["hybrid / predicted"] = Spread.of([_by_prediction(hybrid, predicted)])
    figures["best other / hybrid"] = Spread.of([_gain(taken)])
    figures["auto / best"] = Spread.of([_auto_by_best(taken)])
    figures["tokens loaded"] = Spread.of(hit.sample.loaded_tokens for hit in hybrid)
    return Row(f"{link}, best {_best(taken)}", figures)


def _checks(setting: Setting, link: Link, taken: Taken) -> tuple[Check, ...]:
    bars, name = setting.bars, f"loading / computing {link.ratio:g}"
    predicted = _predicted(taken)
    checks = judged(
        f"auto / best fixed mode, {name}", _auto_by_best(taken), at_most=bars.mode_worst
    )
    if predicted is not None:
        ratio = _by_prediction(taken["hybrid"], predicted)
        checks += judged(f"hybrid / predicted, {name}", ratio, at_most=bars.split)
    return checks


def _best(taken: Taken) -> LoadMode:
    return best_fixed({mode: list(map(_seen_s, hits)) for mode, hits in taken.items()})


def _auto_by_best(taken: Taken) -> float:
    return _seen(taken["auto"]) / _seen(taken[_best(taken)])


def _predicted(taken: Taken) -> list[float] | None:
    """Seconds, of each hybrid request; None if the connector saw nothing to split in one."""
    found = [hit.predicted_s for hit in taken["hybrid"] if hit.predicted_s is not None]
    return found if len(found) == len(taken["hybrid"]) else None


def _by_prediction(hybrid: Sequence[Hit], predicted: Sequence[float]) -> float:
    """To the first token, as the caller sees it, by what was predicted for that very request."""
    pairs = zip(hybrid, predicted, strict=True)
    return Spread.of(_seen_s(hit) / seconds for hit, seconds in pairs).median


def _gain(taken: Taken) -> float:
    """Of the hybrid against the best of the other ways."""
    others = [_seen(hits) for mode, hits in taken.items() if mode not in ("auto", "hybrid")]
    return min(others) / _seen(taken["hybrid"])


def _ms(hits: Sequence[Hit]) -> Spread:
    return Spread.of(_seen_s(hit) * 1e3 for hit in hits)


def _seen(hits: Sequence[Hit]) -> float:
    return Spread.of(map(_seen_s, hits)).median


def _seen_s(hit: Hit) -> float:
    return hit.sample.first_token_s
