"""Where engines put the sockets of their live views, and how those of dead ones go.

`$XDG_RUNTIME_DIR/interlace/PID.sock`, or in a folder of the user's own where temporary files go. A
second engine of a process is `PID-2`. Blocking, all of it: threads, and processes without a loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from interlace.engine.errors import LiveViewError

MOST_OF_PROCESS = 64
"""Engines that a process shows at a time."""
_LONGEST_PATH = 107
"""Bytes: what a socket's address holds on Linux, less its end."""
_CONNECT_S = 0.5
_NAME = re.compile(r"[1-9][0-9]{0,9}(-[1-9][0-9]?)?")
_BACKLOG = 16


class Place(NamedTuple):
    """A socket that somebody listens at."""

    name: str
    """ "1234", "1234-2"."""
    path: Path

    @property
    def pid(self) -> int:
        """Of the engine's process, as that knows itself."""
        return int(self.name.partition("-")[0])


def folders(
    environ: Mapping[str, str] | None = None, temp: Path | None = None, uid: int | None = None
) -> list[Path]:
    """Where sockets of this user may lie, the best place first. They need not exist."""
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    found: list[Path] = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute():
        found.append(Path(runtime) / "interlace")
    found.append((temp or Path(tempfile.gettempdir())) / f"interlace-{uid}")
    return found


def check_own(folder: Path, uid: int | None = None) -> None:
    """See that the folder is the user's own, and that nobody else may enter it.

    Raises: `LiveViewError`; `OSError` if it cannot be looked at.
    """
    uid = os.getuid() if uid is None else uid
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise LiveViewError(f"{folder} is no folder, or a link to one: remove it.")
    if found.st_uid != uid:
        raise LiveViewError(
            f"{folder} belongs to another user: set XDG_RUNTIME_DIR to a folder of your own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise LiveViewError(f"others may enter {folder}: chmod 700 {folder}")


def listen(candidates: Iterable[Path] | None = None) -> tuple[socket.socket, Place]:
    """A socket that listens, in the first of these folders that will do.

    What dead engines have left there is removed. `close` is owed. Raises: `LiveViewError`.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise LiveViewError("live views need Linux: only there a socket tells who has connected.")
    reasons: list[str] = []
    for folder in folders() if candidates is None else candidates:
        try:
            return _listen_in(folder)
        except LiveViewError as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{folder} cannot be used ({error.strerror or error}).")
    raise LiveViewError(
        "there is no place for the socket of a live view. "
        + " ".join(reasons)
        + " Or set XDG_RUNTIME_DIR to a short path of a folder of your own."
    )


def _listen_in(folder: Path) -> tuple[socket.socket, Place]:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own(folder)
    if len(os.fsencode(_hidden(folder))) > _LONGEST_PATH:
        raise LiveViewError(f"{folder} is too long a path for a socket.")
    remove_dead(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.settimeout(0)  # for an event loop
        return listener, _bind(listener, folder)
    except BaseException:
        listener.close()
        raise


def _bind(listener: socket.socket, folder: Path) -> Place:
    """It gets its name when it listens: before that it would look like a dead one."""
    hidden = _hidden(folder)
    listener.bind(os.fspath(hidden))
    try:
        listener.listen(_BACKLOG)
        for number in range(1, MOST_OF_PROCESS + 1):
            name = str(os.getpid()) if number == 1 else f"{os.getpid()}-{number}"
            path = folder / f"{name}.sock"
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(hidden)
                return Place(name, path)
    finally:
        hidden.unlink()
    raise LiveViewError(f"this process shows {MOST_OF_PROCESS} engines already: close one.")


def _hidden(folder: Path) -> Path:
    return folder / f".{os.getpid()}-{secrets.token_hex(4)}.new"


def close(listener: socket.socket, place: Place) -> None:
    """End what `listen` has begun. May be repeated."""
    listener.close()
    with contextlib.suppress(OSError):
        place.path.unlink()


def remove_dead(folder: Path) -> None:
    """Remove the sockets that nobody listens at. Raises: `OSError` if the folder cannot be read."""
    for place in _named(folder):
        try:
            connect(place.path).close()
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                place.path.unlink()
        except OSError:  # a busy one, for instance
            continue
    for path in folder.glob(".*.new"):
        pid = path.name[1:].partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def find(candidates: Iterable[Path] | None = None) -> list[Place]:
    """Sockets of this user's engines that somebody listens at, by name; dead ones are removed.

    Folders that are not the user's own are left alone.
    """
    found: list[Place] = []
    for folder in folders() if candidates is None else candidates:
        try:
            check_own(folder)
            remove_dead(folder)
            found += _named(folder)
        except (OSError, LiveViewError):
            continue
    return sorted(found, key=lambda place: (place.pid, place.name))


def _named(folder: Path) -> list[Place]:
    paths = [path for path in folder.iterdir() if path.suffix == ".sock"]
    return [Place(path.stem, path) for path in paths if _NAME.fullmatch(path.stem)]


def connect(path: Path, timeout_s: float = _CONNECT_S) -> socket.socket:
    """To who listens there; with that timeout. Raises: `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
    except BaseException:
        connection.close()
        raise
    return connection


def peer_uid(connection: socket.socket) -> int:
    """Whose process is at the other end. Raises: `OSError`."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(_SOL_SOCKET, _SO_PEERCRED, size))
    return int(uid)


_SOL_SOCKET = socket.SOL_SOCKET
_SO_PEERCRED: int = getattr(socket, "SO_PEERCRED", 17)
