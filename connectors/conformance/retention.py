"""Finds what an object still remembers of ended requests, by walking over all that it reaches."""

from __future__ import annotations

import collections
import gc
import logging
import threading
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from interlace.engine.request import Request

MAX_OBJECTS = 200_000
_LONGEST = 10_000
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.BuiltinFunctionType,
    logging.Logger,
    threading.Thread,
)


def find_remembered(
    roots: Mapping[str, object],
    marks: Collection[str | bytes],
    *,
    exempt: Iterable[object] = (),
    exempt_types: tuple[type, ...] = (),
) -> str | None:
    """The way to the first thing that remembers a request, None if nothing does.

    `roots`: name -> where to begin. That is a `Request`, or a text that contains one of `marks`:
    request ids, so unguessable that nothing else has them; or a mark of bytes, such as a hash.
    Objects that are `exempt`, or of exempt types, are not entered. Looks at `MAX_OBJECTS` objects
    at most, nearest first.
    """
    texts = tuple(mark for mark in marks if isinstance(mark, str))
    hashes = frozenset(mark for mark in marks if isinstance(mark, bytes))
    seen = {id(one) for one in exempt}
    queue: collections.deque[tuple[str, object]] = collections.deque(roots.items())
    kept: list[object] = []  # alive, so that no id is used twice
    while queue and len(kept) < MAX_OBJECTS:
        path, one = queue.popleft()
        if id(one) in seen or isinstance(one, exempt_types):
            continue
        seen.add(id(one))
        kept.append(one)
        if _is_request(one, texts) or (isinstance(one, bytes) and one in hashes):
            return f"{path} is {_describe(one)}"
        queue.extend(_children(path, one))
    return None


def _is_request(one: object, needles: tuple[str, ...]) -> bool:
    if isinstance(one, str):
        return len(one) <= _LONGEST and any(needle in one for needle in needles)
    return isinstance(one, Request)


def _describe(one: object) -> str:
    if isinstance(one, bytes):
        return "the hash of a block"
    return repr(one) if isinstance(one, str) else f"the request {getattr(one, 'request_id', '')}"


def _children(path: str, one: object) -> list[tuple[str, object]]:
    """(way, object) of what `one` holds."""
    if one is None or isinstance(one, _LEAVES):
        return []
    if isinstance(one, dict):
        keys = [(f"a key of {path}", key) for key in one]
        return keys + [(f"{path}[{_key(key)}]", value) for key, value in one.items()]
    if isinstance(one, list | tuple | set | frozenset | collections.deque):
        return [(f"an element of {path}", each) for each in one]
    if isinstance(one, types.FunctionType):
        return _cells(path, one)
    if isinstance(one, types.MethodType):
        return [(path, one.__func__), (path, one.__self__)]
    named = _attributes(one)
    if named:
        return [(f"{path}.{name}", value) for name, value in named.items()]
    return [(f"something of {path}", each) for each in gc.get_referents(one)]


def _cells(path: str, function: types.FunctionType) -> list[tuple[str, object]]:
    cells = function.__closure__ or ()
    values = [cell.cell_contents for cell in cells if _is_filled(cell)]
    values += [function.__defaults__, function.__kwdefaults__]
    return [(f"the closure of {function.__name__} in {path}", value) for value in values]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _attributes(one: object) -> dict[str, Any]:
    """Instance attributes, with those in slots."""
    found = dict(getattr(one, "__dict__", {}))
    for cls in type(one).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                value = getattr(one, _mangled(cls, name), None)
                if value is not None:
                    found[name] = value
    return found


def _mangled(cls: type, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _key(key: object) -> str:
    return repr(key) if isinstance(key, str | int) else type(key).__name__
