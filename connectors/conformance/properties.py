"""What `interlace check` looks at: one property for each kind of mistake, in order of reporting.

A violation belongs to one property, whatever follows from it. Where two would fit, the one of the
cause is named: a write outside of a load's blocks is that, not a wrong token.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Property:
    """One thing that every connector has to get right."""

    id: str
    """As in `--only`."""
    title: str
    """What is true of a connector that has it."""


PROPERTIES: tuple[Property, ...] = (
    # What hooks may answer and do, by themselves.
    Property("hooks-do-not-raise", "no hook raises where the protocol's order is kept"),
    Property("answers-lawful", "every hook answers what the protocol allows"),
    Property("calls-in-order", "hooks run in order, once where promised, and each layer's two"),
    Property("match-has-no-effects", "a match query may be repeated and changes nothing"),
    Property("output-not-mutated", "build_connector_meta leaves the scheduler's output alone"),
    Property("plan-reset", "what one step's metadata orders is not ordered again by the next"),
    Property("metadata-cleared", "no metadata is left when the step is over"),
    # The same answers as without the connector.
    Property("tokens-cold", "tokens are right while it has nothing to load"),
    Property("tokens-hit", "tokens are right after a hit at each block"),
    Property("tokens-full-hit", "tokens are right when all of a prompt is stored"),
    Property("tokens-chunked", "tokens are right when prompts are computed in chunks"),
    Property("tokens-preempted", "tokens are right after preemption and resumption"),
    Property("aborted-in-every-state", "an abort in any state leaves the others' tokens right"),
    Property("shared-prefix", "tokens are right when requests share a prefix"),
    Property("keys-tell-salts-apart", "KV of one cache salt is never served to another"),
    # Loads.
    Property("loaded-kv-right", "a loaded block holds the KV of its hash"),
    Property("layer-loads-complete", "wait_for_layer_load returns when that layer is in place"),
    Property("loads-reported-when-done", "an asynchronous load is reported when all is in place"),
    Property("loads-do-not-hold-up-steps", "no hook waits for an asynchronous load"),
    Property("loads-write-only-their-blocks", "only target blocks of loads under way are written"),
    Property("transfers-in-any-order", "transfers may end in any order"),
    # Saves.
    Property("saves-visible-when-whole", "nothing is served before it is whole, applied and good"),
    Property("saves-fenced", "a save reads nothing that was handed on"),
    Property("reset-forgets", "after reset_cache nothing stored before is served"),
    # Failures and reports.
    Property("failures-exact", "lost blocks are reported, those and no others"),
    Property("reported-once", "the end of a load and of a save is reported once"),
    Property("reports-known-ids", "only ids and blocks that the engine waits for are reported"),
    Property("promises-kept", "each load ends, and each held request is let go"),
    # The end.
    Property("no-deadlock-in-tiny-pools", "a pool that is almost too small is no deadlock"),
    Property("idle-at-the-end", "nothing of an ended request is kept, on either side"),
    Property("shutdown-releases", "shutdown ends all of the connector's threads"),
    Property("bounded-time", "every hook returns"),
    Property("workers-agree", "several workers hold and report the same"),
)

BY_ID = {each.id: each for each in PROPERTIES}
"""Each property under its id."""
