"""Events of the Trace Event format, as Perfetto and chrome://tracing read it; of one process."""

from __future__ import annotations

from collections.abc import Mapping


def metadata_event(name: str, tid: int, args: Mapping[str, object]) -> dict[str, object]:
    """What a thread, or the process, is called, and where it stands."""
    return {"ph": "M", "name": name, "pid": 1, "tid": tid, "args": args}


def complete_event(
    name: str, category: str, tid: int, begin_ns: int, end_ns: int, args: Mapping[str, object]
) -> dict[str, object]:
    """One with a begin and a length, in microseconds as the format has it."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid,
        "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000, "args": args,
    }  # fmt: skip
