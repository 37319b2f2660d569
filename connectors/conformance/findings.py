"""What a check finds: violations of properties, with the calls that led to the first of them."""

from __future__ import annotations

import collections

TRACE_LINES = 16
"""Of a trace that is shown."""
_KEPT_LINES = 400


class Violation(Exception):  # noqa: N818 - it is no error of ours
    """A connector lacks a property. Raised between two calls, never through the engine."""

    def __init__(self, property_id: str, message: str, trace: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.property_id = property_id
        self.message = message
        self.trace = trace
        """The calls before it, oldest first."""

    def of(self, property_id: str) -> Violation:
        """The same as a violation of another property."""
        return Violation(property_id, self.message, self.trace)


class NotJudged(Exception):  # noqa: N818 - it is no error
    """A scenario has nothing to judge with this connector; the message says why."""


class Trace:
    """The newest calls, as lines of text that are the same in every run."""

    def __init__(self, *secrets: str) -> None:
        """`secrets` are left out of all text: what makes ids and paths unguessable."""
        self._secrets = [secret for secret in secrets if secret]
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def public(self, text: str) -> str:
        """`text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "")
        return text

    def note(self, line: str) -> None:
        """Add a line."""
        self._lines.append(self.public(line))

    def newest(self, num_lines: int = TRACE_LINES) -> tuple[str, ...]:
        """So many lines, oldest first."""
        return tuple(self._lines)[-num_lines:]


class Findings:
    """Violations in the order in which they were noticed. What comes later may follow from the
    first, so only that one is raised."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._first: Exception | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def broke(self, error: Exception) -> None:
        """Note an exception of the check's own code, which must not be taken for a connector's."""
        if self._first is None:
            self._first = error

    def add(self, property_id: str, message: str) -> None:
        """Note a violation, unless one was noted before."""
        if self._first is None:
            message = self._trace.public(message)
            self._first = Violation(property_id, message, self._trace.newest())

    def raise_first(self) -> None:
        """Raises: `Violation`, if there is one, or what broke the check."""
        if self._first is not None:
            raise self._first
