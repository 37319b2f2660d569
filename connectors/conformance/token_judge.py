"""Compares the tokens of a request with the right ones."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.connectors.conformance.oracle import MIN_MARGIN, Oracle
from interlace.connectors.conformance.watch import Watch
from interlace.engine.request import Request


class TokenJudge:
    """A wrong token violates the property `property_id`."""

    def __init__(self, watch: Watch, oracle: Oracle, property_id: str) -> None:
        self._watch = watch
        self._oracle = oracle
        self._property_id = property_id

    def judge(self, request: Request, found: Sequence[int]) -> None:
        """The request has ended, and got these tokens."""
        right = self._oracle.after_each(request.prompt_token_ids, found)
        self._watch.evidence["tokens"] += len(found)
        for place, (token_id, best) in enumerate(zip(found, right, strict=True)):
            if token_id == best.token_id:
                continue
            if best.margin > MIN_MARGIN:
                self._watch.findings.add(
                    self._property_id,
                    f"token {place} of {request.request_id} is {token_id}, but {best.token_id} is"
                    " right.",
                )
            return  # what follows a tie may be anything
