"""`interlace check`: whether a KV connector keeps the protocol.

Parses options and prints; `interlace.connectors.conformance` checks. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interlace.cli.progress import progress_for
from interlace.cli.screen import harmless, is_terminal
from interlace.engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlace.connectors.conformance.report import CheckReport

_COLOURS = {"ok": typer.colors.GREEN, "FAILED": typer.colors.RED, "skipped": typer.colors.YELLOW}
MAX_WORKERS = 8
MAX_SEED = 2**63 - 1

Connector = Annotated[
    str,
    typer.Argument(
        metavar="NAME|MODULE:CLASS", help="A connector by its name, or a class of your own."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="JSON",
        help="Its kv_connector_extra_config. Default: what the class's check_setup says.",
    ),
]
Role = Annotated[
    Literal["kv_producer", "kv_consumer", "kv_both"],
    typer.Option("--role", help="A producer saves, a consumer loads."),
]
Workers = Annotated[
    int,
    typer.Option("--workers", min=1, max=MAX_WORKERS, help="Workers that share the KV heads."),
]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(
        "--device",
        help="Where the tiny engines compute; on cuda in float32 and partly in CUDA graphs.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, max=MAX_SEED, help="Of weights, prompts and the order of transfers."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Judge this property alone; may be repeated."),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Play each scenario in one of its ways, not in all of them."),
]


def check(
    connector: Connector,
    config: Config = None,
    role: Role = "kv_both",
    workers: Workers = 1,
    device: Device = "cpu",
    seed: Seed = 0,
    only: Only = None,
    quick: Quick = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on standard output.")
    ] = False,
) -> None:
    """Run a KV connector through tiny engines and judge each property of the protocol.

    Prints a line for each property, and the calls before the first violation of those that it
    lacks. Exit code 1 if there are any. Equal seeds find the same.
    """
    extra_config = _extra_config(config)
    logging.getLogger("interlace").addHandler(logging.NullHandler())
    with contextlib.redirect_stdout(sys.stderr):  # what a connector prints is no part of a report
        report = _checked(
            connector,
            extra_config,
            role=role,
            workers=workers,
            device=device,
            seed=seed,
            only=tuple(only or ()),
            quick=quick,
        )
    if as_json:
        sys.stdout.write(report.to_json())
    else:
        for line in _lines(report):
            typer.echo(line)
    raise typer.Exit(0 if report.passed else 1)


def _extra_config(text: str | None) -> dict[str, Any] | None:
    """Raises: `typer.BadParameter` for what is no JSON object."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"this is not JSON ({error}).", param_hint="--config") from error
    if not isinstance(fields, dict):
        raise typer.BadParameter("give a JSON object.", param_hint="--config")
    return fields


def _checked(
    connector: str, extra_config: dict[str, Any] | None, *, only: tuple[str, ...], **options: Any
) -> CheckReport:
    """Raises: `typer.BadParameter` for whatever cannot be checked."""
    from interlace.connectors.conformance.check import check_connector
    from interlace.connectors.conformance.checking import scenarios_for

    total = len(scenarios_for(only))
    seen: set[str] = set()
    try:
        with progress_for().task(f"check {connector}", total) as advance:

            def show(property_id: str) -> None:
                advance(0 if property_id in seen else 1)
                seen.add(property_id)

            return check_connector(connector, extra_config, only=only, progress=show, **options)
    except ConfigError as error:
        message = harmless(" ".join(str(error).split()))
        raise typer.BadParameter(message) from error  # of whichever option, it says which


def _lines(report: CheckReport) -> Iterator[str]:
    """The report's lines, their verdicts in colour on a terminal."""
    in_colour = is_terminal(sys.stdout)
    for line in report.lines():
        shown = harmless(line)
        word = line.split(" ", 1)[0]
        if in_colour and word in _COLOURS:
            shown = typer.style(word, fg=_COLOURS[word]) + shown[len(word) :]
        yield shown
