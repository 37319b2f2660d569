"""What a `ScriptedConnector` does for each request, what it stores, and a log of its calls.

One `Script` is shared by both sides of a connector and by the test that wrote it, in one process.
The store changes on the event loop alone; the log takes calls from both threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from interlace.engine.block_hash import BlockHash
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorRole

Pages: TypeAlias = list[Any]
"""A host copy of one block: per layer, in the order of registration, what `pages[block_id]` was, a
CPU tensor or an array; all layers of rank 0, then those of rank 1, and so on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sync:
    """Bring that many tokens within the step."""

    num_tokens: int | None = None
    """Beyond the computed ones, cut to what the request lacks. None: whole blocks, as many as the
    store has without a gap."""


@dataclasses.dataclass(frozen=True, slots=True)
class Async:
    """Bring that many tokens while the request waits; 0 becomes a plain "nothing"."""

    num_tokens: int | None = None
    """As for `Sync`."""


Answer: TypeAlias = Sync | Async | tuple[Any, Any] | None
"""To a match query. None: ask again. A tuple is returned as it is, whatever the protocol says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to one request. Steps are worker steps, with tokens or without.

    A block that is to be loaded and is not in the store fails, as one in `fail` does: its pages
    are painted and it is reported.
    """

    answers: tuple[Answer, ...] = (Sync(),)
    """To successive match queries; the last one stays."""
    compute_ends: tuple[Any, ...] = (None,)
    """Answers to successive `get_compute_end` after a match query, as they are; the last one stays.
    With a number of tokens an asynchronous load comes from the back: what lies before the answer
    that was the latest when a step was planned is not brought by a load that ends with it."""
    fail: frozenset[int] = frozenset()
    """Positions, counted in blocks of the request, that fail in its loads."""
    num_failing_loads: int | None = None
    """How many of its loads `fail` applies to, the first ones; None is all."""
    load_delay: int | None = 0
    """An asynchronous load is done and reported in the step that begins it (0), or so many steps
    later; None is never."""
    report_early: bool = False
    """While an asynchronous load goes on, report one of its failed blocks each step."""
    save: bool = True
    """Whether its full blocks are stored, if the connector's role allows that."""
    hold: bool = False
    """Whether its blocks stay when it ends, unless a load of it is under way, or it has none."""
    send_delay: int | None = 0
    """A held request is reported as sent in the step that tells of its end (0), or so many steps
    later; None is never."""
    repeat_recving: int = 0
    """Report the end of a load again in so many following steps, or until the worker side hears of
    the request's next load or of its holding. With two steps in flight the engine may have planned
    that before the last repetition reaches it."""
    repeat_sending: int = 0
    repeat_invalid: int = 0
    response_params: Mapping[str, Any] | None = None
    """`kv_transfer_params` of its answer."""

    def __post_init__(self) -> None:
        if not self.answers:
            raise ConfigError("Rule: answers must hold at least one answer; (0, False) is nothing.")
        if not self.compute_ends:
            raise ConfigError("Rule: compute_ends must hold at least one answer; None is plain.")

    def answer(self, query: int) -> Answer:
        """The answer to match query number `query`, counted from 0."""
        return self.answers[min(query, len(self.answers) - 1)]

    def compute_end(self, query: int) -> Any:
        """The answer to query number `query` about its load, counted from 0."""
        return self.compute_ends[min(query, len(self.compute_ends) - 1)]

    def fails(self, load: int, position: int) -> bool:
        """Whether block `position` fails in load number `load` of the request, from 0."""
        applies = self.num_failing_loads is None or load < self.num_failing_loads
        return applies and position in self.fail


class Call(NamedTuple):
    """One call of a hook."""

    role: KVConnectorRole
    hook: str
    summary: str
    """The arguments in short, and the answer to a match query."""


@dataclasses.dataclass(kw_only=True)
class Script:
    """Pass it as `kv_connector_extra_config={"script": Script(...)}`.

    `rules` may be changed between steps. Scripts may share a store: what one engine saved,
    another one loads, if their layers are alike.
    """

    default: Rule = dataclasses.field(default_factory=Rule)
    rules: dict[str, Rule] = dataclasses.field(default_factory=dict)
    """By request id, in place of `default`."""
    raises: dict[str, tuple[int, Exception]] = dataclasses.field(default_factory=dict)
    """Hook name -> (n, exception): call number n of it, from 1 and per role, raises."""
    paint: float = math.nan
    """What failed blocks are filled with; in pages of whole numbers NaN becomes -1."""
    store: dict[BlockHash, Pages] = dataclasses.field(default_factory=dict)
    """What was saved and may be loaded. Grows with what is saved: keep the test small."""
    max_calls: int = 10_000
    calls: deque[Call] = dataclasses.field(init=False)
    """The newest `max_calls` calls, oldest first."""

    def __post_init__(self) -> None:
        self.calls = deque(maxlen=self.max_calls)
        # Each role counts in its own thread, so no two threads add to one count.
        self._counts: dict[KVConnectorRole, Counter[str]] = {r: Counter() for r in KVConnectorRole}

    def rule(self, request_id: str) -> Rule:
        """The request's rule."""
        return self.rules.get(request_id, self.default)

    def note(self, role: KVConnectorRole, hook: str, summary: str = "") -> None:
        """Log a call. Raises what the script says."""
        self.calls.append(Call(role, hook, summary))
        self._counts[role][hook] += 1
        number, error = self.raises.get(hook, (0, None))
        if error is not None and self._counts[role][hook] == number:
            raise error

    def hooks(self, role: KVConnectorRole | None = None) -> list[str]:
        """Names of the logged calls, of both roles or of one."""
        return [call.hook for call in list(self.calls) if role in (None, call.role)]

    def count(self, hook: str) -> int:
        """How often a hook was called, in both roles, since the script was made."""
        return sum(counts[hook] for counts in self._counts.values())
