"""Watches one engine: on a terminal a picture that keys act on, elsewhere a line a second.

Keys act on the view only; nothing is ever sent to the engine. Main thread, without an event loop;
a second thread asks the GPU's driver, which takes its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from interlace.cli.live.attach import Attached
from interlace.cli.live.shown import Shown
from interlace.cli.live.terminal import Waiter, keys_one_by_one, press, stop_here
from interlace.cli.live.view import render, summary
from interlace.engine.live_frame import Frame
from interlace.engine.ports import Clock
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.gpu_load import GpuLoad, gpu_watched

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_FIRST_INTERVAL = 1
_LINE_S = 1.0
_FLOW_S = 1.0
_GPU_S = 1.0
_NOTE_S = 4.0
GONE = "the engine has closed, or its process has ended; this is its last frame"

Ask = Callable[[], "GpuLoad | Unknown | None"]


class Flow:
    """Bytes a second of each lane, from what frames have counted."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, dict[tuple[str, str], int]]] = deque()

    def add(self, frame: Frame) -> dict[tuple[str, str], float]:
        """A frame has come: how fast bytes have flowed in the last second or so."""
        now_s = frame.snapshot.time_s
        counted = {
            (connector.name, lane.name): lane.num_bytes
            for connector in frame.snapshot.connectors
            for lane in connector.lanes
        }
        self._counted.append((now_s, counted))
        while len(self._counted) > 2 and self._counted[1][0] <= now_s - _FLOW_S:
            self._counted.popleft()
        then_s, before = self._counted[0]
        passed_s = now_s - then_s
        if passed_s <= 0:
            return {}
        return {key: (n - before.get(key, n)) / passed_s for key, n in counted.items()}


@contextlib.contextmanager
def gpu_asked(frame: Frame) -> Iterator[Ask]:
    """What the driver said last of the engine's GPU, asked once a second on a thread. None: nothing
    yet, or the engine computes on a CPU."""
    if not frame.engine.device.startswith("cuda"):
        yield lambda: None
        return
    newest: list[GpuLoad | Unknown] = []
    stop = threading.Event()

    def ask() -> None:
        with gpu_watched(frame.engine.pid) as load:
            while not stop.is_set():
                newest[:] = [load()]
                stop.wait(_GPU_S)

    thread = threading.Thread(target=ask, name="interlace-gpu", daemon=True)
    thread.start()
    try:
        yield lambda: newest[0] if newest else None
    finally:
        stop.set()  # and not waited for: a driver may hang


class ScreenView:
    """The picture on a terminal."""

    def __init__(
        self,
        console: Console,
        attached: Attached,
        first: Frame,
        waiter: Waiter,
        clock: Clock,
        *,
        keyboard: int | None,
        unicode: bool,
        ask_gpu: Ask,
        stays: bool,
        folder: Path,
    ) -> None:
        """`stays`: whether the last picture stays when the engine has gone, until a key ends it.
        `folder` is where snapshots are saved."""
        self._console = console
        self._attached = attached
        self._waiter = waiter
        self._clock = clock
        self._keyboard = keyboard
        self._unicode = unicode
        self._ask_gpu = ask_gpu
        self._stays = stays
        self._folder = folder
        self._flow = Flow()
        self._frame = first
        self._rates = self._flow.add(first)
        self._line = attached.newest_line
        self._num_lost = 0
        self._page = 0
        self._interval = _FIRST_INTERVAL
        self._is_paused = False
        self._has_ended = False
        self.was_left = False
        """Whether a key has ended it."""
        self._note = ""
        self._note_until_s = 0.0
        self._actions = {
            "q": self._quit,
            "p": self._pause,
            " ": self._pause,
            "+": lambda: self._step(-1),
            "=": lambda: self._step(-1),
            "-": lambda: self._step(1),
            "n": self._turn,
            "\t": self._turn,
            "s": self._save,
        }

    def run(self) -> None:
        """Until somebody ends it: a key, a signal, or the engine's end unless it `stays`.

        Raises: `LiveViewError` for frames that cannot be read; `OSError` if the terminal is gone.
        """
        while not self._has_ended and self._waiter.ended_by is None:
            with self._screen() as draw:
                self._watch(draw)
            if self._waiter.wants_stop:
                self._waiter.wants_stop = False
                stop_here()

    @contextlib.contextmanager
    def _screen(self) -> Iterator[Callable[[], None]]:
        """The other screen of the terminal, and what draws there."""
        from rich.live import Live

        with (
            keys_one_by_one(self._keyboard),
            Live(
                "",
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
        ):
            yield lambda: live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        width, height = self._console.size
        return render(self._shown(), width, height, unicode=self._unicode)

    def _shown(self) -> Shown:
        is_gone = self._attached.is_gone
        return Shown(
            self._frame,
            {} if is_gone else self._rates,
            self._ask_gpu(),
            self._page,
            INTERVALS_S[self._interval],
            self._is_paused,
            self._num_lost,
            GONE if is_gone else None,
            self._note,
        )

    def _watch(self, draw: Callable[[], None]) -> None:
        clock, waiter = self._clock, self._waiter
        draw()
        drawn_s = clock.monotonic()
        size = self._console.size
        while not self._has_ended and waiter.ended_by is None and not waiter.wants_stop:
            due_s = drawn_s + INTERVALS_S[self._interval]
            source = None if self._attached.is_gone else self._attached
            news = waiter.wait(source, due_s - clock.monotonic())
            was_gone = self._attached.is_gone
            if news.is_ready:
                self._take_frame()
            press(news.keys, self._actions)
            now_s = clock.monotonic()
            if self._note and now_s >= self._note_until_s:
                self._note = ""
            has_changed = self._console.size != size or self._attached.is_gone != was_gone
            if news.keys or has_changed or now_s >= due_s:
                size = self._console.size
                draw()
                drawn_s = now_s
            if self._attached.is_gone and not self._stays:
                self._has_ended = True

    def _take_frame(self) -> None:
        frame = self._attached.newest()
        if frame is None:
            return
        rates = self._flow.add(frame)
        if not self._is_paused:
            self._frame, self._rates, self._line = frame, rates, self._attached.newest_line
            self._num_lost = self._attached.num_lost

    # ---------------------------------------------------------------- keys

    def _quit(self) -> None:
        self._has_ended = self.was_left = True

    def _pause(self) -> None:
        self._is_paused = not self._is_paused

    def _step(self, by: int) -> None:
        self._interval = min(max(0, self._interval + by), len(INTERVALS_S) - 1)

    def _turn(self) -> None:
        self._page += 1

    def _save(self) -> None:
        """What is shown, as JSON; an older file stays as it is."""
        pid, number = self._frame.engine.pid, self._frame.number
        path = self._folder / f"interlace-{pid}-{number}.json"
        try:
            text = json.dumps(json.loads(self._line), indent=2) + "\n"
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            self._note = f"saved {os.path.relpath(path)}"
        except FileExistsError:
            self._note = f"{path.name} is there already"
        except OSError as error:
            self._note = f"{path.name} cannot be saved: {error.strerror or error}"
        self._note_until_s = self._clock.monotonic() + _NOTE_S


def tell(
    attached: Attached, first: Frame, waiter: Waiter, clock: Clock, out: TextIO, ask_gpu: Ask
) -> None:
    """A line a second, until the engine has gone or a signal has come.

    Raises: `LiveViewError` for frames that cannot be read; `BrokenPipeError`.
    """
    flow = Flow()
    frame = first
    flow.add(first)
    due_s = clock.monotonic() + _LINE_S  # the first frame knows no rates yet
    while waiter.ended_by is None:
        if clock.monotonic() >= due_s:
            rates = flow.add(frame)
            shown = Shown(frame, rates, ask_gpu(), num_lost=attached.num_lost)
            print(summary(shown), file=out, flush=True)
            due_s += _LINE_S
            if due_s < clock.monotonic():  # the reader was slow
                due_s = clock.monotonic() + _LINE_S
        news = waiter.wait(attached, due_s - clock.monotonic())
        if news.is_ready:
            frame = attached.newest() or frame
        if attached.is_gone:
            print(f"{frame.engine.pid}  {GONE.partition(';')[0]}", file=out, flush=True)
            return


def copy_lines(attached: Attached, first_line: bytes, waiter: Waiter, out: TextIO) -> None:
    """Each frame as it came, until the engine has gone or a signal has come.

    Raises: `LiveViewError`, `BrokenPipeError`.
    """
    lines = [first_line]
    while True:
        for one in lines:
            out.write(one.decode("ascii", "replace") + "\n")
        out.flush()
        if attached.is_gone or waiter.ended_by is not None:
            return
        waiter.wait(attached, _LINE_S)
        lines = attached.receive()
