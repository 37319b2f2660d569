"""The registry of connectors that are broken on purpose: see tests/broken_connectors.

Each module there has a list `BROKEN`. They are imported by path, since they are for these tests
alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_connector import MemoryConnector
from memory_store import MemoryStore

FOLDER = Path(__file__).parent.parent / "broken_connectors"


@dataclasses.dataclass(frozen=True)
class Broken:
    """One mistake, and what `interlace check` has to say of it."""

    connector: type[MemoryConnector]
    property_id: str
    """Of the property that it lacks."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Beside the store."""
    workers: int = 1
    deadline_s: float = 20.0
    """Enough for all runs but those that never end."""
    seen_in: str = ""
    """A property whose scenario shows it, if that of `property_id` does not or there is none."""

    def __str__(self) -> str:
        return "-".join((self.connector.__name__, *self.options))

    def extra_config(self) -> dict[str, Any]:
        """For one check, with a store of its own."""
        return {"store": MemoryStore(), **self.options}


def all_broken() -> list[Broken]:
    """Those of all modules, in order of the modules' names."""
    found: list[Broken] = []
    for path in sorted(FOLDER.glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and annotations look there
        spec.loader.exec_module(module)
        found += module.BROKEN
    return found
