"""Metrics read as Prometheus reads them, and scraped over plain sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import openmetrics
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition, parser  # noqa: F401 - not on the loop
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from interlace.engine import metrics_recording, metrics_server  # noqa: F401 - not on the loop
from interlace.engine.engine_metrics import EngineCollector  # noqa: F401 - not on the loop

Values = Mapping[str, float]
PATIENCE_S = 20


def values_of(text: str) -> Values:
    """`name{label=value}` -> value, of every sample; the text has to parse, with each name once."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), names
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name
        + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): (
            sample.value
        )
        for sample in samples
    }


def read(registry: Collector) -> Values:
    """What a scrape would give now, in both formats. On the loop."""
    modern: Any = openmetrics
    text = modern.exposition.generate_latest(registry).decode()
    list(modern.parser.text_string_to_metric_families(text))
    return values_of(generate_latest(registry).decode())


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str


def port_of(url: str) -> int:
    return int(url.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))


def request(target: str = "/metrics", method: str = "GET", *headers: str) -> bytes:
    lines = (f"{method} {target} HTTP/1.1", "Host: localhost", *headers, "", "")
    return "\r\n".join(lines).encode()


async def exchange(url: str, sent: bytes) -> Reply:
    """Send this, and read the whole answer."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        try:
            writer.write(sent)
            answer = await reader.read()
        finally:
            writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Reply(int(first.split()[1]), headers, body)


async def scrape(url: str) -> Values:
    """What Prometheus gets."""
    reply = await exchange(url, request())
    assert reply.status == 200
    return values_of(reply.body)
