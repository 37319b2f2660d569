"""Transcripts read back: what /save wrote comes back whole, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.cli import transcript
from interlace.cli.transcript import (
    Transcript,
    as_json,
    load_transcript,
    parse_transcript,
    save_transcript,
)
from interlace.engine.errors import ConfigError

PATH = Path("chat.json")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
TURNS = st.lists(st.tuples(TEXTS, TEXTS), max_size=3)


def messages(system: str | None, turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    found = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        found.append({"role": "user", "content": question})
        found.append({"role": "assistant", "content": answer})
    return found


@given(TEXTS, st.none() | TEXTS, TURNS)
def test_what_is_saved_comes_back(
    model: str, system: str | None, turns: list[tuple[str, str]]
) -> None:
    said = messages(system, turns)
    read = parse_transcript(PATH, as_json(model, said).encode())
    assert read == Transcript(PATH, model, tuple(said))


async def test_a_file_comes_back(tmp_path: Path) -> None:
    said = messages("Be kind.", [("Hi \U0001f600", "<|im_end|>\r\n\t")])
    path = await save_transcript(str(tmp_path / "c.json"), "m", said)
    assert (await load_transcript(str(path))).messages == tuple(said)
    cut = path.read_bytes()[:-9]
    path.write_bytes(cut)
    with pytest.raises(ConfigError, match=r"c\.json is damaged"):
        await load_transcript(str(path))
    with pytest.raises(ConfigError, match="Is a directory"):
        await load_transcript(str(tmp_path))


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Ho"}


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        "Hi",
        [USER],
        [ANSWER, USER],
        [USER, USER],
        [USER, ANSWER, {"role": "system", "content": "x"}],
        [USER, {"role": "tool", "content": "x"}],
        [USER, {"role": "assistant", "content": 5}],
        [USER, {"role": "assistant"}],
        [USER, ANSWER | {"more": "x"}],
        [USER, "Ho"],
        [USER, {"role": ["assistant"], "content": "x"}],
    ],
)
def test_messages_that_no_chat_leaves_behind_are_refused(said: Any) -> None:
    with pytest.raises(ConfigError, match="is damaged"):
        parse_transcript(PATH, json.dumps({"model": "m", "messages": said}).encode())


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"messages": []}', b'{"model": "m"}']
)
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="name another file"):
        parse_transcript(PATH, content)


def test_a_huge_file_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = as_json("m", [USER, ANSWER]).encode()
    monkeypatch.setattr(transcript, "MAX_BYTES", len(whole) - 1)
    with pytest.raises(ConfigError, match="is damaged"):
        parse_transcript(PATH, whole)
