"""`--metrics PORT`: served while a command's engine is open; what cannot be is refused before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Script
from metrics_kit import scrape
from tiny_model import tiny_model

from interlace.bench import session
from interlace.cli import app, chat
from interlace.cli.chat_engine import ChatEngine
from interlace.engine.config import EngineConfig
from interlace.engine.metrics_server import listen
from interlace.engine.ports import Progress
from interlace.engine.sampling_params import SamplingParams
from interlace.front_door import AsyncEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["interlace", *args])
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(chat, "start_engine", refuse)
    monkeypatch.setattr(session, "prepare", refuse)


COMMANDS = (("chat", "-p", "Hi"), ("bench", "decode"), ("bench", "prefill"), ("bench", "hit"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("nothing_is_loaded")
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


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_port_serves_one_engine(run: Run) -> None:
    code, _, err = run("bench", "decode", "--metrics", "0", "--max-inflight-steps", "1,2")
    assert code == 2
    assert "a port serves one engine" in " ".join(err.split())


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


def test_a_benchmark_is_scraped_while_it_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tiny model, and an experiment that scrapes itself."""
    from interlace.bench import experiments

    seen: list[float] = []
    wholes = experiments.decode
    ports: list[int] = []
    serve = AsyncEngine.serve_metrics

    async def noted(engine: AsyncEngine, sock: Any) -> Any:
        ports.append(sock.getsockname()[1])
        return await serve(engine, sock)

    async def scraping(*args: Any) -> Any:
        outcome = await wholes(*args)
        values = await scrape(f"http://127.0.0.1:{ports[0]}/metrics")
        seen.append(values["interlace_generated_tokens_total"])
        return outcome

    monkeypatch.setattr(AsyncEngine, "serve_metrics", noted)
    monkeypatch.setattr(experiments, "decode", scraping)
    monkeypatch.setattr(session, "_load", lambda *_: tiny_model())
    target = tmp_path / "figures.json"
    work = ("--batch-sizes", "2", "--prompt-tokens", "8", "--output-tokens", "3", "--repeats", "1")
    code, _, err = run(
        *("bench", "decode", "--device", "cpu", "--metrics", "0", "--json", str(target), *work)
    )
    assert code == 0, err
    assert f"metrics: http://127.0.0.1:{ports[0]}/metrics" in err
    assert json.loads(target.read_text())["rows"]
    (generated,) = seen
    assert generated >= 2 * 3
