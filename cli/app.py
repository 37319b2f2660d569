"""The `interlace` command: what its parts are, and how errors become exit codes.

Exit codes: 0 done, 1 one of Interlace's errors, a broken pipe, a connector that `check` finds at
fault, or slabs that `store` finds bad or cannot remove, 2 wrong usage, 130 Ctrl-C. Those
for the pipe, the usage and Ctrl-C are typer's.
Nothing here or in a command's module imports torch; what needs it is imported inside functions.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from interlace.cli import bench, store
from interlace.cli.chat import chat
from interlace.cli.check import check
from interlace.cli.info import info
from interlace.cli.screen import harmless
from interlace.cli.top import top
from interlace.cli.trace import timeline, trace
from interlace.engine.errors import ConfigError, InterlaceError

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why nothing more may fit where standard output goes."""

app = typer.Typer(
    name="interlace",
    help="A compact LLM inference engine: chat with a model, measure how fast it runs, check a KV "
    "connector.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# One line per command; each has a module of its own.
app.command()(chat)
app.command()(check)
app.command()(info)
app.command()(trace)
app.command()(top)
bench.app.command()(timeline)
app.add_typer(bench.app)
app.add_typer(store.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from interlace import __version__

        typer.echo(f"interlace {__version__}")
        raise typer.Exit


@app.callback()
def interlace(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line of this process and end it. Never returns."""
    _fill_closed_streams()
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as it is where it was closed
                sys.stdout.flush()  # at the end of the process nobody could be told
    except InterlaceError as e:
        sys.exit(_complain(e))
    except OSError as e:
        if e.errno not in (errno.EPIPE, *_UNWRITABLE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is tried once more at the end
        if e.errno == errno.EPIPE:
            sys.exit(1)  # who read it has enough
        why = f"what it prints, or writes, cannot be written ({e.strerror})"
        sys.exit(_complain(ConfigError(f"{why}: make room, or write it elsewhere.")))


def _complain(error: InterlaceError) -> int:
    """One line for what the user can do something about; a traceback would hide it."""
    typer.echo("interlace: " + harmless(" ".join(str(error).split())), err=True)
    return 1


def _fill_closed_streams() -> None:
    """Give standard streams that were closed a file: else the next file opened gets their number.

    uvloop aborts the process when its own files have such numbers.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
