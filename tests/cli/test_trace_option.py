"""`--trace FILE` of chat and benchmarks, and what `interlace trace` shows of such files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from bench_kit import tiny_dummy
from command_line import run_main
from fake_engine import FakeEngine, Script
from tiny_model import tiny_model
from trace_kit import problems_of, read, sample_trace

from interlace.bench import session
from interlace.bench.engine_trace.parse import read_file
from interlace.bench.engine_trace.text import lines, step_view
from interlace.bench.traces import Traces
from interlace.cli import chat
from interlace.cli.chat_engine import ChatEngine
from interlace.engine.config import EngineConfig
from interlace.engine.ports import Progress
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.trace_file import write_trace
from interlace.front_door import AsyncEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return functools.partial(run_main, monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    write_trace(path, sample_trace())
    return path


# -------------------------------------------------------------------- --trace


COMMANDS = (
    ("chat", "-p", "Hi"),
    ("bench", "decode"),
    ("bench", "prefill"),
    ("bench", "hit"),
    ("bench", "kv"),
    ("bench", "overlap"),
    ("bench", "store"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(
    run: Run, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(chat, "start_engine", refuse)
    monkeypatch.setattr(session, "prepare", refuse)
    code, out, err = run(*command, "--trace", str(tmp_path / "none" / "t.json"))
    assert (code, out) == (1, "")
    assert err.startswith("interlace: the trace ")
    assert "cannot be written: No such file or directory" in err
    assert err.count("\n") == 1


def test_chat_gives_the_file_to_its_engine_and_says_where_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Path] = []

    @contextlib.asynccontextmanager
    async def start(
        config: EngineConfig, progress: Progress, *, trace: Path
    ) -> AsyncIterator[ChatEngine]:
        given.append(trace)
        yield FakeEngine(Script(["Yes."]))

    monkeypatch.setattr(chat, "start_engine", start)
    path = tmp_path / "t.json"
    code, out, err = run("chat", "-p", "Hi", "--trace", str(path))
    assert (code, out, given) == (0, "Yes.\n", [path])
    assert f"trace: {path} (interlace trace {path})\n" in err


async def test_the_real_engine_of_a_chat_is_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model()

    @contextlib.asynccontextmanager
    async def loaded(config: EngineConfig, **_: Any) -> AsyncIterator[AsyncEngine]:
        async with AsyncEngine.from_loaded(config, model) as engine:
            yield engine

    monkeypatch.setattr(AsyncEngine, "from_config", loaded)
    config = EngineConfig(device="cpu", num_gpu_blocks_override=9, skip_tokenizer_init=True)
    progress: Any = None
    path = tmp_path / "t.json"
    async with chat.start_engine(config, progress, trace=path) as engine:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
        assert [delta async for delta in stream]
    trace = await read(path)
    assert problems_of(trace) == []
    assert len(trace.steps) == 4
    assert all(step.timing is not None and step.timing.layers for step in trace.steps)


def test_a_benchmark_is_traced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    args = ["--prompt-tokens", "20", "--output-tokens", "4", "--repeats", "1", "--device", "cpu"]
    model = tiny_dummy(tmp_path)
    code, _, err = run(
        "bench", "decode", "--model", model, "--batch-sizes", "2", *args, "--trace", str(path)
    )
    assert code == 0
    assert f"trace: {path}" in err
    trace = read_file(path)
    assert trace is not None
    assert problems_of(trace) == []
    assert trace.steps


async def test_each_engine_of_a_benchmark_has_a_file(tmp_path: Path) -> None:
    class Engine:
        @contextlib.asynccontextmanager
        async def trace(self, path: Any) -> AsyncIterator[None]:
            opened.append(Path(path).name)
            yield

    opened: list[str] = []
    traces = Traces(tmp_path / "t.json")
    for _ in range(3):
        async with traces.of(Engine()):
            pass
    assert opened == ["t.json", "t-2.json", "t-3.json"]
    assert [path.name for path in traces.written] == opened
    async with Traces().of(Engine()):
        pass
    assert len(opened) == 3


# -------------------------------------------------------------------- interlace trace


def test_the_last_steps_are_shown(run: Run, file: Path) -> None:
    code, out, err = run("trace", str(file))
    assert (code, err) == (0, "")
    assert out.splitlines() == lines(sample_trace())
    code, out, _ = run("trace", str(file), "--steps", "1")
    assert out.splitlines() == lines(sample_trace(), 1)


def test_one_step_is_shown(run: Run, file: Path) -> None:
    code, out, _ = run("trace", str(file), "--step", "4")
    assert (code, out.splitlines()) == (0, step_view(sample_trace(), 4))
    code, _, err = run("trace", str(file), "--step", "3")
    assert code == 1
    assert "no step 3 with times of the device; it has 2 to 5" in err


def test_figures_as_json(run: Run, file: Path) -> None:
    code, out, _ = run("trace", str(file), "--json")
    assert code == 0
    told = json.loads(out)
    assert [step["step_id"] for step in told["steps"]] == [2, 4, 5]
    assert told["steps"][1]["longest_wait"]["layer"] == 2
    assert told["totals"]["load"]["num_bytes"] == 24_000_000


def test_pictures(run: Run, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    code, _, _ = run("trace", str(file), "--png", str(png), "--svg", str(svg), "--step", "4")
    assert code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in svg.read_bytes()


def test_a_damaged_file_is_refused_in_one_line(run: Run, file: Path) -> None:
    file.write_text(file.read_text()[:-30])
    code, out, err = run("trace", str(file))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "is a damaged trace of an engine" in err


def test_steps_are_of_engines_only(run: Run, tmp_path: Path) -> None:
    from step_trace_kit import a_trace

    from interlace.bench.step_trace.file import to_json

    path = tmp_path / "step.json"
    path.write_text(to_json(a_trace(8)))
    code, _, err = run("trace", str(path), "--step", "3")
    assert code == 2
    assert "--step and --json are for files" in " ".join(err.split())


def test_a_name_that_is_no_text_is_shown(run: Run, tmp_path: Path) -> None:
    trace = dataclasses.replace(
        sample_trace(), facts=dataclasses.replace(sample_trace().facts, model="/data/\udcff")
    )
    write_trace(tmp_path / "t", trace)
    code, shown, _ = run("trace", str(tmp_path / "t"))
    assert code == 0
    assert "/data/<U+DCFF>" in shown


def test_json_of_one_step_is_of_that_step(run: Run, tmp_path: Path) -> None:
    write_trace(tmp_path / "t", sample_trace())
    code, shown, _ = run("trace", str(tmp_path / "t"), "--json", "--step", "4", "--steps", "1")
    assert code == 0
    assert [step["step_id"] for step in json.loads(shown)["steps"]] == [4]
    code, shown, remark = run("trace", str(tmp_path / "t"), "--json", "--step", "99")
    assert (code, shown) == (1, "")
    assert "no step 99" in remark
