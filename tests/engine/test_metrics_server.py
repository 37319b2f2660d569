"""The metrics' HTTP server: what it answers, what it refuses, and who cannot hold it up."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
from metrics_kit import PATIENCE_S, exchange, port_of, request, values_of
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from interlace.engine.errors import ConfigError
from interlace.engine.metrics_server import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MetricsServer,
    listen,
    url_of,
)


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise ValueError("no numbers today")


@asynccontextmanager
async def served(
    collector: Collector | None = None, deadline_s: float = PATIENCE_S
) -> AsyncIterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("scraped_things", "Things.", registry=registry).inc(3)
    sock = listen(0)
    server = await MetricsServer.open(collector or registry, sock, deadline_s=deadline_s)
    try:
        yield server
    finally:
        server.close()


async def test_a_scrape_gets_text_of_the_format_that_it_accepts() -> None:
    async with served() as server:
        plain = await exchange(server.url, request())
        accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        modern = await exchange(server.url, request("/metrics?x=1", "GET", accept))
    assert plain.status == modern.status == 200
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert plain.headers["Connection"] == "close"
    assert int(plain.headers["Content-Length"]) == len(plain.body)
    assert values_of(plain.body)["scraped_things_total"] == 3
    assert modern.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert modern.body.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (request("/"), 404, "Only /metrics"),
        (request("/metrics/"), 404, "Only /metrics"),
        (request("/metrics", "POST"), 405, "by GET"),
        (request("/metrics", "HEAD"), 405, "by GET"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 403, "Ask 127.0.0.1"),
        (b"nonsense\r\n\r\n", 400, "no HTTP request"),
        (b"\r\n\r\n", 400, "no HTTP request"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "no HTTP request"),
        (b"GET /metrics HTTP/9.9\r\n\r\n", 505, "no HTTP request"),
        (request("/metrics", "GET", *["X: y"] * 200), 431, "no HTTP request"),
        (request("/metrics", "GET", "X: " + "y" * MAX_HEAD_BYTES), 431, "bytes at most"),
        (b"y" * (MAX_HEAD_BYTES + 1), 431, "bytes at most"),
    ],
)
async def test_all_else_is_refused(sent: bytes, status: int, said: str) -> None:
    async with served() as server:
        reply = await exchange(server.url, sent)
        assert (reply.status, said in reply.body) == (status, True), reply
        assert (reply.headers.get("Allow") == "GET") == (status == 405)
        assert (await exchange(server.url, request())).status == 200


@pytest.mark.parametrize("host", ["localhost:80", "LOCALHOST", "127.0.0.1:9464", None])
async def test_it_is_asked_by_this_machines_own_names(host: str | None) -> None:
    header = "" if host is None else f"Host: {host}\r\n"
    async with served() as server:
        sent = f"GET /metrics HTTP/1.0\r\n{header}\r\n".encode()
        assert (await exchange(server.url, sent)).status == 200


async def test_a_request_may_come_in_pieces() -> None:
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
        for byte in request():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_what_comes_behind_a_request_is_not_read() -> None:
    async with served() as server:
        reply = await exchange(server.url, request() + request("/"))
        assert reply.status == 200
        assert reply.body.count("HTTP/1.1") == 0


async def test_metrics_that_cannot_be_read_are_an_answer_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(Broken()) as server:
        reply = await exchange(server.url, request())
    assert reply.status == 500
    assert reply.body == "The metrics cannot be read: ValueError: no numbers today\n"
    assert "metrics cannot be read" in caplog.text


async def test_who_sends_nothing_is_dropped_after_the_deadline() -> None:
    async with served(deadline_s=0.01) as server:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
            assert await reader.read() == b""
            writer.close()


class Huge(Collector):
    """More than the buffers of two sockets hold."""

    def collect(self) -> Iterator[Metric]:
        for number in range(100):
            yield Metric(f"m{number}", "x" * 200_000, "gauge")


async def test_who_does_not_read_is_dropped_too_and_others_are_served() -> None:
    async with served(Huge(), deadline_s=0.2) as server:
        loop = asyncio.get_running_loop()
        with closing(socket.socket()) as slow:
            slow.setblocking(False)  # noqa: FBT003 - the standard library's
            await loop.sock_connect(slow, ("127.0.0.1", port_of(server.url)))
            await loop.sock_sendall(slow, request())
            async with asyncio.timeout(PATIENCE_S):
                assert (await exchange(server.url, request("/"))).status == 404
                while server._connections:  # noqa: ASYNC110 - until the deadline
                    await asyncio.sleep(0.001)


async def test_so_many_at_once_and_no_more() -> None:
    async with served() as server:
        idle = [
            await asyncio.open_connection("127.0.0.1", port_of(server.url))
            for _ in range(MAX_CONNECTIONS)
        ]
        assert (await exchange(server.url, request())).status == 503
        idle.pop()[1].close()
        async with asyncio.timeout(PATIENCE_S):
            while (await exchange(server.url, request())).status == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for _, writer in idle:
            writer.close()


async def test_closing_drops_connections_and_frees_the_port() -> None:
    calls: list[None] = []
    sock = listen(0)
    server = await MetricsServer.open(
        CollectorRegistry(), sock, on_close=lambda: calls.append(None)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
    while not server._connections:  # noqa: ASYNC110 - until it is accepted
        await asyncio.sleep(0)
    server.close()
    server.close()
    assert len(calls) == 1
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    listen(port_of(server.url)).close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9464", 1.5])
def test_what_is_no_port_is_refused(port: object) -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535, or 0 for a free one"):
        listen(port)  # type: ignore[arg-type]


def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    with closing(listen(0)) as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
        port = port_of(url_of(taken))
        with pytest.raises(ConfigError, match=f"port {port} is in use.*or 0 for a free one"):
            listen(port)


@pytest.mark.parametrize("code", ["EACCES", "EPERM"])
def test_a_port_without_rights_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(ConfigError, match="may not serve metrics on port 80: give one from 1024"):
        listen(80)


def test_on_uvloop_too() -> None:
    """Whose transports are no asyncio.Transport."""

    async def main() -> list[int]:
        async with served(deadline_s=PATIENCE_S) as server:
            sent = (request(), request("/"), b"y" * (MAX_HEAD_BYTES + 1))
            codes = [(await exchange(server.url, one)).status for one in sent]
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
            while not server._connections:  # noqa: ASYNC110 - until it is accepted
                await asyncio.sleep(0.001)
            server.close()
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
            writer.close()
        listen(port_of(server.url)).close()
        return codes

    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == [200, 404, 431]
