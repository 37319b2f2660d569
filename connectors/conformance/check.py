"""`check_connector`: the whole suite in one call, for `interlace check` and for tests."""

from __future__ import annotations

import collections
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.checking import Checker
from interlace.connectors.conformance.oracle import Oracle
from interlace.connectors.conformance.properties import BY_ID
from interlace.connectors.conformance.report import CheckReport
from interlace.connectors.conformance.setups import Setups
from interlace.connectors.conformance.stage import Bench
from interlace.connectors.conformance.stored_truth import StoredTruth
from interlace.connectors.conformance.subject import (
    Device,
    DType,
    Subject,
    connector_class,
)
from interlace.connectors.conformance.tiny_model import model_of
from interlace.engine.config import KVRole
from interlace.engine.errors import ConfigError

DEADLINE_S = 30.0
"""For each run of a scenario; the usual one takes a fraction of a second."""
GPU_DEADLINE_S = 120.0
"""The same on a GPU, for which the first runs compile kernels."""

MAX_SEED = 2**63 - 1
"""What the model's weights are drawn with has 63 bits."""


def check_connector(
    connector: str | type[KVConnectorBase_V1],
    extra_config: Mapping[str, Any] | None = None,
    *,
    engine_options: Mapping[str, Any] | None = None,
    workers: int = 1,
    seed: int = 0,
    role: KVRole = "kv_both",
    device: Device = "cpu",
    dtype: DType | None = None,
    only: Collection[str] = (),
    quick: bool = False,
    fail_fast: bool = False,
    deadline_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run a connector through engines with tiny random models, and judge each property.

    `connector` is a registered name, "module:Class", or a class. `extra_config` is its
    `kv_connector_extra_config`; without it, the class's `check_setup` says how to run it, anew for
    each run of a scenario.
    `engine_options` are keywords of `EngineConfig` that it cannot do without. `device`: where the
    engines compute; on "cuda" in float32, for one worker, and every other way of a scenario in
    CUDA graphs. `dtype` is that of all numbers, on a CPU float64 unless it is given. `only`: ids of
    properties. `quick` plays each scenario in one of its two to four ways, in turns; another `seed`
    begins with another way. `fail_fast` ends the check with the first violation. `deadline_s` is
    for each run; None is 30, or 120 on a GPU. `progress` is told the property of each run before
    that begins.

    Blocks for seconds, on a GPU for minutes; runs threads of its own, one at a time, and leaves one
    behind only if a hook never returns. Raises: `ConfigError` if there is no such connector,
    property or device, or it refuses its configuration.
    """
    cls = connector_class(connector)
    unknown = [one for one in only if one not in BY_ID]
    if unknown:
        raise ConfigError(
            f"there is no property {unknown[0]!r}; the properties are {', '.join(BY_ID)}."
        )
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"the seed is {seed}, but has to be from 0 to {MAX_SEED}.")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interlace-check-") as scratch:
        subject = Subject(
            cls=cls, role=role, workers=workers, seed=seed, device=device, dtype=dtype
        )
        setups = Setups(subject, Path(scratch), extra_config, engine_options)
        bench = _bench(subject, setups, scratch)
        checker = Checker(
            bench,
            deadline_s=deadline_s or (DEADLINE_S if device == "cpu" else GPU_DEADLINE_S),
            quick=quick,
            fail_fast=fail_fast,
            advance=progress or (lambda property_id: None),
        )
        results = checker.run(only)
    took_s = time.monotonic() - began_s
    notes = _notes(bench, quick=quick)
    return CheckReport(cls.__name__, seed, bench.workers, tuple(results), notes, took_s)


def _bench(subject: Subject, setups: Setups, scratch: str) -> Bench:
    model = model_of(subject)
    nonce, salt = f"~{secrets.token_hex(8)}", f"~{secrets.token_hex(8)}"
    return Bench(
        subject=subject,
        setups=setups,
        model=model,
        oracle=Oracle(model),
        truth=StoredTruth(),
        nonce=nonce,
        salt=salt,
        secrets=(nonce, salt, scratch),
        evidence=collections.Counter(),
        workers=subject.workers,
    )


def _notes(bench: Bench, *, quick: bool) -> tuple[str, ...]:
    notes = ["each scenario was played in one way only, since it had to be quick"] if quick else []
    if not bench.evidence["loaded tokens"]:
        notes.append("it never loaded: what can be seen of hits alone was not judged")
    if not bench.lane_names:
        notes.append("it uses no lanes: its transfers were seen in one order only")
    if bench.evidence["steps in graphs"] and not bench.evidence["loaded tokens in graphs"]:
        notes.append("it never loaded in CUDA graphs: see requires_piecewise_for_cudagraph")
    if bench.subject.device == "cuda":
        notes.append("on a GPU all streams had ended before each look: their races were not judged")
    if bench.is_synthetic:
        notes.append("its KV is synthetic: protocol, leaks and isolation were judged, not tokens")
    return tuple(notes)
