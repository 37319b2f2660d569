"""Answers `GET /metrics` over HTTP on this machine alone. Loop thread; knows nothing of engines.

No request makes anything wait: there is one answer for a connection, which is written to a buffer
and closed, and each connection has a deadline. So there are no tasks either.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import io
import logging
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple, cast

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from interlace.engine.errors import ConfigError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PATH = "/metrics"
MAX_HEAD_BYTES = 8192
"""Of a request; more is refused."""
MAX_CONNECTIONS = 16
"""At once; more are refused."""
DEADLINE_S = 10.0
"""For a whole connection: Prometheus gives up after as long."""
_OWN_NAMES = frozenset({HOST, "localhost"})
"""Of this machine. A page in a browser that has its own name lead here is refused by it."""


class _Answer(NamedTuple):
    status: http.HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *self.headers,
        )
        return "".join(f"{line}\r\n" for line in head).encode("latin-1") + b"\r\n" + self.body


class _Request(BaseHTTPRequestHandler):
    """The standard library's parser, without its sockets."""

    def __init__(self, head: bytes) -> None:
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline(MAX_HEAD_BYTES)
        self.refused_with: http.HTTPStatus | None = None
        self.is_understood = self.parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the parser."""
        self.refused_with = http.HTTPStatus(code)


def listen(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1, for `AsyncEngine.serve_metrics`: taken before a model is
    loaded, so that what is wrong shows at once. `port` 0 takes a free one. Who has it closes it.

    Raises: `ConfigError` for a port that cannot be had.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(
            f"the metrics' port is a number from 1 to 65535, or 0 for a free one, not {port!r}."
        )
    with contextlib.ExitStack() as undo:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        undo.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not the last run's echo
        try:
            sock.bind((HOST, port))
            sock.listen(MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(_why_not(port, error)) from error
        sock.setblocking(False)  # noqa: FBT003 - the standard library's
        undo.pop_all()
    return sock


def _why_not(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use on {HOST}: give the metrics another one, or 0 for a free one."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"this user may not serve metrics on port {port}: give one from 1024 up, or 0 for a"
            " free one."
        )
    return (
        f"metrics cannot be served on port {port}: {error}. Give another one, or 0 for a free one."
    )


def url_of(sock: socket.socket) -> str:
    """Where what listens there is scraped."""
    return f"http://{HOST}:{sock.getsockname()[1]}{PATH}"


class MetricsServer:
    """Serves one registry until `close()`."""

    def __init__(self, registry: Collector, on_close: Callable[[], None]) -> None:
        """For `open`."""
        self.url = ""
        """Where it is scraped."""
        self._registry = registry
        self._on_close = on_close
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._deadline_s = DEADLINE_S
        self.is_closed = False

    @classmethod
    async def open(
        cls,
        registry: Collector,
        sock: socket.socket,
        *,
        on_close: Callable[[], None] = lambda: None,
        deadline_s: float = DEADLINE_S,
    ) -> MetricsServer:
        """Serve `registry` on `sock`, which is `listen`'s and the server's own from now on.

        `on_close` is called once, when it closes. Cancellation: it is closed.
        """
        server = cls(registry, on_close)
        server.url = url_of(sock)
        server._deadline_s = deadline_s
        try:
            loop = asyncio.get_running_loop()
            server._server = await loop.create_server(lambda: _Connection(server), sock=sock)
        except BaseException:
            sock.close()
            server.close()
            raise
        return server

    def close(self) -> None:
        """Listen no more, and drop open connections. Idempotent; waits for nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drop()
        self._on_close()

    def _admit(self, connection: _Connection) -> bool:
        if self.is_closed or len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def _answer(self, head: bytes) -> _Answer:
        request = _Request(head)
        if not request.is_understood:
            status = request.refused_with or http.HTTPStatus.BAD_REQUEST
            return _Answer(status, b"This is no HTTP request that can be read.\n")
        if not _is_for_us(request.headers.get("Host")):
            text = f"Ask {HOST} by that name, or as localhost.\n"
            return _Answer(http.HTTPStatus.FORBIDDEN, text.encode())
        if request.path.partition("?")[0] != PATH:
            return _Answer(http.HTTPStatus.NOT_FOUND, f"Only {PATH} is served here.\n".encode())
        if request.command != "GET":
            text = f"{PATH} can only be read, by GET.\n"
            allow = ("Allow: GET",)
            return _Answer(http.HTTPStatus.METHOD_NOT_ALLOWED, text.encode(), headers=allow)
        return self._scrape(request.headers.get("Accept", ""))

    def _scrape(self, accept: str) -> _Answer:
        try:
            encode, content_type = choose_encoder(accept)
            return _Answer(http.HTTPStatus.OK, encode(self._registry), content_type)
        except Exception as error:
            logger.exception("metrics cannot be read")
            text = f"The metrics cannot be read: {type(error).__name__}: {error}\n"
            return _Answer(http.HTTPStatus.INTERNAL_SERVER_ERROR, text.encode())


def _is_for_us(host: str | None) -> bool:
    """Whether the request names this machine, or none, as HTTP/1.0 may."""
    return host is None or host.partition(":")[0].lower() in _OWN_NAMES


class _Connection(asyncio.Protocol):
    """One request, one answer."""

    def __init__(self, server: MetricsServer) -> None:
        self._server = server
        self._head = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        if not self._server._admit(self):
            text = f"More than {MAX_CONNECTIONS} clients at once: try again.\n"
            self._send(_Answer(http.HTTPStatus.SERVICE_UNAVAILABLE, text.encode()))
        deadline_s = self._server._deadline_s
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self.drop)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if max(end, 0 if end >= 0 else len(self._head)) > MAX_HEAD_BYTES:
            text = f"A request has {MAX_HEAD_BYTES} bytes at most.\n"
            self._send(_Answer(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text.encode()))
        elif end >= 0:
            self._send(self._server._answer(bytes(self._head[: end + 4])))

    def connection_lost(self, error: Exception | None) -> None:
        self._server._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def drop(self) -> None:
        """End it at once, whatever is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self, answer: _Answer) -> None:
        """And close, once that has gone out."""
        assert self._transport is not None
        self._is_answered = True
        self._transport.write(answer.encoded())
        self._transport.close()
