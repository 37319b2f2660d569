"""Sees every call of a connector's hooks, on all sides, and lets detectors look at each.

Detectors look and remember; what they find goes to `Findings`, never through the engine, which
would take an exception for the connector's own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from interlace.connectors.conformance.findings import Findings, Trace
from interlace.connectors.conformance.hook_calls import HookCall
from interlace.engine.scheduler_output import SchedulerOutput


class HookExitedError(Exception):
    """A hook raised what would end a thread or the process, such as `SystemExit`. The engine sees
    this in its place."""


class Detector:
    """Looks at calls before they begin and when they have ended. Does nothing by itself."""

    hooks: ClassVar[frozenset[str] | None] = None
    """Of which calls it is told; None for all."""

    def before(self, call: HookCall) -> None:
        """A hook is about to be called."""

    def after(self, call: HookCall) -> None:
        """A hook has returned or raised: `call.answer`, `call.error`."""

    def before_work(self, label: str) -> None:
        """Work on a lane is about to run."""

    def after_work(self, label: str) -> None:
        """Work on a lane has ended."""


def _listens(detector: Detector, moment: str, hook: str) -> bool:
    if getattr(type(detector), moment) is getattr(Detector, moment):
        return False
    return not hook or detector.hooks is None or hook in detector.hooks


class Watch:
    """What goes on between one engine and its connector. One thread."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.findings = Findings(trace)
        self.detectors: tuple[Detector, ...] = ()
        self.calls: list[HookCall] = []
        """Those that go on, the innermost last."""
        self.step: SchedulerOutput | None = None
        """The newest step that the workers were given."""
        self.step_is_running = False
        self._told: dict[tuple[str, str], tuple[Callable[[Any], None], ...]] = {}
        self.evidence: collections.Counter[str] = collections.Counter()
        """What was seen, so that nothing passes that was not looked at."""

    def set_detectors(self, detectors: Sequence[Detector]) -> None:
        """They are told in this order, each what it asks for."""
        self.detectors = tuple(detectors)
        self._told = {}

    @property
    def step_id(self) -> int:
        """Of the newest step that the workers were given; 0 before the first."""
        return 0 if self.step is None else self.step.step_id

    def call(self, call: HookCall, hook: Callable[..., Any]) -> Any:
        """Make the call. Raises: what `hook` raises; `HookExitedError` for what is no
        `Exception`."""
        self._tell("before", call.hook, call)
        self.calls.append(call)
        try:
            call.answer = hook(*call.args, **call.kwargs)
        except Exception as error:
            call.error = error
            raise
        except BaseException as error:
            call.error = error
            raise HookExitedError(f"{type(error).__name__}: {error}") from error
        finally:
            self.calls.pop()
            self._note_end(call)
            self._tell("after", call.hook, call)
        return call.answer

    def _note_end(self, call: HookCall) -> None:
        """A line for the call, or the end of one that was begun when something ran in it."""
        end = call.describe_end()
        if call.has_line:
            self.trace.note(f"{call.describe()} ends{end}")
        elif call.is_worth_a_line:
            self.trace.note(call.describe() + end)

    def _note_calls_that_go_on(self) -> None:
        for call in self.calls:
            if not call.has_line:
                call.has_line = True
                self.trace.note(f"{call.describe()} ...")

    def _tell(self, moment: str, hook: str, what: object) -> None:
        """What comes after the first finding may follow from it: nobody is told any more."""
        listeners = self._told.get((moment, hook))
        if listeners is None:
            told = [one for one in self.detectors if _listens(one, moment, hook)]
            listeners = self._told[moment, hook] = tuple(getattr(one, moment) for one in told)
        try:
            for listener in listeners:
                if self.findings:
                    return
                listener(what)
        except Exception as error:  # noqa: BLE001 - ours: the engine must not see it
            self.findings.broke(error)

    def begin_work(self, label: str) -> None:
        """A lane lets work run."""
        self._note_calls_that_go_on()
        self.trace.note(f"lane      {label}")
        self._tell("before_work", "", label)

    def end_work(self, label: str, error: BaseException | None) -> None:
        """It has ended."""
        if error is not None:
            self.trace.note(f"lane      {label} raised {type(error).__name__}: {error}")
        self._tell("after_work", "", label)

    def hook_that_runs(self) -> str | None:
        """`Class.hook` of the innermost call that goes on. Any thread."""
        calls = list(self.calls)
        return f"{calls[-1].connector}.{calls[-1].hook}" if calls else None
