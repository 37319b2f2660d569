"""The options of `interlace chat`, its errors and exit codes, in this process."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from command_line import run_main
from fake_engine import FakeEngine, Script

from interlace.cli import chat
from interlace.cli.chat_engine import ChatEngine
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.engine.sampling_params import SamplingParams

Run = Callable[..., tuple[int, str, str]]


class Started(list[EngineConfig]):
    """The configurations that engines were started with, and what each start gives."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(Script(["Yes."]))
        self.failure: Exception | None = None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()

    @contextlib.asynccontextmanager
    async def start(config: EngineConfig, progress: Progress) -> AsyncIterator[ChatEngine]:
        started.append(config)
        if started.failure is not None:
            raise started.failure
        yield started.engine

    monkeypatch.setattr(chat, "start_engine", start)
    return started


@pytest.fixture
def run(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs `interlace` with arguments; gives its exit code, output and errors."""

    return functools.partial(run_main, monkeypatch, capsys)


@pytest.mark.parametrize("how", [("-p", ""), ("-p", "  "), ("--prompt-env", "INTERLACE_PROMPT")])
def test_an_empty_prompt_is_one_clear_line(
    run: Run, started: Started, how: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_PROMPT", "")
    code, out, err = run("chat", *how)
    assert (code, out) == (1, "")
    assert err.startswith("interlace: The prompt is empty")
    assert err.count("\n") == 1
    assert not started, "nothing is loaded for it"


def test_a_prompt_from_the_environment_is_read_when_told(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_PROMPT", "-p `x` $y")
    code, out, _ = run("chat", "--prompt-env", "INTERLACE_PROMPT")
    assert (code, out) == (0, "Yes.\n")
    assert started.engine.prompts == [[{"role": "user", "content": "-p `x` $y"}]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--temperature", "-1"), "temperature must be a number from 0"),
        (("--device", "tpu"), "device must be one of"),
        (("--stop", ""), "each stop must be a string"),
    ],
)
def test_a_bad_value_is_one_clear_line(
    run: Run, started: Started, args: tuple[str, ...], said: str
) -> None:
    code, _, err = run("chat", "-p", "Hi", *args)
    assert code == 1
    assert said in err
    assert err.count("\n") == 1
    assert not started


def test_an_error_while_starting_is_one_clear_line(run: Run, started: Started) -> None:
    started.failure = ModelError("No model 'x'.\nGive a \x1b[2J file.")
    code, out, err = run("chat", "-p", "Hi", "--model", "x")
    assert (code, out) == (1, "")
    assert err == "interlace: No model 'x'. Give a ^[[2J file.\n"


@pytest.mark.parametrize(
    "args",
    [
        ("chat", "--no-such-option"),
        ("chat", "--top-k", "many"),
        ("chat", "--prompt-env", "INTERLACE_NOT_SET"),
        ("chat", "-p", "Hi", "--kv-transfer-config", "{"),
        ("chat", "-p", "Hi", "--kv-transfer-config", '{"kv_connector": "C", "kv_rol": "kv_both"}'),
        ("chat", "-p", "Hi", "--kv-connector", "Some", "--kv-dir", "d"),
        ("chat", "-p", "Hi", "--continue", "f", "--system", "Be kind."),
        ("no-such-command",),
    ],
)
def test_wrong_usage_exits_with_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_options_reach_the_engine(run: Run, started: Started) -> None:
    flags = (
        "--model=m --tokenizer=t --dtype=float64 --device=cpu --max-model-len=50 --temperature=0.5 "
        "--top-k=3 --top-p=0.9 --min-p=0.1 --seed=4 --repetition-penalty=1.1 --presence-penalty=1 "
        "--frequency-penalty=-1 --max-tokens=7 --stop=a --stop=b"
    )
    code, out, _ = run("chat", "-p", "Hi", *flags.split())
    assert (code, out) == (0, "Yes.\n")
    assert started == [
        EngineConfig(model="m", tokenizer="t", dtype="float64", device="cpu", max_model_len=50)
    ]
    assert started.engine.params == [
        SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=4,
            repetition_penalty=1.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            max_tokens=7,
            stop=["a", "b"],
        )
    ]


def test_a_connector_reaches_the_engine(run: Run, started: Started) -> None:
    run("chat", "-p", "Hi", "--kv-dir", "some folder")
    kv = started[0].kv_transfer_config
    assert kv is not None
    assert (kv.kv_connector, kv.kv_role) == ("PipelineConnector", "kv_both")
    assert kv.kv_connector_extra_config["path"] == "some folder"
    run("chat", "-p", "Hi")
    assert started[1].kv_transfer_config is None


def test_an_earlier_conversation_goes_on(run: Run, started: Started, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"model": "other", "messages": messages}))
    code, out, err = run("chat", "-p", "And?", "--continue", str(file))
    assert (code, out) == (0, "Yes.\n")
    assert started.engine.prompts == [[*messages, {"role": "user", "content": "And?"}]]
    assert f"Going on after 3 messages of {file}" in err
    assert "exchanged with other; now fake answers" in err


def test_a_damaged_transcript_is_one_clear_line(run: Run, started: Started, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text("{")
    for file in ("chat.json", "none.json"):
        code, out, err = run("chat", "-p", "Hi", "--continue", str(tmp_path / file))
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert file in err
    assert not started


@pytest.mark.parametrize(("flags", "max_tokens"), [((), 1024), (("--max-tokens=0",), None)])
def test_by_default_the_likeliest_tokens_are_taken_and_their_number_is_bounded(
    run: Run, started: Started, flags: tuple[str, ...], max_tokens: int | None
) -> None:
    run("chat", "-p", "Hi", *flags)
    assert started.engine.params == [SamplingParams(temperature=0.0, max_tokens=max_tokens)]


def test_sampling_options_without_effect_are_noted(run: Run) -> None:
    assert "no effect" in run("chat", "-p", "Hi", "--top-p", "0.5")[2]
    assert "no effect" in run("chat", "-p", "Hi", "--seed", "0")[2]
    assert "no effect" not in run("chat", "-p", "Hi", "--seed", "0", "--temperature", "0.7")[2]


def test_bytes_that_are_not_text_are_replaced(run: Run, started: Started) -> None:
    run("chat", "-p", "a\udcff")
    assert started.engine.prompts[-1] == [{"role": "user", "content": "a\ufffd"}]


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, "interlace 0.1.0\n", "")
    code, out, _ = run("chat", "--help")
    assert code == 0
    assert "--prompt-env" not in out
    words = " ".join(out.replace("\u2502", " ").split())
    assert '"kv_connector_extra_config": {"store": "file", "path": "DIR", "host_bytes"' in words
    for option in ("--system", "--continue", "--kv-connector", "--kv-transfer-config", "--kv-dir"):
        assert option in out
    for option in ("--json", "--model", "--device", "--dtype", "--max-tokens"):
        assert option in out
