"""The terminal of a live view: keys one by one, signals as news, and all of it put back at the end.

Nothing here raises out of a signal: a signal is noted, and whoever waits wakes up.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple, Protocol

from interlace.cli.screen import is_terminal

_WATCHED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGWINCH", "SIGTSTP", "SIGCONT")
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
_KEYS = 64
_SEQUENCE = re.compile(r"\x1b(\[[0-9;]*[ -/]*[@-~]|O.|[^\[O])?")
"""What arrows and function keys send."""


class HasFileno(Protocol):
    """What `select` takes."""

    def fileno(self) -> int:
        """Its number."""
        ...


class News(NamedTuple):
    """What `Waiter.wait` has seen."""

    keys: str
    is_ready: bool
    """Whether what else was waited for can be read."""


class Waiter:
    """Waits for keys, signals and one thing more. Main thread."""

    def __init__(self, wakeup: socket.socket, keyboard: int | None) -> None:
        """For `waiting`."""
        self.ended_by: int | None = None
        """The number of the signal that asks this process to end."""
        self.wants_stop = False
        """Whether Ctrl-Z was pressed."""
        self._wakeup = wakeup
        self._keyboard = keyboard

    def note(self, number: int) -> None:
        """A signal has come. A second one that asks for the end gets it at once."""
        if signal.Signals(number).name in _ENDING:
            if self.ended_by is not None:
                raise SystemExit(128 + number)
            self.ended_by = number
        elif number == getattr(signal, "SIGTSTP", None):
            self.wants_stop = True

    def wait(self, also: HasFileno | None, timeout_s: float) -> News:
        """Until there is news, or for `timeout_s`."""
        sources: list[HasFileno | int] = [self._wakeup]
        if also is not None:
            sources.append(also)
        if self._keyboard is not None:
            sources.append(self._keyboard)
        ready, _, _ = select.select(sources, [], [], max(0.0, timeout_s))
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(_KEYS)
        keys = ""
        if self._keyboard is not None and self._keyboard in ready:
            keys = self._read_keys(self._keyboard)
        return News(keys, also is not None and also in ready)

    def _read_keys(self, keyboard: int) -> str:
        try:
            typed = os.read(keyboard, _KEYS)
        except BlockingIOError:
            return ""
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone, or its input has ended
            self._keyboard = None
        return typed.decode("ascii", "ignore")


@contextlib.contextmanager
def waiting(keyboard: int | None, *, draws: bool) -> Iterator[Waiter]:
    """Signals become news of the waiter meanwhile; afterwards they do what they did before. Ctrl-Z
    only for who `draws`, and so has a terminal to put back first."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(0)
        far.settimeout(0)
        waiter = Waiter(near, keyboard)

        def handle(number: int, frame: FrameType | None) -> None:
            waiter.note(number)

        before_fd = signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)
        before = {
            number: signal.signal(number, handle)
            for number in (
                getattr(signal, name, None) for name in _WATCHED if draws or name != "SIGTSTP"
            )
            if number is not None
        }
        try:
            yield waiter
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)


@contextlib.contextmanager
def keys_one_by_one(keyboard: int | None) -> Iterator[None]:
    """Keys are read as they are pressed, and not shown; Ctrl-C and Ctrl-Z stay signals."""
    if keyboard is None:
        yield
        return
    import termios

    before = termios.tcgetattr(keyboard)
    changed = termios.tcgetattr(keyboard)
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    termios.tcsetattr(keyboard, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSANOW, before)


def stop_here() -> None:
    """As Ctrl-Z does by itself: returns when somebody has said `fg`. The terminal must be as it was
    before."""
    os.kill(os.getpid(), signal.SIGSTOP)


def keyboard_of_process() -> int | None:
    """Where keys come from; None if standard input is no terminal."""
    return sys.stdin.fileno() if is_terminal(sys.stdin) else None


def speaks_utf8(encoding: str, environ: Mapping[str, str]) -> bool:
    """Whether a terminal shows UTF-8, by what the environment says of it.

    Python itself writes UTF-8 under the locale "C", and says so by LC_CTYPE; the terminal of who
    has chosen that locale need not.
    """
    if not encoding.lower().replace("-", "").startswith("utf8"):
        return False
    said = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""
    own = ("C.UTF-8", "C.utf8", "UTF-8")
    if not environ.get("LC_ALL") and said in own:
        said = environ.get("LANG") or ""
    return "utf" in said.lower()


ChooseKey = Callable[[], None]
"""What a key does."""


def press(keys: str, actions: Mapping[str, ChooseKey]) -> None:
    """Do what each key means; others mean nothing. Sequences of function keys are left out."""
    for key in _plain(keys):
        action = actions.get(key)
        if action is not None:
            action()


def _plain(keys: str) -> str:
    return _SEQUENCE.sub("", keys)
