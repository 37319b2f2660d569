"""Sees when nothing gets on any more, and says what is waited for."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.connectors.conformance.harness import Harness

PATIENT_STEPS = 60
"""Steps without any progress after which that is a stall, if all goes on in steps."""
PATIENT_S = 5.0
"""The same in seconds, for connectors with threads of their own."""
_NAP_S = 0.001


class Stalls:
    """Of one `Harness.run`."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._moved()

    def _moved(self) -> None:
        self._picture = self._look()
        self._since_step = self._harness.num_steps
        self._since_s = time.monotonic()

    def _look(self) -> object:
        """Changes when anything gets on."""
        harness = self._harness
        return (
            sum(map(len, harness.outputs.values())),
            [(one.num_computed_tokens, one.status) for one in harness.requests.values()],
            len(harness.detectors.ledger.loads),
            harness.scheduler.num_held_requests,
            harness.lanes.num_done,
        )

    def is_stalled(self) -> bool:
        """To be asked after each step. Naps where time has to pass."""
        if self._look() != self._picture:
            self._moved()
            return False
        if not self._harness.has_own_threads:
            return self._harness.num_steps - self._since_step > PATIENT_STEPS
        time.sleep(_NAP_S)
        return time.monotonic() - self._since_s > PATIENT_S

    def explain(self) -> None:
        """Add a finding: of the cause, if one is known."""
        harness = self._harness
        findings, detectors = harness.watch.findings, harness.detectors
        for load in detectors.ledger.loads:
            findings.add(
                "promises-kept",
                f"{load.name}, begun with step {load.step_id}, was never reported as received.",
            )
        for request_id in detectors.ledger.held:
            findings.add(
                "promises-kept",
                f"request_finished answered True for {request_id}, which was never reported as"
                " sent.",
            )
        if detectors.promises.unanswered:
            findings.add(
                "bounded-time",
                "get_num_new_matched_tokens still asks to be asked again for"
                f" {', '.join(sorted(detectors.promises.unanswered))}.",
            )
        waiting = [one.request_id for one in harness.requests.values() if not one.is_finished]
        findings.add(
            "no-deadlock-in-tiny-pools",
            f"nothing gets on: {', '.join(waiting) or 'no request'} cannot end"
            f" ({harness.scheduler!r}).",
        )


class ThreadsSince:
    """Threads that began after this object was made: a connector's, in a quiet process."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def alive(self) -> list[threading.Thread]:
        """Those that have not ended."""
        return [thread for thread in threading.enumerate() if thread not in self._before]
