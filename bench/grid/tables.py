"""A run of a grid as a report for tables, and the prefixes from which loading pays. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from interlace.bench.grid.axes import AXES, CACHED, RECOMPUTE, TRANSFORMERS, Value
from interlace.bench.grid.record import ArmRun, GridRun
from interlace.bench.report import Report, Row
from interlace.bench.spread import Spread

_FIGURES: Final[Mapping[str, tuple[str, float]]] = {
    "first token ms": ("first_token_s", 1e3),
    "decode step ms": ("step_s", 1e3),
    "tokens/s": ("decode_tokens_per_s", 1),
    "device ms": ("device_s", 1e3),
    "load ms": ("load_s", 1e3),
}
_TOKENS: Final = {
    "cached": "cached_tokens",
    "loaded": "loaded_tokens",
    "computed": "computed_tokens",
}
_OF_THE_WAY: Final = ("connector", "store", "load_mode", "group_size", "delay_ms", "prefix")
"""Keys in which loading and computing again may differ, and are compared."""


def report_of(run: GridRun) -> Report:
    """The measured rounds of each arm that has some."""
    rows = tuple(Row(arm.name, _figures(arm)) for arm in run.arms if arm.measured("first_token_s"))
    settings = {
        "file": run.file,
        "sha256": run.digest[:8],
        "rounds": f"{run.rounds} of {run.repeats}" if run.is_partial else run.rounds,
        "seed": run.seed,
    }
    notes = tuple(str(crossing) for crossing in crossings(run))
    if run.is_partial:
        notes = (f"stopped: {run.rounds} of {run.repeats} rounds are whole", *notes)
    return Report(run.title, settings, run.machine, rows, (), notes=notes)


def _figures(arm: ArmRun) -> dict[str, Spread]:
    figures = {}
    for name, (field, factor) in _FIGURES.items():
        found = [value * factor for value in arm.measured(field)]
        if any(found):
            figures[name] = Spread.of(found)
    for name, field in _TOKENS.items():
        tokens = arm.measured(field)
        figures[name] = Spread.of(tokens[:1] if len(set(tokens)) == 1 else tokens)
    return figures


class Series(NamedTuple):
    """Arms that differ in the prefix alone, from the shortest on; at least one."""

    name: str
    """What they have in common of what varies."""
    point: Mapping[str, Value]
    """Of the first of them."""
    first_tokens: Mapping[int, Spread]
    """Seconds by tokens of the prefix."""


class Crossing(NamedTuple):
    """Where loading a prefix takes as long as computing it again."""

    name: str
    tokens: float | None
    """Of the prefix, between two that were measured; None: nowhere among them."""
    loads_later_on: bool
    """Whether loading is sooner from there on, or, if there is no crossing, everywhere."""

    def __str__(self) -> str:
        if self.tokens is None:
            where = "at every length measured" if self.loads_later_on else "at none measured"
            return f"{self.name}: sooner than computing again {where}"
        side = "from" if self.loads_later_on else "up to"
        return f"{self.name}: sooner than computing again {side} about {self.tokens:.0f} tokens"


def series_of(run: GridRun) -> list[Series]:
    """The measured arms, by all but their prefix."""
    found: dict[tuple[Value, ...], list[ArmRun]] = {}
    for arm in run.arms:
        if arm.point.get("prefix") and arm.measured("first_token_s"):
            key = tuple(arm.point.get(key) for key in AXES if key != "prefix")
            found.setdefault(key, []).append(arm)
    keys = [key for key in AXES if key != "prefix"]
    varying = [
        key
        for place, key in enumerate(keys)
        if len({values[place] for values in found if values[place] is not None}) > 1
    ]
    series = []
    for arms in found.values():
        point = arms[0].point
        name = ", ".join(AXES[k].label.format(point[k]) for k in varying if point[k] is not None)
        tokens = {
            _tokens(arm): Spread.of(arm.measured("first_token_s"))
            for arm in sorted(arms, key=_tokens)
        }
        series.append(Series(name or str(point.get("load_mode")), point, tokens))
    return series


def _tokens(arm: ArmRun) -> int:
    prefix = arm.point["prefix"]
    assert isinstance(prefix, int), "it was read so"
    return prefix


def crossings(run: GridRun) -> list[Crossing]:
    """Of each way to load with computing again, where two prefixes or more were measured of both;
    at the medians, linear in between."""
    series = series_of(run)
    found = []
    for loaded in series:
        computed = _computed_like(loaded, series)
        if computed is None or loaded.point.get("load_mode") in (RECOMPUTE, CACHED, None):
            continue
        both = sorted(set(loaded.first_tokens) & set(computed.first_tokens))
        if len(both) > 1:
            gains = [
                (at, computed.first_tokens[at].median - loaded.first_tokens[at].median)
                for at in both
            ]
            found.append(_crossing(loaded.name, gains))
    return found


def _computed_like(loaded: Series, series: Sequence[Series]) -> Series | None:
    """The series that computes the same again; of its own connector if there is one."""
    found = [
        one
        for one in series
        if one.point.get("load_mode") == RECOMPUTE
        and one.point.get("engine") != TRANSFORMERS
        and all(
            one.point.get(key) == loaded.point.get(key) for key in AXES if key not in _OF_THE_WAY
        )
    ]
    return min(
        found,
        key=lambda one: one.point.get("connector") != loaded.point.get("connector"),
        default=None,
    )


def _crossing(name: str, gains: Sequence[tuple[int, float]]) -> Crossing:
    """The last one, which says what is so for all that is longer."""
    for (at, gain), (next_at, next_gain) in reversed(list(itertools.pairwise(gains))):
        if (gain > 0) != (next_gain > 0):
            share = gain / (gain - next_gain)
            return Crossing(name, at + share * (next_at - at), next_gain > 0)
    return Crossing(name, None, gains[-1][1] > 0)
