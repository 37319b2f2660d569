"""Every error that Interlace raises on purpose, as one small tree.

InterlaceError
├── ConfigError (ValueError)        an option is unknown, out of range, or cannot be honoured
├── RequestError (ValueError)       one request is wrong; the engine and all others go on
│   ├── PromptError                 empty, too long, or with token ids the model does not have
│   └── SamplingError               a sampling field is unknown or out of range
├── ConnectorError                  a KV connector broke the protocol, or one of its hooks raised
├── LaneFullError                   a lane has as much queued work as it may: drop it, or wait
├── LaneClosedError                 a lane was closed before the work could run
├── VirtualLaneError                with real lanes this wait would never end
├── ModelError                      a model cannot be found, read, or is of an unsupported kind
├── LiveViewError                   an engine cannot be watched, or what it shows cannot be read
├── EngineBusyError                 the waiting queue is full: retry later
└── EngineDeadError                 the step loop has ended: sticky, every caller gets it at once

A message says what went wrong and what to do about it. `assert` is only for our own invariants.
"""

from __future__ import annotations


class InterlaceError(Exception):
    """Root of the tree: catch this to catch all that Interlace raises on purpose."""


class ConfigError(InterlaceError, ValueError):
    """An option is unknown, out of range, or cannot be honoured on this machine."""


class RequestError(InterlaceError, ValueError):
    """One request is wrong. Nothing of it was admitted; no other request is touched."""


class PromptError(RequestError):
    """The prompt is empty, too long for the model or the KV pool, or has unknown token ids."""


class SamplingError(RequestError):
    """A sampling field is unknown, out of range, or contradicts another one."""


class ModelError(InterlaceError):
    """A model or tokenizer cannot be found, fetched, read, or is not supported."""


class ConnectorError(InterlaceError):
    """A KV connector answered what the protocol forbids, or one of its hooks raised.

    The message names the connector, the hook and the rule. Mend the connector.
    """


class LaneFullError(InterlaceError):
    """A lane has `max_pending` pieces of work queued and takes no more; nothing was queued.

    Drop the work and count it, or wait for a gate and try again.
    """


class LaneClosedError(InterlaceError):
    """The lane takes no more work, or ended before this work began: it never ran.

    Submit before the lane is closed, and close it with a timeout that lets its work end.
    """


class VirtualLaneError(InterlaceError):
    """With real lanes this would hang: somebody waits for a gate, and nothing can run.

    The message names the lanes with queued work, and what each of them waits for.
    """


class LiveViewError(InterlaceError):
    """An engine cannot be watched: no safe place for its socket, nobody there, or frames that this
    version of Interlace does not read."""


class EngineBusyError(InterlaceError):
    """`max_waiting_requests` requests are waiting already; retry when some have finished."""


class EngineDeadError(InterlaceError):
    """The engine is closed or its step loop has failed; the cause is chained.

    Every pending request and every later call gets this error at once. Build a new engine.
    """
