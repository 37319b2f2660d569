"""Runs of grids that a test makes up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from interlace.bench.grid.axes import AXES, Value
from interlace.bench.grid.plan import names_of
from interlace.bench.grid.points import settled
from interlace.bench.grid.record import ArmRun, GridRun, GridSample

Firsts = Sequence[tuple[Mapping[str, Value], Sequence[float]]]


def a_sample(number: int, first_token_s: float, place: int = 0) -> GridSample:
    """Of one request that computed ten tokens."""
    return GridSample(number, place, first_token_s, None, None, 0, 0, 10)


def a_run(arms: Firsts, *, repeats: int | None = None, machine: str = "here") -> GridRun:
    """Arms by what differs from the defaults, with seconds to the first token of their measured
    rounds; a slow round warms up."""
    points = [
        settled(
            {key: axis.default for key, axis in AXES.items()} | dict(values),
            values.get("connector") == "PipelineConnector",
        )
        for values, _ in arms
    ]
    found = tuple(
        ArmRun(
            name,
            point.facts(),
            {"device": "cpu", "dtype": "float32"},
            (a_sample(0, 99.0), *(a_sample(n, s) for n, s in enumerate(seconds, start=1))),
        )
        for name, point, (_, seconds) in zip(names_of(points), points, arms, strict=True)
    )
    rounds = min(len(seconds) for _, seconds in arms)
    return GridRun(
        title="made up",
        file="made-up.toml",
        digest="0" * 64,
        started="2026-01-01T00:00:00+00:00",
        version="0.1.0",
        seed=0,
        repeats=rounds if repeats is None else repeats,
        rounds=rounds,
        grid={"grid": {"prefix": [16, 32]}},
        machine={"cpu": machine, "cores": 2},
        arms=found,
    )


def loading(mode: str, prefix: int, **more: Value) -> dict[str, Value]:
    """An arm of PipelineConnector."""
    return {"connector": "PipelineConnector", "load_mode": mode, "prefix": prefix, **more}


def on_another(run: GridRun, **facts: str | int) -> GridRun:
    """The same run with other facts of its machine."""
    return dataclasses.replace(run, machine={**run.machine, **facts})
