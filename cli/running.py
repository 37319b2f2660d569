"""How the commands run a coroutine: on uvloop where it can be had, else on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, None for asyncio's."""
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` on a new event loop, on this thread, until it returns.

    Raises: what `main` raises, and `KeyboardInterrupt` if Ctrl-C has cancelled it.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main())
