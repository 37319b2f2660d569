"""What a grid can vary: each key with its meaning, its default and what it takes. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, get_args

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.connectors.pipeline.options import LoadMode, StoreKind
from interlace.engine.config import CUDAGRAPH_MODES, DTYPES

Value: TypeAlias = str | int | float | None
"""Of a key; None is what the engine does by itself, or, of an arm, that it does not matter."""

MAX_TOKENS: Final = 1 << 20
MAX_BATCH_SIZE: Final = 256
NONE: Final = "none"
"""The connector that is none."""
PIPELINE: Final = "PipelineConnector"
CACHED: Final = "cached"
"""The load mode of KV that the device has not forgotten."""
RECOMPUTE: Final = "recompute"
OWN: Final = "own"
"""The load mode of connectors that have no load modes: as they do by themselves."""
TRANSFORMERS: Final = "transformers"
LOAD_MODES: Final = (CACHED, *get_args(LoadMode))

Check: TypeAlias = Callable[[object], str | None]
"""What is to be done about a value that cannot be; None if it can."""


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One key."""

    meaning: str
    default: Value
    check: Check
    label: str
    """Of a value in an arm's name, with {} in its place."""


def whole(low: int, high: int, multiple: int = 1) -> Check:
    """Whole numbers, both ends included."""

    def check(value: object) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return f"give a whole number from {low} to {high:,}"
        if not low <= value <= high:
            return f"give {low} to {high:,}"
        if value % multiple:
            below = value - value % multiple
            return f"give a multiple of {multiple}, such as {below} or {below + multiple}"
        return None

    return check


def number(low: float, high: float) -> Check:
    """Finite numbers, both ends included."""

    def check(value: object) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and low <= value <= high:  # type: ignore[arg-type,operator]
            return None
        return f"give a number from {low:g} to {high:g}"

    return check


def one_of(choices: Iterable[str]) -> Check:
    """One of some words."""
    known = tuple(choices)

    def check(value: object) -> str | None:
        if isinstance(value, str) and value in known:
            return None
        return f"{did_you_mean(value, known)}choose of {', '.join(known)}"

    return check


def text(value: object) -> str | None:
    """A `Check` of names."""
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return None
    return "give a name between quotes"


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """The nearest known word as a question with a space behind it; empty if none is near."""
    near = difflib.get_close_matches(str(value), list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


AXES: Final[Mapping[str, Axis]] = {
    "engine": Axis(
        "which engine computes; transformers takes the same weights, one request at a time",
        "interlace",
        one_of(("interlace", TRANSFORMERS)),
        "{}",
    ),
    "model": Axis(
        "a model's name, GGUF file or folder, as in chat; or dummy:llama-3.1-8b",
        "smollm2-135m",
        text,
        "{}",
    ),
    "device": Axis("where it computes", "auto", one_of(("auto", "cpu", "cuda")), "{}"),
    "dtype": Axis("of weights and KV", "auto", one_of(DTYPES), "{}"),
    "connector": Axis(
        f"{NONE}, {PIPELINE}, or a name that a table [connectors.NAME] describes",
        NONE,
        text,
        "{}",
    ),
    "store": Axis(
        f"where {PIPELINE} keeps the prefix", "memory", one_of(get_args(StoreKind)), "from {}"
    ),
    "load_mode": Axis(
        f"how the prefix comes: {CACHED}, the device has it; {RECOMPUTE}, it is computed again;"
        f" the others load it as {PIPELINE}'s load_mode says",
        "auto",
        one_of(LOAD_MODES),
        "{}",
    ),
    "graph_mode": Axis(
        "which steps are CUDA graphs; left out, the engine decides",
        None,
        one_of(CUDAGRAPH_MODES),
        "{}",
    ),
    "group_size": Axis("layers that share a gate", 2, whole(1, 1024), "group {}"),
    "delay_ms": Axis(
        f"by which a load of each block of {BLOCK_SIZE} tokens is made longer, over all layers",
        0,
        number(0, 60_000),
        "delay {} ms",
    ),
    "max_num_batched_tokens": Axis(
        "token budget of a step; left out, the engine decides",
        None,
        whole(1, MAX_TOKENS),
        "budget {}",
    ),
    "max_inflight_steps": Axis(
        "steps in flight; left out, the engine decides", None, whole(1, 2), "{} in flight"
    ),
    "prefix": Axis(
        "tokens of each prompt that were computed before, whole blocks",
        0,
        whole(0, MAX_TOKENS, BLOCK_SIZE),
        "prefix {}",
    ),
    "new": Axis("tokens behind the prefix", 16, whole(1, MAX_TOKENS), "{} new"),
    "batch": Axis("requests at once", 1, whole(1, MAX_BATCH_SIZE), "batch {}"),
    "output": Axis(
        "tokens to generate for each request; more than one to time decode steps",
        1,
        whole(1, MAX_TOKENS),
        "{} out",
    ),
}
"""By key, in the order in which names of arms tell them."""
