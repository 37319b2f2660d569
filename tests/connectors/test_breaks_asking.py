"""Requests about which the connector wants to be asked again, more than one plan asks about."""

from __future__ import annotations

import pytest
from connected import connected_stepper

from interlace.connectors.conformance import Rule, Script
from interlace.engine.request import RequestStatus
from interlace.engine.scheduler import MAX_DEFERRED


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_among_many_deferred_requests_stalls_nobody(depth: int) -> None:
    """I3. The next plan begins behind the end of the queue, and must ask again all the same."""
    script = Script(default=Rule(answers=(None, None, (0, False))))
    stepper, _ = connected_stepper(script, num_blocks=200, depth=depth)
    requests = [stepper.add([i, 1, 2], max_tokens=1) for i in range(MAX_DEFERRED + 1)]
    assert stepper.scheduler.schedule() is None
    assert stepper.scheduler.awaits_connector
    stepper.scheduler.finish_request(requests[-1], RequestStatus.FINISHED_ABORTED)
    stepper.run()
    assert all(request.is_finished for request in requests)
    stepper.assert_idle()
