"""What a command may do since the process is its own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG_OBJECTS = 10_000
"""After so many new ones the collector looks at them. Python's own number is 700, or 2,000: then it
takes half a millisecond of every tenth step of a batch. Nearly all objects go without it."""


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Meanwhile the garbage collector leaves alone what is there by now: modules and weights.

    A full collection looks through all objects, and stops everything for so long: 120 ms with torch
    and transformers loaded, on a fast machine. What comes later is collected, only less often.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
