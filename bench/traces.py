"""Traces of the engines that a benchmark opens: `--trace FILE`. Knows no engine's class."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol


class Traceable(Protocol):
    """`AsyncEngine`, as far as this asks it."""

    def trace(self, path: str | os.PathLike[str]) -> AbstractAsyncContextManager[object]:
        """Record steps, and write them at the end."""
        ...


class Traces:
    """A file for each engine, in the order in which they are opened: FILE, FILE-2, FILE-3. The
    suffix stays where it is. Loop thread."""

    def __init__(self, target: Path | None = None) -> None:
        """None: nothing is recorded."""
        self._target = target
        self._num_opened = 0
        self.written: list[Path] = []
        """Files, as they are there."""

    @asynccontextmanager
    async def of(self, engine: Traceable) -> AsyncIterator[None]:
        """Record this engine while it is entered. Raises: as `AsyncEngine.trace`."""
        if self._target is None:
            yield
            return
        self._num_opened += 1
        path = _numbered(self._target, self._num_opened)
        async with engine.trace(path):
            yield
        self.written.append(path)


def _numbered(target: Path, number: int) -> Path:
    if number == 1:
        return target
    return target.with_name(f"{target.stem}-{number}{target.suffix}")
