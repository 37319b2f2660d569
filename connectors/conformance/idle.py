"""Whether anything is left when all requests have ended: on the engine's side and on both of the
connector's, and after its shutdown."""

from __future__ import annotations

import time

import numpy as np
import torch

from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.open_files import MAX_LEFT_OPEN
from interlace.connectors.conformance.retention import find_remembered
from interlace.engine.config import EngineConfig, KVTransferConfig

GRACE_S = 2.0
"""For threads of a connector to let go, or to end."""
_NAP_S = 0.01
_NOT_THE_CONNECTORS = (EngineConfig, KVTransferConfig, torch.Tensor, np.ndarray)


def check_idle(harness: Harness, grace_s: float = GRACE_S) -> None:
    """All requests of `harness` have ended. Raises: `Violation`."""
    _check_engine(harness)
    ids = list(harness.requests)
    remembered = _remembered(harness, ids)
    if remembered is not None:
        # Without requests there are no steps, so what ended last may not have been noticed.
        harness.lanes.drain()
        harness.add("last", [1], max_tokens=1)
        harness.run()
        remembered = _remembered(harness, ids)
    deadline_s = time.monotonic() + grace_s
    while remembered is not None and harness.has_own_threads and time.monotonic() < deadline_s:
        time.sleep(_NAP_S)
        remembered = _remembered(harness, ids)
    if remembered is not None:
        harness.watch.findings.add(
            "idle-at-the-end",
            f"all requests have ended, but {harness.subject.name}'s {remembered}.",
        )
    _check_files(harness, deadline_s)
    harness.watch.evidence["idle"] += 1
    harness.watch.findings.raise_first()


def _check_files(harness: Harness, deadline_s: float) -> None:
    """Handles that a request needed are closed by now, or before `deadline_s` by threads."""
    while harness.files.num_open() > MAX_LEFT_OPEN:
        if harness.has_own_threads and time.monotonic() < deadline_s:
            time.sleep(_NAP_S)
            continue
        harness.watch.findings.add(
            "idle-at-the-end",
            f"all requests have ended, but {harness.subject.name} left"
            f" {harness.files.num_open()} files open: close what no request needs any more.",
        )
        return


def _check_engine(harness: Harness) -> None:
    pool = harness.scheduler.kv_cache.pool
    held = [block.block_id for block in pool.blocks[1:] if block.ref_cnt]
    if held or pool.num_free_blocks != pool.num_usable_blocks:
        harness.watch.findings.add(
            "idle-at-the-end", f"all requests have ended, but blocks {held} are not free."
        )
    if harness.scheduler.requests or harness.scheduler.num_held_requests:
        harness.watch.findings.add("idle-at-the-end", f"the engine holds {harness.scheduler!r}.")
    harness.watch.findings.raise_first()


def _remembered(harness: Harness, ids: list[str]) -> str | None:
    """What a side remembers of these requests."""
    exempt = [*harness.subject.given_objects, harness.lanes, harness.watch]
    exempt += [harness.scheduler.kv_cache.pool]
    return find_remembered(
        dict(harness.sides), ids, exempt=exempt, exempt_types=_NOT_THE_CONNECTORS
    )


def check_released(harness: Harness) -> None:
    """Both sides were shut down. Raises: `Violation`."""
    deadline_s = time.monotonic() + GRACE_S
    while (left := harness.own_threads) and time.monotonic() < deadline_s:
        time.sleep(_NAP_S)
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        harness.watch.findings.add(
            "shutdown-releases", f"{len(left)} threads go on after shutdown: {names}."
        )
    harness.watch.evidence["released"] += 1
    harness.watch.findings.raise_first()
