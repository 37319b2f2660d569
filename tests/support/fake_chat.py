"""`interlace chat` with a fake engine, for tests that need a process of its own.

Usage: python fake_chat.py ANSWER [options of interlace chat]. In ANSWER `~` waits until aborted,
`!` logs a warning, and with `#` the engine dies. SIGUSR1 logs a warning at any time.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from fake_engine import DIE, WAIT, WARN, WARNING, FakeEngine, Script

from interlace.cli import app, chat
from interlace.cli.chat_engine import ChatEngine
from interlace.engine.config import EngineConfig
from interlace.engine.ports import Progress

SIGNS = {"~": WAIT, "!": WARN, "#": DIE}


@contextlib.asynccontextmanager
async def start_fake(
    config: EngineConfig,
    progress: Progress,
    *,
    metrics: socket.socket | None = None,
    trace: Path | None = None,
) -> AsyncIterator[ChatEngine]:
    pieces = [SIGNS.get(piece, piece) for piece in re.findall("[~!#]|[^~!#]{1,3}", answer)]
    yield FakeEngine(Script(pieces))


def warn(*_: object) -> None:
    """As a thread of the engine does, at any time."""
    threading.Thread(target=logging.getLogger("interlace").warning, args=[WARNING]).start()


signal.signal(signal.SIGUSR1, warn)
answer = sys.argv.pop(1)
chat.start_engine = start_fake
app.main()
