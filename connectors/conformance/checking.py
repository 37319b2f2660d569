"""Plays all scenarios with one connector, and turns what they find into verdicts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator

from interlace.connectors.conformance.deadline import Overrun, call_within
from interlace.connectors.conformance.findings import NotJudged, Violation
from interlace.connectors.conformance.properties import PROPERTIES, Property
from interlace.connectors.conformance.report import Result
from interlace.connectors.conformance.scenarios import SCENARIOS
from interlace.connectors.conformance.stage import Bench, Scenario, Stage, Variant
from interlace.connectors.conformance.subject import Subject

_WATCHED = {
    "hooks-do-not-raise": ("steps", "no step was run"),
    "answers-lawful": ("steps", "no step was run"),
    "calls-in-order": ("steps", "no step was run"),
    "output-not-mutated": ("outputs", "no step was planned"),
    "metadata-cleared": ("cleared", "no step was run"),
    "loaded-kv-right": ("compared blocks", "it never loaded"),
    "layer-loads-complete": ("sync loads", "it never loaded within a step"),
    "loads-reported-when-done": ("async loads", "it never loaded asynchronously"),
    "loads-do-not-hold-up-steps": ("async loads on lanes", "it never loaded so on lanes"),
    "loads-write-only-their-blocks": ("steps", "no step was run"),
    "reported-once": ("reports", "it never reported anything"),
    "reports-known-ids": ("reports", "it never reported anything"),
    "promises-kept": ("promises", "it never loaded asynchronously, nor held a request"),
    "idle-at-the-end": ("idle", "no scenario came to its end"),
    "shutdown-releases": ("released", "no scenario came to its end"),
    "bounded-time": ("steps", "no step was run"),
    "workers-agree": ("loads of several workers", "there were not several workers that loaded"),
}
"""Properties that are watched in every scenario: which evidence it takes to judge one, and what to
say without any."""


@dataclasses.dataclass(slots=True)
class _Verdicts:
    """What the runs so far have shown of each property."""

    violations: dict[str, tuple[Violation, str]] = dataclasses.field(default_factory=dict)
    """Property -> its first violation, and where that was."""
    num_good: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Scenario's property -> runs that came to their end."""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Scenario's property -> why a run of it could not judge."""
    cut_short: dict[str, str] = dataclasses.field(default_factory=dict)
    """Scenario's property -> what ended a run of it."""
    hung: str = ""
    """The hook that did not return: nothing can be run after that."""


class Checker:
    """One check. `deadline_s` is for each run of a scenario."""

    def __init__(
        self,
        bench: Bench,
        *,
        deadline_s: float,
        quick: bool,
        fail_fast: bool,
        advance: Callable[[str], None],
    ) -> None:
        """`advance` is told of each run before it begins. `quick`: play each scenario in one way.
        `fail_fast`: end with the first violation."""
        self._quick = quick
        self._fail_fast = fail_fast
        self._bench = bench
        self._deadline_s = deadline_s
        self._advance = advance
        self._verdicts = _Verdicts()

    def run(self, only: Collection[str] = ()) -> list[Result]:
        """Play what is needed for the properties `only`, or for all. Results of others come along
        if they were violated meanwhile. Raises: `ConfigError`."""
        for place, scenario in enumerate(scenarios_for(only)):
            for variant in self._ways(scenario, place):
                if not self._is_over:
                    self._play(scenario, variant)
        violated = self._verdicts.violations
        wanted = [one for one in PROPERTIES if not only or one.id in only or one.id in violated]
        return [self._result(one) for one in wanted]

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is to be played."""
        has_failed = bool(self._verdicts.violations)
        return bool(self._verdicts.hung) or (self._fail_fast and has_failed)

    def _ways(self, scenario: Scenario, place: int) -> Iterator[Variant]:
        """The variants that are played; `place` is the scenario's."""
        bench = self._bench
        ways = variants_of(scenario, bench.subject, lambda: bool(bench.lane_names))
        if not self._quick:
            yield from ways
            return
        all_ways = list(ways)
        yield all_ways[(place + bench.subject.seed) % len(all_ways)]

    def _play(self, scenario: Scenario, variant: Variant) -> None:
        stage = Stage(self._bench, scenario, variant)
        self._advance(scenario.property_id)
        where = f"{scenario.property_id} at {variant}"
        try:
            call_within(lambda: scenario.play(stage), self._deadline_s)
            self._verdicts.num_good[scenario.property_id] += 1
        except NotJudged as reason:
            self._verdicts.reasons.setdefault(scenario.property_id, str(reason))
        except Violation as violation:
            self._violated(scenario, violation, where)
        except Overrun:
            self._overran(scenario, stage, where)
        except SystemExit as error:
            self._violated(scenario, _exited(error), where)

    def _violated(self, scenario: Scenario, violation: Violation, where: str) -> None:
        violations = self._verdicts.violations
        if violation.property_id in scenario.adopts and violation.property_id not in violations:
            violation = violation.of(scenario.property_id)
        violations.setdefault(violation.property_id, (violation, where))
        self._bench.violated.add(violation.property_id)
        if violation.property_id != scenario.property_id:
            self._verdicts.cut_short.setdefault(scenario.property_id, violation.property_id)

    def _overran(self, scenario: Scenario, stage: Stage, where: str) -> None:
        watch = None if stage.harness is None else stage.harness.watch
        hook = "" if watch is None else watch.hook_that_runs() or ""
        message = (
            f"{hook} did not return within {self._deadline_s:g} s."
            if hook
            else f"the scenario did not end within {self._deadline_s:g} s."
        )
        trace = () if watch is None else watch.trace.newest()
        self._violated(scenario, Violation("bounded-time", message, trace), where)
        self._verdicts.hung = hook or "a scenario"

    # ---------------------------------------------------------------- verdicts

    def _result(self, one: Property) -> Result:
        found = self._verdicts.violations.get(one.id)
        if found is not None:
            violation, where = found
            return Result(one, "FAILED", violation.message, where, violation.trace)
        reason = self._why_not_judged(one.id)
        return Result(one, "ok") if reason is None else Result(one, "skipped", reason)

    def _why_not_judged(self, property_id: str) -> str | None:
        verdicts = self._verdicts
        if property_id in _WATCHED:
            evidence, why = _WATCHED[property_id]
            return None if self._bench.evidence[evidence] else why
        if property_id in verdicts.cut_short:
            return f"a run of it ended early: {verdicts.cut_short[property_id]}"
        if verdicts.hung and not verdicts.num_good[property_id]:
            return f"{verdicts.hung} did not return"
        if verdicts.num_good[property_id]:
            return None
        return verdicts.reasons.get(property_id, "no run of it came to its end")


def variants_of(
    scenario: Scenario, subject: Subject, uses_lanes: Callable[[], bool]
) -> Iterator[Variant]:
    """Each depth; where lanes are used, which the first way may show, maybe with two policies.

    On a GPU every other way has graphs, since to capture them takes most of an engine's time: the
    second of decodes alone, so that steps in graphs and others follow each other, the last of all.
    """
    on_gpu = subject.device == "cuda"
    decodes = "FULL_DECODE_ONLY" if on_gpu else None
    all_steps = "FULL_AND_PIECEWISE" if on_gpu else None
    yield Variant(1)
    yield Variant(2, "lazy" if uses_lanes() else "eager", cudagraph_mode=decodes)
    if not scenario.in_many_orders:
        return
    if uses_lanes():
        yield Variant(1, "lazy")
        yield Variant(2, "seed", subject.seed, cudagraph_mode=all_steps)
    elif on_gpu:
        yield Variant(1, cudagraph_mode=all_steps)


def _exited(error: SystemExit) -> Violation:
    """Raised outside of all hooks: by a class method, or by work on a lane."""
    message = f"a class method, or work on a lane, raised SystemExit: {error}"
    return Violation("hooks-do-not-raise", message)


def scenarios_for(only: Collection[str]) -> list[Scenario]:
    """Those that can judge the properties `only`; all for watched ones, and if `only` is empty."""
    if not only or any(one in _WATCHED for one in only):
        return list(SCENARIOS)
    return [one for one in SCENARIOS if one.property_id in only]
