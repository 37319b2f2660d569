"""Fetch one pinned wheel with pip, in a process of its own, watched so that it cannot hang.

pip brings what a user has set up already: mirrors, proxies, certificates, local folders of wheels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress

_CONNECT_S = 8.5
"""Longest wait for the first byte of the wheel: no network must be said within ten seconds."""
_STALL_S = 30.0
"""Longest wait for the next byte."""
_POLL_S = 0.1
_MAX_LOG_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel on the package index that may only be this one file."""

    requirement: str
    """`name==version`"""
    file_name: str
    num_bytes: int
    sha256: str


def download_wheel(wheel: PinnedWheel, folder: Path, *, hint: str, progress: Progress) -> Path:
    """Download `wheel` into the empty `folder`; pip checks its digest. Returns its path.

    `hint` ends the message if there is no way: what else the user can do. pip and all its
    temporary files are gone when this returns or raises.
    Raises: `ModelError`, within ten seconds if there is no network.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {wheel.requirement} needs pip, which this Python does not have: "
            f"run '{sys.executable} -m ensurepip', or {hint}"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    scratch = folder / "pip"
    scratch.mkdir()
    log = folder / "pip.log"
    with log.open("wb") as output, progress.task("Downloading", wheel.num_bytes) as advance:
        process = subprocess.Popen(
            _command(requirements, folder),
            cwd=folder,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            reason = _watch(process, folder, advance)
        finally:
            process.kill()
            process.wait()
    path = folder / wheel.file_name
    if reason is None and not path.is_file():
        reason = _last_words(log)
    if reason is not None:
        raise ModelError(f"{wheel.requirement} could not be downloaded ({reason}): {hint}")
    return path


def _command(requirements: Path, folder: Path) -> list[str]:
    # -P: nothing in the working folder may pose as pip. No cache: the wheel is not kept twice.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    quick = ["--retries=0", "--timeout=5", "--no-input", "--no-cache-dir"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "--no-color"]
    what = ["--require-hashes", "-r", str(requirements), "-d", str(folder)]
    return [*pip, *quick, *quiet, *what]


def _watch(
    process: subprocess.Popen[bytes], folder: Path, advance: Callable[[float], None]
) -> str | None:
    """Wait for pip to end while bytes arrive. Returns why it was given up, or None."""
    seen, since, limit = 0, time.monotonic(), _CONNECT_S
    while process.poll() is None:
        time.sleep(_POLL_S)
        now = _wheel_bytes(folder)
        advance(max(0, now - seen))  # also without news: it may raise to end the wait
        if now > seen:
            seen, since, limit = now, time.monotonic(), _STALL_S
        elif time.monotonic() - since > limit:
            return f"no answer from the package index in {limit:g} s"
    return None


def _wheel_bytes(folder: Path) -> int:
    """Size of the largest wheel under `folder`, whole or in parts; pip moves it when done."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, (Path(parent) / name).stat().st_size)
                except FileNotFoundError:
                    continue  # moved between the listing and the look
    return largest


def _last_words(log: Path) -> str:
    """The end of what pip said, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-_MAX_LOG_LINES:])[:400] or "pip said nothing"
