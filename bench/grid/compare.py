"""Two runs of a grid, arm by arm: ratios of medians, and whether they are more than noise.

The rounds of two runs are no pairs, since they were not run in turns. So the range of a ratio comes
from resampling the rounds of each run by itself (bootstrap): 95% of the ratios of medians that come
of it. A ratio whose range holds 1 is within the noise. What a machine does differently from one run
to the next is in no range: run A again when it matters.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from interlace.bench.grid.axes import AXES, Value
from interlace.bench.grid.record import ArmRun, GridRun
from interlace.bench.spread import Spread
from interlace.engine.errors import ConfigError

RESAMPLES: Final = 4000
SEED: Final = 20240917
INSIDE: Final = 0.95
FEWEST: Final = 3
"""Rounds of each run, for a range to say something."""
FIGURES: Final = {"first token": "first_token_s", "decode step": "step_s"}
_SIDES: Final = ("A", "B")
_SHOWN: Final = 4
"""Names of arms in a sentence."""


class Ratio(NamedTuple):
    """Of one figure of one arm, B by A."""

    ratio: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether it may as well be 1."""
        return self.low <= 1 <= self.high


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one arm that both runs have."""

    arm: str
    figure: str
    a: Spread
    """Seconds."""
    b: Spread
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """In words, of B."""
        if min(len(self.a.samples), len(self.b.samples)) < FEWEST:
            return f"too few rounds to say: take {FEWEST} or more"
        if self.ratio.is_noise:
            return "within noise"
        return "slower" if self.ratio.ratio > 1 else "faster"


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common, and what they have not."""

    compared: tuple[Compared, ...]
    differences: tuple[str, ...]
    """Of the grids, sentences for people."""
    machines: tuple[str, ...]
    """The same of the machines."""

    def to_json(self) -> str:
        """Indented JSON with a final line break."""
        record = {
            "compared": [
                {
                    "arm": one.arm,
                    "figure": one.figure,
                    "a_s": dataclasses.asdict(one.a),
                    "b_s": dataclasses.asdict(one.b),
                    **one.ratio._asdict(),
                    "verdict": one.verdict,
                }
                for one in self.compared
            ],
            "differences": list(self.differences),
            "machines": list(self.machines),
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def compare_runs(a: GridRun, b: GridRun) -> Comparison:
    """The arms that both have, by the values of their keys and not by name.

    Raises: `ConfigError`, which says what differs, if there is none, or none with a measured round.
    """
    theirs = {_key(arm.point): arm for arm in b.arms}
    pairs = [(arm, theirs[_key(arm.point)]) for arm in a.arms if _key(arm.point) in theirs]
    differences = tuple(_grid_differences(a, b))
    if not pairs:
        raise ConfigError(
            f"the runs have no arm in common: {'; '.join(differences)}. Compare runs of one grid,"
            " or of grids that share arms."
        )
    compared = tuple(one for pair in pairs for one in _of_arm(*pair))
    if not compared:
        raise ConfigError(
            "no arm was measured in both runs: one of them was stopped in its first round. Run its"
            " grid again."
        )
    return Comparison(compared, differences, tuple(_machine_differences(a, b, pairs)))


def _of_arm(a: ArmRun, b: ArmRun) -> list[Compared]:
    found = []
    for figure, field in FIGURES.items():
        of_a, of_b = a.measured(field), b.measured(field)
        if of_a and of_b and min(of_a) > 0 and min(of_b) > 0:
            ratio = ratio_of(of_a, of_b)
            found.append(Compared(a.name, figure, Spread.of(of_a), Spread.of(of_b), ratio))
    return found


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Median of `b` by that of `a`, positive numbers, with its range. The same for the same."""
    random = np.random.default_rng(SEED)
    medians = [
        np.median(random.choice(np.asarray(values), (RESAMPLES, len(values))), axis=1)
        for values in (a, b)
    ]
    outside = (1 - INSIDE) / 2
    low, high = np.quantile(medians[1] / medians[0], (outside, 1 - outside))
    return Ratio(float(np.median(b) / np.median(a)), float(low), float(high))


def _key(point: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(point.get(key) for key in AXES)


def _grid_differences(a: GridRun, b: GridRun) -> list[str]:
    """By key; and what only one of them was told or could do."""
    found = []
    for key in AXES:
        values = [list(dict.fromkeys(arm.point.get(key) for arm in run.arms)) for run in (a, b)]
        if set(values[0]) != set(values[1]):
            found.append(f"{key} is {_listed(values[0])} in A, {_listed(values[1])} in B")
    connectors = [run.grid.get("connectors", {}) for run in (a, b)]
    if connectors[0] != connectors[1]:
        found.append("the tables [connectors] are not the same")
    if a.seed != b.seed:
        found.append(f"seed is {a.seed} in A, {b.seed} in B")
    for side, run, other in zip(_SIDES, (a, b), (b, a), strict=True):
        keys = {_key(arm.point) for arm in other.arms}
        alone = [arm.name for arm in run.arms if _key(arm.point) not in keys]
        if alone:
            found.append(f"only in {side}: {_shortened(alone)}")
        if run.is_partial:
            found.append(f"{side} was stopped after {run.rounds} of {run.repeats} rounds")
    return found


def _machine_differences(
    a: GridRun, b: GridRun, pairs: Sequence[tuple[ArmRun, ArmRun]]
) -> list[str]:
    found = [
        f"{name} is {a.machine.get(name)} for A, {b.machine.get(name)} for B"
        for name in dict.fromkeys((*a.machine, *b.machine))
        if a.machine.get(name) != b.machine.get(name) and not name.endswith("_mhz")
    ]
    if a.version != b.version:
        found.append(f"Interlace is {a.version} for A, {b.version} for B")
    for name in ("device", "dtype"):
        values = {(x.resolved.get(name), y.resolved.get(name)) for x, y in pairs}
        found += [
            f"{name} was {x} for A, {y} for B" for x, y in sorted(map(_texts, values)) if x != y
        ]
    return found


def _shortened(names: Sequence[str]) -> str:
    shown = "; ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def _texts(pair: tuple[str | None, str | None]) -> tuple[str, str]:
    return str(pair[0]), str(pair[1])


def _listed(values: Sequence[Value]) -> str:
    return ", ".join("-" if value is None else str(value) for value in values)
