"""`--metrics PORT`: served while a command's engine is open; what cannot be is refused before, and
so is `--live`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bench_kit import tiny_dummy
from command_line import run_main
from engine_kit import greedy, open_engine
from fake_engine import FakeEngine, Script
from metrics_kit import scrape
from tiny_model import tiny_model

from interlace.bench import session
from interlace.bench.grid import session as grid_session
from interlace.bench.shown import SharedMetrics
from interlace.cli import chat
from interlace.cli.chat_engine import ChatEngine
from interlace.engine.config import EngineConfig
from interlace.engine.metrics_server import listen, url_of
from interlace.engine.ports import Progress
from interlace.engine.sampling_params import SamplingParams
from interlace.front_door import AsyncEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return functools.partial(run_main, monkeypatch, capsys)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(chat, "start_engine", refuse)
    monkeypatch.setattr(session, "prepare", refuse)
    monkeypatch.setattr(grid_session, "prepare_grid", refuse)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a command writes goes here."""
    monkeypatch.chdir(tmp_path)


COMMANDS = (
    ("chat", "-p", "Hi"),
    *(("bench", name) for name in ("decode", "prefill", "hit", "overlap", "store", "kv")),
    ("bench", "timeline", "--trace", "step.json"),
    ("bench", "run", str(Path(__file__).parents[2] / "bench/runs/readme-prefill.toml")),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("nothing_is_loaded", "elsewhere")
def test_a_port_that_cannot_be_had_is_one_line_before_anything_is_loaded(
    run: Run, command: tuple[str, ...]
) -> None:
    with closing(listen(0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = run(*command, "--metrics", port)
    assert (code, out) == (1, "")
    assert err == (
        f"interlace: port {port} is in use on 127.0.0.1: give the metrics another one, or 0 for a"
        " free one.\n"
    )
    code, _, err = run(*command, "--metrics", "70000")
    assert (code, err.count("\n")) == (1, 1)
    assert "from 1 to 65535" in err


@pytest.mark.parametrize("command", COMMANDS[1:], ids=" ".join)
@pytest.mark.usefixtures("nothing_is_loaded", "elsewhere")
def test_no_terminal_to_watch_on_is_one_line_before_anything_is_loaded(
    run: Run, command: tuple[str, ...]
) -> None:
    code, out, err = run(*command, "--live")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "--live needs a terminal to draw on: leave it out" in err


def test_chat_says_where_and_gives_the_port_to_its_engine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    @contextlib.asynccontextmanager
    async def start(
        config: EngineConfig, progress: Progress, *, metrics: Any
    ) -> AsyncIterator[ChatEngine]:
        given.append(metrics.getsockname()[1])
        yield FakeEngine(Script(["Yes."]))

    monkeypatch.setattr(chat, "start_engine", start)
    code, out, err = run("chat", "-p", "Hi", "--metrics", "0")
    assert (code, out) == (0, "Yes.\n")
    (port,) = given
    assert f"metrics: http://127.0.0.1:{port}/metrics\n" in err
    listen(port).close()


async def test_the_real_engine_of_a_chat_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    @contextlib.asynccontextmanager
    async def loaded(config: EngineConfig, **_: Any) -> AsyncIterator[AsyncEngine]:
        async with AsyncEngine.from_loaded(config, model) as engine:
            yield engine

    monkeypatch.setattr(AsyncEngine, "from_config", loaded)
    sock = listen(0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/metrics"
    config = EngineConfig(device="cpu", num_gpu_blocks_override=9, skip_tokenizer_init=True)
    progress: Any = None
    async with chat.start_engine(config, progress, metrics=sock) as engine:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
        async with asyncio.timeout(20):
            deltas = [delta async for delta in stream]
        values = await scrape(url)
        assert deltas[-1].usage is not None
        assert values["interlace_generated_tokens_total"] == 4
        assert values["interlace_prompt_tokens_total"] == 3
        assert values["interlace_time_to_first_token_seconds_count"] == 1
    with pytest.raises(OSError):
        await scrape(url)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Where benchmarks have served."""
    seen: list[socket.socket] = []
    begin = SharedMetrics.__init__

    def noted(self: SharedMetrics, sock: socket.socket) -> None:
        seen.append(sock)
        begin(self, sock)

    monkeypatch.setattr(SharedMetrics, "__init__", noted)
    return seen


def test_a_benchmark_is_scraped_while_it_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, sockets: list[socket.socket], tmp_path: Path
) -> None:
    """A tiny model, two engines, and an experiment that scrapes itself."""
    from interlace.bench import experiments

    seen: list[float] = []
    wholes = experiments.decode

    async def scraping(*args: Any) -> Any:
        outcome = await wholes(*args)
        values = await scrape(url_of(sockets[0]))
        name = "interlace_generated_tokens_total{{arm=interlace, {} in flight}}"
        seen.extend(values[name.format(depth)] for depth in (1, 2))
        return outcome

    monkeypatch.setattr(experiments, "decode", scraping)
    monkeypatch.setattr(session, "_load", lambda *_: tiny_model())
    target = tmp_path / "figures.json"
    work = ("--batch-sizes", "2", "--prompt-tokens", "8", "--output-tokens", "3", "--repeats", "1")
    code, _, err = run(
        *("bench", "decode", "--device", "cpu", "--metrics", "0", "--json", str(target), *work),
        *("--max-inflight-steps", "1,2"),
    )
    assert code == 0, err
    assert "metrics: http://127.0.0.1:" in err
    assert json.loads(target.read_text())["rows"]
    assert min(seen) >= 2 * 3


def test_every_command_that_runs_engines_serves_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each engine of a command is served, and by its own name."""
    names: list[str] = []
    serving = SharedMetrics.serving

    def noted(self: SharedMetrics, engine: Any, name: str) -> Any:
        names.append(name)
        return serving(self, engine, name)

    monkeypatch.setattr(SharedMetrics, "serving", noted)
    model = tiny_dummy(tmp_path)
    small = ("--model", model, "--prompt-tokens", "64", "--repeats", "1", "--metrics", "0")
    code, _, err = run("bench", "timeline", *small, "--new", "8", "--trace", str(tmp_path / "a"))
    assert code == 0, err
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'repeats = 1\n[grid]\nmodel = "{model}"\ndevice = "cpu"\nprefix = 32\n'
        'connector = ["none", "PipelineConnector"]\nload_mode = ["cached", "bulk"]\n'
    )
    code, _, err = run("bench", "run", str(grid), "--metrics", "0")
    assert code == 0, err
    assert names == ["timeline", "none", "PipelineConnector, memory, group_size 2"]
    code, _, err = run("bench", "overlap", *small, "--new", "16", "--part", "first-token")
    assert code == 0, err
    assert names[3:] == ["loads and saves"]


async def test_engines_come_and_go_behind_one_port() -> None:
    with contextlib.closing(listen(0)) as sock:
        shared, url = SharedMetrics(sock), url_of(sock)
        name = "interlace_generated_tokens_total{{arm={}}}"
        async with open_engine(is_open=True) as one, open_engine(is_open=True) as other:
            await one.engine.complete([1, 2, 3], greedy(3))
            async with shared.serving(one.engine, "a"):
                async with shared.serving(other.engine, "a"):
                    values = await scrape(url)
                    assert (values[name.format("a")], values[name.format("a (2)")]) == (3, 0)
                    assert values["interlace_step_seconds_bucket{arm=a (2)}{le=+Inf}"] == 0
                assert name.format("a (2)") not in await scrape(url)
            async with asyncio.TaskGroup() as group:
                early = group.create_task(scrape(url))  # who asks while there is none
                async with shared.serving(other.engine, "b"):
                    assert (await early)[name.format("b")] == 0
