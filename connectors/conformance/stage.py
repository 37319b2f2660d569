"""What a scenario plays on: engines over one connector, and prompts that nobody has seen before."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

from interlace.connectors.conformance.engine_shape import EngineShape
from interlace.connectors.conformance.findings import NotJudged, Trace, Violation
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.idle import GRACE_S, check_idle, check_released
from interlace.connectors.conformance.oracle import Oracle
from interlace.connectors.conformance.setups import Setups
from interlace.connectors.conformance.stored_truth import StoredTruth
from interlace.connectors.conformance.subject import Subject
from interlace.connectors.conformance.tiny_model import VOCAB_SIZE
from interlace.engine.request import Request, RequestStatus
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.virtual_lanes import Policy


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to play a scenario."""

    depth: int
    lane_policy: Policy = "eager"
    lane_seed: int = 0
    cudagraph_mode: str | None = None
    """Which steps are replayed as CUDA graphs, if the connector needs no hooks of layers then."""

    def __str__(self) -> str:
        policy = self.lane_policy
        lanes = policy if isinstance(policy, str) else " before ".join(policy)
        seed = self.lane_seed if lanes == "seed" else ""
        graphs = f", graphs {self.cudagraph_mode}" if self.cudagraph_mode else ""
        return f"depth {self.depth}, lanes {lanes}{seed}{graphs}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A play that shows whether a connector has a property."""

    property_id: str
    play: Callable[[Stage], None]
    adopts: frozenset[str] = frozenset()
    """Properties whose violations count as this one's here, unless they were violated before."""
    in_many_orders: bool = False
    """Whether it is worth more than one order of lanes at each depth."""


@dataclasses.dataclass
class Bench:
    """What all scenarios of one check share."""

    subject: Subject
    """What is checked, but for its configuration."""
    setups: Setups
    model: LoadedModel
    oracle: Oracle
    truth: StoredTruth
    nonce: str
    """Makes request ids unguessable."""
    salt: str
    """Lets nothing be found that was stored before this check."""
    secrets: tuple[str, ...]
    """What is left out of traces."""
    evidence: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lane_names: set[str] = dataclasses.field(default_factory=set)
    is_synthetic: bool = False
    """Whether the connector invents KV."""
    workers: int = 1
    """Of the newest engine: options of the engine may ask for others than the subject does."""
    violated: set[str] = dataclasses.field(default_factory=set)
    """Ids of properties of which a violation was found."""

    def note(self, harness: Harness) -> None:
        """Add what was seen in one engine."""
        seen = harness.watch.evidence
        self.evidence += seen
        self.lane_names |= harness.lanes.names
        self.is_synthetic |= harness.is_synthetic
        if harness.shape.cudagraph_mode:
            self.evidence["steps in graphs"] += seen["steps"]
            self.evidence["loaded tokens in graphs"] += seen["loaded tokens"]
        self.evidence["promises"] += seen["held"] + seen["async loads"]
        if harness.lanes.names:
            self.evidence["async loads on lanes"] += seen["async loads"]
        self.workers = len(harness.parts.worker_sides)
        if self.workers > 1:
            self.evidence["loads of several workers"] += seen["loaded tokens"]


class Stage:
    """For one run of one scenario."""

    def __init__(self, bench: Bench, scenario: Scenario, variant: Variant) -> None:
        """Raises: `ConfigError`."""
        self.bench = bench
        self.subject = bench.setups.next()
        self.variant = variant
        self.scenario = scenario
        self.harness: Harness | None = None
        """The engine that is open, or was last."""
        self._seen: collections.Counter[str] = collections.Counter()
        """In all engines of this run."""
        self._random = random.Random(f"{bench.subject.seed} {scenario.property_id} {variant}")

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.subject.engine_options.get("block_size", EngineShape.block_size))

    def prompt(self, num_blocks: int, num_more: int = 0) -> list[int]:
        """New random tokens: so many whole blocks and tokens."""
        length = num_blocks * self.block_size + num_more
        return [self._random.randrange(VOCAB_SIZE) for _ in range(length)]

    @contextlib.contextmanager
    def engine(self, **shape: Any) -> Iterator[Harness]:
        """An engine; at the end all requests must come to theirs, and nothing may be left.

        Raises: `Violation`.
        """
        harness = self._open(**shape)
        try:
            yield harness
            harness.run()
            self._check_ends(harness)
            check_idle(harness, self._grace_s("idle-at-the-end"))
            harness.close()
            if "shutdown-releases" not in self.bench.violated:
                check_released(harness)
        finally:
            self._seen += harness.watch.evidence
            self.bench.note(harness)
            with contextlib.suppress(Violation):
                harness.close()

    def _open(self, **shape: Any) -> Harness:
        variant, bench = self.variant, self.bench
        wanted = {
            "depth": variant.depth,
            "lane_policy": variant.lane_policy,
            "lane_seed": variant.lane_seed,
            "cudagraph_mode": variant.cudagraph_mode,
            **shape,
        }
        self.harness = Harness(
            self.subject,
            bench.model,
            bench.oracle,
            shape=EngineShape(**wanted),
            truth=bench.truth,
            nonce=bench.nonce,
            salt=bench.salt,
            trace=Trace(*bench.secrets),
            token_property=self.scenario.property_id,
        )
        return self.harness

    def _grace_s(self, property_id: str) -> float:
        """How long to wait for threads of the connector before that property is violated: what was
        waited for in vain is not waited for again."""
        return 0.0 if property_id in self.bench.violated else GRACE_S

    def _check_ends(self, harness: Harness) -> None:
        """Nothing ends with an error unless something was damaged."""
        for request in harness.requests.values():
            if request.status is RequestStatus.FINISHED_ERROR and not harness.lost_hashes:
                harness.watch.findings.add(
                    "failures-exact",
                    f"{request.request_id} failed though nothing was damaged: {request.error}",
                )
        harness.watch.findings.raise_first()

    # ---------------------------------------------------------------- what scenarios do often

    def store(self, harness: Harness, prompt: list[int], *, salt: str = "") -> Request:
        """Let the connector save a prompt; then the engine forgets it."""
        request = harness.add(f"saver{len(harness.requests)}", prompt, max_tokens=1, salt=salt)
        harness.run()
        self.forget_local(harness)
        return request

    def forget_local(self, harness: Harness) -> None:
        """Let the engine forget its own prefix cache. Nothing may be under way."""
        if not harness.reset_prefix_cache():
            harness.watch.findings.add(
                "idle-at-the-end", "no request is left, but the engine's blocks are not all free."
            )
            harness.watch.findings.raise_first()

    def need(self, evidence: str, why: str) -> None:
        """Go on only if this run has seen something of the kind. Raises: `NotJudged`."""
        if not self._seen[evidence]:
            raise NotJudged(why)

    def need_loads(self) -> None:
        """Raises: `NotJudged` unless something was loaded."""
        if self.subject.role == "kv_producer":
            raise NotJudged("its role does not let it load")
        self.need("loaded tokens", "it never loaded")

    def need_right_kv(self) -> None:
        """Raises: `NotJudged` for a connector that invents KV."""
        if self.bench.is_synthetic:
            raise NotJudged("its KV is synthetic, so tokens cannot be right")
