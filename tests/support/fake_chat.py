"""`interlace chat` with a fake engine, for tests that need a process of its own.

Usage: python fake_chat.py ANSWER [options of interlace chat]. In ANSWER `~` waits until aborted,
`!` logs a warning, and with `#` the engine dies.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from fake_engine import DIE, WAIT, WARN, FakeEngine, Script

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


answer = sys.argv.pop(1)
chat.start_engine = start_fake
app.main()
