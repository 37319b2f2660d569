"""Asks a connector's match query again and again, where the protocol allows it."""

from __future__ import annotations

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.watch import Detector, Watch


class RepeatedQueries(Detector):
    """Before each query of the engine's the same is asked so many times, and after it the answers
    are compared. The engine's query is the last, as it must be before an allocation."""

    hooks = frozenset(("get_num_new_matched_tokens",))

    def __init__(self, watch: Watch, scheduler_side: KVConnectorBase_V1, num_repeats: int) -> None:
        self._watch = watch
        self._side = scheduler_side
        self._num_repeats = num_repeats
        self._answers: list[object] = []

    def before(self, call: HookCall) -> None:
        """See `Detector`."""
        self._answers = []
        for _ in range(self._num_repeats):
            try:
                self._answers.append(self._side.get_num_new_matched_tokens(*call.args))
            except Exception as error:  # noqa: BLE001 - the connector's
                name = f"{call.connector}.{call.hook}"
                self._watch.findings.add(
                    "match-has-no-effects",
                    f"{name}, asked again, raised {type(error).__name__}: {error}",
                )
                return

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if not self._answers or call.error is not None:
            return
        known = [one for one in (*self._answers, call.answer) if not _is_unknown(one)]
        if any(one != known[0] for one in known):
            self._watch.findings.add(
                "match-has-no-effects",
                f"{call.connector}.{call.hook}, asked {len(self._answers) + 1} times for"
                f" {call.args[0].request_id}, answered {[*self._answers, call.answer]}.",
            )
        self._answers = []


def _is_unknown(answer: object) -> bool:
    """Whether it is "ask again", which may turn into anything at any time."""
    return isinstance(answer, tuple) and bool(answer) and answer[0] is None
