"""The options of `interlace chat`, its errors and exit codes, in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from fake_engine import FakeEngine, Script

from interlace.cli import app, chat
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

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["interlace", *args])
        with pytest.raises(SystemExit) as ended:
            app.main()
        code = ended.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


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
        (("--device", "tpu"), "device 'tpu' is not supported"),
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
        ("no-such-command",),
    ],
)
def test_wrong_usage_exits_with_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err


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
    for option in ("--system", "--json", "--model", "--device", "--dtype", "--max-tokens"):
        assert option in out
