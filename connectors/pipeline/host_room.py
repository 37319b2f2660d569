"""How much memory this process's control groups still let it take: a container has less than the
machine it runs on.

Beyond it nothing fails: the kernel ends a process. So this is asked before pages are touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from interlace.layers.hardware import host
from interlace.layers.hardware.fact import Unknown, attempt

CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Files of a control group."""

    limit: str
    usage: str
    dropped_first: str
    """In memory.stat: cached pages of files, which are counted as used."""


_NEW = _Names("memory.max", "memory.current", "inactive_file")
_OLD = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def container_room(proc: Path = host.PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes; None if there is no limit, or nothing is known. Linux, both kinds of groups."""
    groups = attempt(lambda: list(_groups(proc, cgroups)), "reading control groups")
    if isinstance(groups, Unknown):
        return None
    rooms = (_room(folder, names) for folder, names in groups)
    return min((room for room in rooms if room is not None), default=None)


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Groups that bound this process, from its own one to the root: each has its limit. Within a
    container the path may be one that only the host knows; then the root is what bounds it."""
    for line in (proc / "self" / "cgroup").read_text(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = cgroups / "memory", _OLD
        elif not controllers:
            root, names = cgroups, _NEW
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for length in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:length]), names


def _room(folder: Path, names: _Names) -> int | None:
    """Bytes that the group may still take; None if it has no limit, or is not to be seen."""

    def read() -> int:
        limit, usage = (int((folder / name).read_text()) for name in names[:2])
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - usage + int(stat.get(names.dropped_first, 0)))

    room = attempt(read, f"reading the limits of {folder}")
    return None if isinstance(room, Unknown) else room
