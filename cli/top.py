"""`interlace top`: watch an engine that runs. Finds it, and says what to do if that fails.

`interlace.cli.live` draws. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from interlace.cli.screen import harmless, is_terminal
from interlace.engine.errors import LiveViewError
from interlace.engine.live_socket import Place, find, folders

if TYPE_CHECKING:
    from interlace.cli.live.terminal import Waiter

_POLL_S = 0.2
"""Between two looks for an engine that is to come."""


def top(
    engine: Annotated[
        str | None,
        typer.Argument(
            metavar="[PID]",
            help="Process of the engine; PID-2 is the second engine of a process. "
            "Default: the only one of yours that runs.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print each frame as it comes, a JSON object a line.")
    ] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="Print which engines of yours run, and leave.")
    ] = False,
    unicode: Annotated[
        bool | None,
        typer.Option(
            "--unicode/--ascii", help="Draw with UTF-8 or without. Default: as the locale says."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", hidden=True)] = False,
) -> None:
    """Watch an engine of yours that runs: layers as they load, lanes, requests, blocks, the GPU.

    Into a pipe it prints one line a second. Keys act on the view only:
    q quits, p pauses, + and - make it faster and slower, n turns the page,
    s saves what is shown as a JSON file in the current folder.
    """
    from interlace.cli.live.terminal import keyboard_of_process, waiting

    if show_list:
        for one in _told(find()):
            typer.echo(one)
        return
    if follow and (engine is None or not engine.isdecimal()):
        raise typer.BadParameter("--follow needs the number of a process.")
    place = None if follow else _choose(engine)
    draws = not json and _can_draw()
    keyboard = keyboard_of_process() if draws else None
    with waiting(keyboard, draws=draws) as waiter:
        how = _How(waiter, keyboard, draws, json, unicode)
        if place is not None:
            _watch(place, how, stays=True)
        else:
            _follow(str(engine), how)
    if waiter.ended_by is not None:
        raise typer.Exit(128 + waiter.ended_by)


class _How(NamedTuple):
    """Where it is shown."""

    waiter: Waiter
    keyboard: int | None
    draws: bool
    """Pictures on a terminal, not lines."""
    json: bool
    unicode: bool | None


def _can_draw() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return is_terminal(sys.stdout) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _choose(engine: str | None) -> Place:
    """Raises: `LiveViewError` if there is no such one, or none, or several to choose from."""
    places = find()
    if not places:
        where = " and ".join(map(str, folders()))
        raise LiveViewError(
            "no engine of yours runs here: start one, by `interlace chat` for instance. Sockets of"
            f" engines are looked for in {where}."
        )
    if engine is None and len(places) == 1:
        return places[0]
    for place in places:
        if place.name == engine:
            return place
    for one in _told(places):
        typer.echo(one)
    if engine is None:
        raise LiveViewError(
            f"{len(places)} engines of yours run: say which one, by `interlace top"
            f" {places[0].name}` for instance."
        )
    raise LiveViewError(f"no engine {engine} of yours runs here; those that do are listed above.")


def _told(places: list[Place]) -> list[str]:
    """A line for each."""
    from interlace.cli.live.attach import Attached

    rows = []
    for place in places:
        try:
            with Attached(place) as attached:
                frame = attached.wait_for_frame()
        except LiveViewError as error:
            rows.append(f"{place.name:<12} {error}")
            continue
        facts = frame.engine
        rows.append(
            f"{place.name:<12} {harmless(facts.model)}  {facts.device} {facts.dtype}"
            f"  {harmless(facts.kv_connector or 'no KV connector')}"
            f"  running {frame.num_running}, waiting {frame.num_waiting}"
        )
    return rows


def _watch(place: Place, how: _How, *, stays: bool) -> bool:
    """One engine; whether it was the viewer who ended it. Raises: `LiveViewError`."""
    from interlace.cli.live.attach import Attached
    from interlace.cli.live.viewer import ScreenView, copy_lines, gpu_asked, tell
    from interlace.engine.clock import MonotonicClock

    clock = MonotonicClock()
    with Attached(place) as attached:
        first = attached.wait_for_frame()
        if how.json:
            copy_lines(attached, attached.newest_line, how.waiter, sys.stdout)
            return how.waiter.ended_by is not None
        with gpu_asked(first) as ask_gpu:
            if not how.draws:
                tell(attached, first, how.waiter, clock, sys.stdout, ask_gpu)
                return how.waiter.ended_by is not None
            from rich.console import Console

            view = ScreenView(
                Console(highlight=False),
                attached,
                first,
                how.waiter,
                clock,
                keyboard=how.keyboard,
                unicode=_speaks_utf8() if how.unicode is None else how.unicode,
                ask_gpu=ask_gpu,
                stays=stays,
                folder=Path.cwd(),
            )
            with contextlib.suppress(OSError):  # the terminal has gone: nobody to tell
                view.run()
            return view.was_left or how.waiter.ended_by is not None


def _speaks_utf8() -> bool:
    from interlace.cli.live.terminal import speaks_utf8

    return speaks_utf8(sys.stdout.encoding, os.environ)


def _follow(pid: str, how: _How) -> None:
    """The engines of one process, one after the other, until that ends, or the viewer does."""
    while how.waiter.ended_by is None and _is_alive(int(pid)):
        places = [place for place in find() if str(place.pid) == pid]
        if not places:
            how.waiter.wait(None, _POLL_S)
            continue
        with contextlib.suppress(LiveViewError):  # it has gone meanwhile
            if _watch(places[-1], how, stays=False):
                return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
