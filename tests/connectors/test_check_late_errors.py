"""Load errors that are told when the step's tokens have come: engines and the check go by them."""

from __future__ import annotations

from typing import Any

from interlace.connectors.conformance import check_connector
from interlace.connectors.example_connector import ExampleConnector

ONLY = ("failures-exact", "loaded-kv-right", "layer-loads-complete")


class LateExample(ExampleConnector):
    """Knows late what it could not load."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: set[int] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._late |= super().get_block_ids_with_load_errors()
        return set()

    def get_late_load_errors(self) -> set[int]:
        late, self._late = self._late, set()
        return late


class SilentExample(LateExample):
    """Never tells."""

    def get_late_load_errors(self) -> set[int]:
        return set()


class LoudExample(LateExample):
    """Tells a block that nobody has."""

    def get_late_load_errors(self) -> set[int]:
        return {10_000}


def test_late_errors_count_like_others() -> None:
    report = check_connector(LateExample, only=ONLY, quick=True)
    report.raise_if_failed()
    assert report.result("failures-exact").verdict == "ok"


def test_who_never_tells_is_found() -> None:
    report = check_connector(SilentExample, only=ONLY[:1], quick=True)
    assert report.failed == ["failures-exact"]


def test_what_is_no_block_is_refused() -> None:
    report = check_connector(LoudExample, only=("tokens-hit",), quick=True)
    assert report.failed
