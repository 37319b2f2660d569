"""Lines from any kind of file descriptor."""

from __future__ import annotations

import asyncio
import os

import pytest

from interlace.cli import lines
from interlace.cli.lines import LineReader
from interlace.engine.errors import PromptError


async def read_all(data: bytes, pieces: int = 1) -> list[str | None]:
    reading, writing = os.pipe()
    reader = LineReader(reading)
    found: list[str | None] = []

    async def write() -> None:
        size = -(-len(data) // pieces) or 1
        for start in range(0, len(data), size):
            await asyncio.to_thread(os.write, writing, data[start : start + size])
        await asyncio.to_thread(os.close, writing)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        while not found or found[-1] is not None:
            found.append(await reader.line())
    assert await reader.line() is None
    os.close(reading)
    return found[:-1]


@pytest.mark.parametrize("pieces", [1, 2, 5, 100])
async def test_lines_come_whole_however_they_arrive(pieces: int) -> None:
    data = "one\ntwo é\r\n\n 日本\x1b\nno end".encode()
    assert await read_all(data, pieces) == ["one", "two é", "", " 日本\x1b", "no end"]


async def test_bytes_that_are_not_text_are_replaced() -> None:
    assert await read_all(b"a\xff\n") == ["a\ufffd"]


async def test_nothing_to_read() -> None:
    assert await read_all(b"") == []
    assert await LineReader(None).line() is None


async def test_a_line_without_end_is_refused_and_the_next_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 4)
    reading, writing = os.pipe()
    await asyncio.to_thread(os.write, writing, b"x" * 50 + b"\nnext\n")
    os.close(writing)
    reader = LineReader(reading)
    with pytest.raises(PromptError, match="longer"):
        await reader.line()
    assert await reader.line() == "next"
    assert await reader.line() is None
    os.close(reading)


async def test_a_reader_is_woken_while_other_work_goes_on() -> None:
    reading, writing = os.pipe()
    line = LineReader(reading).line()
    async with asyncio.TaskGroup() as group:
        pending = group.create_task(line)
        await asyncio.sleep(0.01)
        assert not pending.done()
        await asyncio.to_thread(os.write, writing, b"late\n")
    assert pending.result() == "late"
    os.close(reading)
    os.close(writing)
