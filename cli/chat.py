"""`interlace chat`: its options, and how they become an engine and a conversation.

Imports torch only when an engine is started, so that `--help` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.chat_commands import resume
from interlace.cli.chat_engine import ChatEngine
from interlace.cli.chat_modes import converse, one_shot
from interlace.cli.chat_session import ChatSession
from interlace.cli.kv_options import KVConfig, KVConnector, KVDir, kv_transfer_config
from interlace.cli.lines import LineReader, LineSource, TypedLines, terminal_restored
from interlace.cli.live.beside import pane_beside
from interlace.cli.log_lines import log_between_answers
from interlace.cli.metrics_option import MetricsPort, metrics_socket
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run
from interlace.cli.screen import PROMPT, Screen, is_terminal
from interlace.cli.trace_option import TraceFile, tell_of_traces, trace_target
from interlace.cli.transcript import load_transcript
from interlace.engine.config import EngineConfig
from interlace.engine.errors import PromptError
from interlace.engine.live_feed import watchable
from interlace.engine.ports import Progress
from interlace.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from interlace.front_door import AsyncEngine

OpenEngine = Callable[[EngineConfig, Progress], AbstractAsyncContextManager[ChatEngine]]

DEFAULT_MAX_TOKENS = 1024
"""Of one answer: a small model at temperature 0 may repeat itself until the context is full."""

_MODEL, _SAMPLING = "Model", "How the answer is chosen"


def chat(
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p", "--prompt", metavar="TEXT", help="Ask this one question, print the answer, leave."
        ),
    ] = None,
    prompt_env: Annotated[str | None, typer.Option(hidden=True, metavar="NAME")] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A system message: how the model should behave."),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each answer as one JSON object: text, token_ids, finish_reason, usage.",
        ),
    ] = False,
    transcript: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="FILE",
            help="Go on with a conversation that /save has written as JSON.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a GGUF file, or a folder in Hugging Face layout.",
            rich_help_panel=_MODEL,
        ),
    ] = EngineConfig.model,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder with a tokenizer.json to use instead of the model's own tokenizer.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to run: auto, cpu or cuda.", rich_help_panel=_MODEL)
    ] = EngineConfig.device,
    dtype: Annotated[
        str,
        typer.Option(
            help="Numbers to calculate with: auto, float32, bfloat16, float16 or float64.",
            rich_help_panel=_MODEL,
        ),
    ] = EngineConfig.dtype,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of conversation and answer together; the model's own limit if unset.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    kv_connector: KVConnector = None,
    kv_transfer_config_json: KVConfig = None,
    kv_dir: KVDir = None,
    metrics: MetricsPort = None,
    temperature: Annotated[
        float,
        typer.Option(
            help="0 takes the likeliest token each time; higher is more varied.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            help="Draw among this many of the likeliest tokens; 0 means all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.top_k,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw among the likeliest tokens that together have this probability.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.top_p,
    min_p: Annotated[
        float,
        typer.Option(
            help="Draw among tokens at least this likely, as a fraction of the likeliest one.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.min_p,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same draws every time.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Above 1 makes tokens of the conversation less likely to come again.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.repetition_penalty,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Taken off tokens that the answer already has, from -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.presence_penalty,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Taken off each time a token comes again in the answer, from -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = SamplingParams.frequency_penalty,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Most tokens of one answer; 0 means as many as fit the context.",
            rich_help_panel=_SAMPLING,
        ),
    ] = DEFAULT_MAX_TOKENS,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End the answer before this text. May be given several times.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Watch the engine: in a pane beside under tmux, else a remark says how.",
        ),
    ] = False,
    trace: TraceFile = None,
) -> None:
    """Talk with a model.

    At a terminal, type a line and get an answer; /help lists the commands. Without a terminal,
    each line of the input is one turn of a conversation and the output is the answers alone.

    The first run downloads the default model (93 MB). At temperature 0, the default, the same
    question always gets the same answer.
    """
    question = _question(prompt, prompt_env)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens or None,
        stop=stop or None,
    )
    config = EngineConfig(
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_transfer_config=kv_transfer_config(kv_connector, kv_transfer_config_json, kv_dir),
    )
    if transcript is not None and system is not None:
        raise typer.BadParameter(
            "--continue brings the system message of its conversation; leave --system out."
        )
    if json and question is None and is_terminal(sys.stdin):
        raise typer.BadParameter("--json needs -p TEXT, or questions on standard input.")
    how = Conversation(question, _text(system), transcript, as_json=json, live=live)
    target = trace_target(trace)
    with metrics_socket(metrics) as sock, terminal_restored():
        start: Callable[..., AbstractAsyncContextManager[ChatEngine]] = start_engine
        if sock is not None:
            start = functools.partial(start, metrics=sock)
        if target is not None:
            start = functools.partial(start, trace=target)
        code = run(lambda: talk(start, config, params, how))
    tell_of_traces([] if target is None else [target])
    raise typer.Exit(code)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What is talked about, and how it is shown."""

    question: str | None
    """The only one; None takes the lines of standard input."""
    system: str | None
    transcript: str | None
    """File of an earlier conversation to go on with."""
    as_json: bool
    live: bool = False
    """Whether the engine is to be watched beside it."""


async def talk(
    open_engine: OpenEngine, config: EngineConfig, params: SamplingParams, how: Conversation
) -> int:
    """Start an engine, and answer one question or line after line.

    Returns the exit code. Raises: all of Interlace's errors. Cancellation: closes the engine.
    """
    screen = Screen.of_process()
    progress = progress_for()
    earlier = None if how.transcript is None else await load_transcript(how.transcript)
    if params.greedy and _narrows_the_draw(params):
        await screen.note(
            "At temperature 0 nothing is drawn, so --top-k, --top-p, --min-p and --seed have no "
            "effect; give a --temperature above 0, such as 0.7."
        )
    async with contextlib.AsyncExitStack() as stack:
        loading = progress.task(f"Loading {config.model}", None)
        with loading if is_terminal(sys.stderr) else contextlib.nullcontext():
            engine = await stack.enter_async_context(open_engine(config, progress))
        # Behind the loading, whose bars take care of lines that come between.
        await stack.enter_async_context(log_between_answers(screen))
        if how.live:
            await screen.note(await asyncio.to_thread(pane_beside))
        session = ChatSession(engine, params, system=how.system)
        if earlier is not None:
            await screen.note(resume(session, earlier))
        if how.question is not None:
            return await one_shot(session, how.question, screen, as_json=how.as_json)
        interactive = is_terminal(sys.stdin)
        lines = _lines(screen, interactive)
        return await converse(session, lines, screen, interactive=interactive, as_json=how.as_json)


def _lines(screen: Screen, interactive: bool) -> LineSource:
    if not interactive:
        return LineReader.of_stdin()
    if is_terminal(sys.stdout):
        return TypedLines(PROMPT, screen.asking)
    return LineReader.of_stdin(ask=screen.prompt)


@contextlib.asynccontextmanager
async def start_engine(
    config: EngineConfig,
    progress: Progress,
    *,
    metrics: socket.socket | None = None,
    trace: Path | None = None,
) -> AsyncIterator[ChatEngine]:
    """The real engine, which serves its metrics on a socket of `metrics_socket`, and writes a trace
    at its end. Its modules, torch among them, are imported in a thread."""

    def front_door() -> type[AsyncEngine]:
        from interlace import AsyncEngine

        return AsyncEngine

    engine_class = await asyncio.to_thread(front_door)
    async with (
        engine_class.from_config(config, progress=progress) as engine,
        watchable(engine),
    ):
        if metrics is not None:
            await engine.serve_metrics(metrics)
        tracing = contextlib.nullcontext() if trace is None else engine.trace(trace)
        with frozen_heap():
            async with tracing:
                yield engine


def _narrows_the_draw(params: SamplingParams) -> bool:
    limits = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return limits or params.seed is not None


def _question(prompt: str | None, prompt_env: str | None) -> str | None:
    """The one question to answer, or None. `prompt_env` names the variable that `make chat` sets.

    Raises: `PromptError` if the question is empty.
    """
    if prompt_env is not None:
        if prompt is not None or prompt_env not in os.environ:
            raise typer.BadParameter("--prompt-env names a variable that is set, in place of -p.")
        prompt = os.environ[prompt_env]
    if prompt is not None and not prompt.strip():
        raise PromptError("The prompt is empty; write something for the model to answer.")
    return _text(prompt)


def _text(argument: str | None) -> str | None:
    """An argument as proper text: bytes that are not UTF-8 become replacement characters."""
    if argument is None:
        return None
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
