"""The command as a process with a fake engine: pipes, closed streams, a real terminal, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import DEATH, WARNING
from small_terminal import SmallTerminal

ROOT = Path(__file__).resolve().parents[2]
FAKE_CHAT = [sys.executable, str(ROOT / "tests/support/fake_chat.py")]
LONG = "Hello ~"


def environment(**extra: str) -> dict[str, str]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests/support'}"
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm", **extra}


def run(
    answer: str, *args: str, stdin: bytes | None = b"", **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*FAKE_CHAT, answer, "chat", *args],
        input=stdin,
        env=environment(**env),
        capture_output=True,
        timeout=30,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def test_one_question_as_json_with_nothing_beside_it() -> None:
    done = run("Paris.", "-p", "Capital?", "--json")
    assert json.loads(done.stdout)["text"] == "Paris."
    assert done.stderr == ""


def test_piped_lines_are_answered_plainly() -> None:
    done = run("Aye.", stdin=b"one\r\n\ntwo \xff\nthree")
    assert (done.returncode, done.stdout) == (0, "Aye.\n" * 3)


def test_a_file_as_input(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open() as lines:
        done = subprocess.run(
            [*FAKE_CHAT, "Aye.", "chat"], stdin=lines, env=environment(), stdout=-1, check=True
        )
    assert done.stdout == b"Aye.\nAye.\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'printf "one\\n" | "$@" {closed}', "sh", *FAKE_CHAT, "Aye.", "chat"],
        env=environment(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*FAKE_CHAT, "Aye.", "chat", "-p", "Hi"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=30,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("args", [("-p", "Hi"), ()])
def test_a_full_disk_is_said_in_one_line(args: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*FAKE_CHAT, "Aye.", "chat", *args],
            input=b"one\ntwo\n",
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=30,
            check=False,
        )
    assert done.returncode == 1
    assert b"interlace: the output cannot be written (No space left on device)" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("args", [["--version"], ["--help"]])
def test_what_other_commands_print_may_not_fit_either(args: list[str]) -> None:
    """Also what is still in a buffer when the command has ended."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from interlace.cli.app import main; main()", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(b"interlace: ")


def test_output_that_cannot_show_a_character_replaces_it() -> None:
    done = run("Gr\u00fc\u00dfe", "-p", "Hi", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stdout) == (0, "Gr??e\n")


class Terminal:
    """A chat on a pseudo-terminal, driven like a person would."""

    def __init__(self, answer: str, *args: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        self.modes_before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [*FAKE_CHAT, answer, "chat", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(**env),
            start_new_session=True,
        )
        self._theirs = theirs
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Read until `text` has come; returns what was read up to its end."""
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], 20)
            assert ready, f"{text!r} did not come, only {self.shown!r}"
            self.shown += os.read(self._ours, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def modes(self) -> object:
        return termios.tcgetattr(self._theirs)

    def ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        return self.process.wait(timeout=20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def waiting_chat() -> Iterator[Terminal]:
    """At a prompt, with a model whose answers go on until they are stopped."""
    terminal = Terminal(LONG, NO_COLOR="1")
    terminal.wait_for("> ")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_at_the_prompt_leaves(waiting_chat: Terminal) -> None:
    chat = waiting_chat
    chat.type("Hi\n")
    chat.wait_for("Hello ")
    chat.ctrl_c()
    chat.wait_for("; stopped]")
    chat.wait_for("> ")
    chat.type("/stats\n")
    chat.wait_for("1 turns")
    chat.wait_for("> ")
    chat.ctrl_c()
    assert chat.ended() == 130


def test_a_typed_line_can_be_edited_and_fetched_again(waiting_chat: Terminal) -> None:
    pytest.importorskip("readline")
    chat = waiting_chat
    chat.type("stats\x01/\n")  # Ctrl-A goes to the start of the line
    chat.wait_for("0 turns")
    chat.wait_for("> ")
    chat.type("\x1b[A\n")  # the line before
    chat.wait_for("0 turns")


def test_the_terminal_is_left_as_it_was(waiting_chat: Terminal) -> None:
    chat = waiting_chat
    chat.ctrl_c()
    assert chat.ended() == 130
    assert chat.modes() == chat.modes_before


def test_ctrl_d_leaves(waiting_chat: Terminal) -> None:
    waiting_chat.type("\x04")
    assert waiting_chat.ended() == 0


def test_a_terminal_gets_dim_remarks_and_no_control_characters() -> None:
    terminal = Terminal("a\x1b[2Jb", "-p", "Hi")
    try:
        assert "a^[[2Jb\r\n\x1b[2m[4 cached, 1 loaded" in terminal.wait_for("]\x1b[0m\r\n")
        assert terminal.ended() == 0
    finally:
        terminal.close()


def shown_by(answer: str, until: str, *args: str) -> tuple[str, int]:
    """What a terminal shows of one question up to that text, and the exit code."""
    terminal = Terminal(answer, "-p", "Hi", *args, NO_COLOR="1")
    try:
        return terminal.wait_for(until), terminal.ended()
    finally:
        terminal.close()


def test_a_warning_does_not_split_an_answer_on_a_terminal() -> None:
    shown, code = shown_by("One! two.\nThr!ee.", "tokens/s]")
    assert code == 0
    assert f"One two.\r\nThree.\r\n{WARNING}\r\n{WARNING}\r\n[4 cached" in shown
    shown, _ = shown_by("One! two.", "}\r\n", "--json")
    assert shown.index(WARNING) < shown.index("{"), "nothing was on the screen yet"


def test_a_warning_is_told_if_the_answer_is_broken_off() -> None:
    shown, code = shown_by("One! two#", f"interlace: {DEATH}\r\n")
    assert code == 1
    assert f"One two\r\n{WARNING}\r\ninterlace: {DEATH}\r\n" in shown
    chat = Terminal("One! ~", NO_COLOR="1")
    try:
        chat.wait_for("> ")
        chat.type("Hi\n")
        chat.wait_for("One ")
        chat.ctrl_c()
        assert chat.wait_for("; stopped]").startswith(f"\r\n{WARNING}\r\n[")
    finally:
        chat.close()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_warning_at_the_prompt_stands_on_a_line_of_its_own(term: str) -> None:
    """And what is typed comes behind it, and goes on."""
    chat = Terminal("Aye.", NO_COLOR="1", TERM=term)
    screen = SmallTerminal()
    try:
        screen.feed(chat.wait_for("> "))
        chat.type("Hello")
        screen.feed(chat.wait_for("Hello"))
        for _ in range(2):
            chat.process.send_signal(signal.SIGUSR1)
            screen.feed(chat.wait_for("\x1b[1B" if term == "xterm" else f"{WARNING}\r\n> Hello"))
        chat.type(" you\n")
        screen.feed(chat.wait_for("tokens/s]"))
    finally:
        chat.close()
    lines = [line for line in screen.shown if line != "> Hello"]
    first = lines.index(WARNING)
    assert lines[first : first + 4] == [WARNING, WARNING, "> Hello you", "Aye."]


def test_a_warning_comes_at_once_where_the_answer_goes_elsewhere() -> None:
    process = subprocess.Popen(
        [*FAKE_CHAT, "One!~", "chat", "-p", "Hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"One"
        assert process.stderr.readline().decode() == f"{WARNING}\n"
        assert process.poll() is None, "the answer goes on"
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    assert rest == b"\n"
