"""`interlace top` as a process: pipes, real terminals, signals, engines that go."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from live_frames import idle
from live_server import LiveServer, environment, live_server
from small_terminal import SmallTerminal

from interlace.cli.live.shown import Shown
from interlace.cli.live.terminal import speaks_utf8
from interlace.cli.live.view import lines_of

TOP = [sys.executable, "-m", "interlace", "top"]
PATIENCE_S = 30


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("x")  # short: it is a part of a socket's path


def run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *args],
        env=environment(folder, **env),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=False,
    )


def test_without_an_engine_it_says_what_to_do(folder: Path) -> None:
    done = run(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "interlace chat" in done.stderr
    assert str(folder) in done.stderr


def test_several_are_listed_and_one_is_chosen(folder: Path) -> None:
    with live_server(folder), live_server(folder, "4712", idle()):
        done = run(folder)
        assert done.returncode == 1
        assert "interlace top 4711" in done.stderr
        assert [row.split()[0] for row in done.stdout.splitlines()] == ["4711", "4712"]
        assert run(folder, "--list").stdout == done.stdout
        missing = run(folder, "4713")
        assert missing.returncode == 1
        assert "no engine 4713" in missing.stderr


def test_a_newer_engine_is_not_misread(folder: Path) -> None:
    with live_server(folder) as server:
        server.line = b'{"schema":2}\n'
        done = run(folder)
        assert done.returncode == 1
        assert "frames of version 2" in done.stderr


@contextlib.contextmanager
def piped(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*TOP, *args],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_into_a_pipe_it_prints_a_line_a_second_until_the_engine_goes(folder: Path) -> None:
    with live_server(folder) as server, piped(folder) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert all(line.startswith("4711  1,204 tokens/s") for line in lines)
        server.close()
        *_, last = process.stdout
        assert "the engine has closed" in last
        assert process.wait(PATIENCE_S) == 0


def test_as_json_each_frame_is_a_line(folder: Path) -> None:
    with live_server(folder), piped(folder, "--json") as process:
        assert process.stdout is not None
        frames = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [frame["number"] - frames[0]["number"] for frame in frames] == [0, 1, 2]
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("args", [(), ("--json",)])
def test_a_reader_that_leaves_ends_it_quietly(folder: Path, args: Sequence[str]) -> None:
    with live_server(folder), piped(folder, *args) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr.read() == ""


class Terminal:
    """A process on a terminal of its own, and all that it has written there."""

    def __init__(
        self, folder: Path, *args: str, size: tuple[int, int] = (80, 24), **env: str
    ) -> None:
        self._near, far = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(far)
        self.written = ""
        self.folder = folder
        self.process = subprocess.Popen(
            [*TOP, *args],
            env=environment(folder, **env),
            stdin=far,
            stdout=far,
            stderr=far,
            cwd=folder,
            start_new_session=True,
        )
        self._far = far

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def until(self, text: str) -> str:
        """What was written, from now on, up to `text` without its escapes."""
        seen, deadline = "", time.monotonic() + PATIENCE_S
        while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen):
            drawn = seen.count("\x1b[H")
            assert time.monotonic() < deadline, f"no {text!r} in {drawn} x {seen[-3000:]!r}"
            seen += self._read()
        return seen

    def _read(self) -> str:
        if not select.select([self._near], [], [], 0.1)[0]:
            return ""
        piece = os.read(self._near, 1 << 16).decode("utf-8", "replace")
        self.written += piece
        return piece

    def end(self) -> int:
        """Its exit code. The terminal is as it was before."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        while self._read():
            pass
        assert termios.tcgetattr(self._far) == self.before
        assert self.written.rindex("\x1b[?1049l") > self.written.rindex("\x1b[?1049h")
        assert self.written.rindex("\x1b[?25h") > self.written.rindex("\x1b[?25l")
        assert "Traceback" not in self.written
        return self.process.returncode

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._near)
        os.close(self._far)


@contextlib.contextmanager
def terminal(
    folder: Path, *args: str, size: tuple[int, int] = (80, 24), **env: str
) -> Iterator[Terminal]:
    one = Terminal(folder, *args, size=size, **env)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder) as one:
        yield one


def test_keys_act_on_the_view(folder: Path, server: LiveServer) -> None:
    with terminal(folder) as one:
        one.until("overview 1/3")
        one.type("p")
        one.until("PAUSED")
        one.type(" +")
        one.until("every 200 ms")
        one.type("-")
        one.until("every 500 ms")
        one.type("n")
        one.until("requests 2/3")
        one.type("\x1b[A")  # means nothing
        one.type("s")
        one.until("saved interlace-4711-")
        one.type("q")
        assert one.end() == 0
    (saved,) = folder.glob("interlace-4711-*.json")
    assert json.loads(saved.read_text())["engine"]["model"] == "dummy:llama-3.1-8b"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it(folder: Path, server: LiveServer, number: int) -> None:
    with terminal(folder) as one:
        one.until("overview 1/3")
        one.process.send_signal(number)
        assert one.end() == 128 + number


@pytest.mark.parametrize("size", [(80, 24), (160, 48), (39, 16)])
def test_a_terminal_shows_what_is_drawn(folder: Path, size: tuple[int, int]) -> None:
    width, height = size
    with live_server(folder, frame=idle()), terminal(folder, size=size) as one:
        expected = [row.plain.rstrip() for row in lines_of(Shown(idle()), width, height)]
        one.until(expected[-1])
        screen = SmallTerminal(width, height)
        screen.feed(one.written)
        assert screen.shown == expected
        one.type("q")
        assert one.end() == 0
        left = SmallTerminal(width, height)
        left.feed(one.written)
        assert left.shown == []


def test_it_fills_a_terminal_that_grows(folder: Path, server: LiveServer) -> None:
    with terminal(folder) as one:
        one.until("overview 1/3")
        one.resize(160, 48)
        one.process.send_signal(signal.SIGWINCH)
        one.until("+ faster")
        one.type("q")
        assert one.end() == 0


def test_an_engine_that_dies_leaves_its_last_frame(folder: Path, server: LiveServer) -> None:
    with terminal(folder) as one:
        one.until("overview 1/3")
        server.close()
        one.until("its process has ended")
        one.type("n")
        one.until("requests 2/3")
        one.type("q")
        assert one.end() == 0


def test_beside_a_command_it_ends_with_that(folder: Path) -> None:
    command = subprocess.Popen(["sleep", "60"])
    try:
        with terminal(folder, str(command.pid), "--follow") as one:
            with live_server(folder, str(command.pid)):
                one.until("overview 1/3")
            with live_server(folder, f"{command.pid}-2", idle()):
                one.until("smollm2-135m")
            command.kill()
            command.wait()
            assert one.end() == 0
    finally:
        command.kill()
        command.wait()


def test_a_locale_without_utf8_gets_ascii(folder: Path, server: LiveServer) -> None:
    with terminal(folder, LC_ALL="C") as one:
        one.until("overview 1/3")
        one.type("q")
        assert one.end() == 0
        assert one.written.isascii()


def test_without_colour_there_is_none(folder: Path, server: LiveServer) -> None:
    with terminal(folder, NO_COLOR="1") as one:
        one.until("overview 1/3")
        one.type("q")
        assert one.end() == 0
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", one.written)


def test_a_dumb_terminal_gets_lines(folder: Path, server: LiveServer) -> None:
    with terminal(folder, TERM="dumb") as one:
        one.until("1,204 tokens/s")
        one.process.terminate()
        one.process.wait(PATIENCE_S)
        assert "\x1b" not in one.written


@pytest.mark.parametrize(
    ("encoding", "environ", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, True),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),  # Python's own word
        ("utf-8", {"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"}, True),
        ("utf-8", {"LC_ALL": "C"}, False),
        ("utf-8", {"LC_ALL": "de_DE.utf8", "LANG": "C"}, True),
        ("utf-8", {}, False),
        ("iso-8859-1", {"LANG": "en_US.UTF-8"}, False),
    ],
)
def test_what_a_terminal_speaks(encoding: str, environ: dict[str, str], expected: bool) -> None:
    assert speaks_utf8(encoding, environ) is expected
