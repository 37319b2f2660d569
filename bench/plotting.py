"""matplotlib, which draws pictures and need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from interlace.engine.errors import ConfigError


def import_plotting(module: str, what: str, *, or_else: str = "") -> Any:
    """A module of matplotlib for `what`; `or_else` is another remedy than to install it.

    Raises: `ConfigError` if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs matplotlib, which cannot be imported ({error}): pip install"
            f" interlace[plot]{or_else}"
        ) from error
