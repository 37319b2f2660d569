"""`--trace FILE`, which several commands have: what cannot be written is refused before a model is
loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

TraceFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Record the newest 512 steps, layer by layer, with what lanes copy; `interlace trace "
        "FILE` shows them. Slows steps down a little.",
    ),
]


def trace_target(option: str | None) -> Path | None:
    """Where to write it. Blocks: before an event loop runs.

    Raises: `ConfigError` for a file that cannot be written.
    """
    if option is None:
        return None
    from interlace.engine.trace_file import check_target

    path = Path(option)
    check_target(path)
    return path


def tell_of_traces(paths: Iterable[Path]) -> None:
    """Say on standard error that they are there, and how to look at them."""
    for path in paths:
        typer.echo(f"trace: {path} (interlace trace {path})", err=True)
