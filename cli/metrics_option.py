"""`--metrics PORT`, which several commands have: the port is taken before a model is loaded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from interlace.bench.shown import SharedMetrics

MetricsPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--metrics",
        metavar="PORT",
        help="Serve Prometheus metrics on http://127.0.0.1:PORT/metrics, to this machine alone; 0 "
        "takes a free port and says which.",
    ),
]


@contextlib.contextmanager
def metrics_socket(port: int | None) -> Iterator[socket.socket | None]:
    """What `AsyncEngine.serve_metrics` takes, until the context ends; None without `port`. Says on
    standard error where metrics will be. Blocks: before an event loop runs.

    Raises: `ConfigError` for a port that cannot be had.
    """
    if port is None:
        yield None
        return
    from interlace.engine.metrics_server import listen, url_of

    with contextlib.closing(listen(port)) as sock:
        typer.echo(f"metrics: {url_of(sock)}", err=True)
        yield sock


@contextlib.contextmanager
def shared_metrics(port: int | None) -> Iterator[SharedMetrics | None]:
    """`metrics_socket` for a benchmark, which may open several engines. Raises: `ConfigError`."""
    with metrics_socket(port) as sock:
        if sock is None:
            yield None
            return
        from interlace.bench.shown import SharedMetrics

        yield SharedMetrics(sock)
