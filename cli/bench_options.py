"""The options that several benchmarks share, and the `Settings` that they come to.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

if TYPE_CHECKING:
    from interlace.bench.settings import Settings
    from interlace.engine.config import KVTransferConfig

MAX_BATCH_SIZE = 256
MAX_TOKENS = 1 << 20
_ENGINE = "Engine"

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model", help="A model's name, GGUF file or folder, as in chat; or dummy:llama-3.1-8b."
    ),
]
BatchSizes: TypeAlias = Annotated[
    str, typer.Option("--batch-sizes", "--batch", help="Requests at once, with commas: 1,8,32.")
]
PromptTokens: TypeAlias = Annotated[
    int, typer.Option("--prompt-tokens", min=2, help="Tokens of a prompt.")
]
Contexts: TypeAlias = Annotated[
    str,
    typer.Option("--prompt-tokens", "--context", help="Tokens of a prompt, with commas: 200,2000."),
]
New: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--new",
        help="New tokens behind --prompt-tokens cached ones, with commas: 16,128,688,1984. "
        "Default: the whole prompt is cached.",
    ),
]
OutputTokens: TypeAlias = Annotated[
    int, typer.Option("--output-tokens", min=2, help="Tokens to generate for each request.")
]
Repeats: TypeAlias = Annotated[
    int,
    typer.Option("--repeats", min=1, help="Measured rounds; one more before them warms up."),
]
Against: TypeAlias = Annotated[
    Literal["transformers"] | None,
    typer.Option("--vs", help="Run transformers on the same weights in turns, and print ratios."),
]
Device: TypeAlias = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(
        "--device", help="auto is a GPU that works, else the CPU.", rich_help_panel=_ENGINE
    ),
]
Dtype: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Of weights and KV; auto is float32 on a CPU, bfloat16 on a GPU.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        help="Most tokens of a request. Default: the model's own limit; on a GPU 12,288, or more "
        "if the work needs more.",
        rich_help_panel=_ENGINE,
    ),
]
MaxBatchedTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        min=1,
        help="Token budget of a step. Default: the engine's, 2,048 on a CPU, 8,192 on a GPU.",
        rich_help_panel=_ENGINE,
    ),
]
GraphModeName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cudagraph-mode",
        metavar="MODE",
        help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. Default: the last one "
        "on a GPU.",
        rich_help_panel=_ENGINE,
    ),
]
InflightSteps: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--max-inflight-steps",
        help="Steps in flight, with commas: 1,2 measures an engine of each. Default: the engine's.",
        rich_help_panel=_ENGINE,
    ),
]
JsonTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all figures as JSON. With - they go to standard output, and the table to "
        "standard error.",
    ),
]


def parse_counts(option: str, text: str, most: int, least: int = 1) -> tuple[int, ...]:
    """Different whole numbers from `least` to `most`, in the order given, as in 1,8.

    Raises: `typer.BadParameter`.
    """
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(least <= count <= most for count in counts):
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers from {least} to {most}, as in "
            f"{least},{min(max(8, least), most)}.",
            param_hint=option,
        )
    return counts


def parse_contexts(text: str) -> tuple[int, ...]:
    """Lengths of prompts. Raises: `typer.BadParameter`."""
    return parse_counts("--prompt-tokens", text, MAX_TOKENS, least=2)


def engine_settings(
    model: str,
    *,
    device: str,
    dtype: str,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
    cudagraph_mode: str | None,
    max_inflight_steps: str | None,
    request_tokens: int,
    vs: str | None = None,
    kv: KVTransferConfig | None = None,
) -> Settings:
    """What the options come to; `request_tokens` is the most that a request of the work takes.

    Raises: `typer.BadParameter`. What only the engine knows to refuse is refused later.
    """
    from interlace.bench.settings import Settings

    depths: tuple[int, ...] = ()
    if max_inflight_steps is not None:
        depths = parse_counts("--max-inflight-steps", max_inflight_steps, 2)
    if kv is not None and len(depths) > 1:
        raise typer.BadParameter(
            "with a KV connector one engine could load what the other has saved; give one depth.",
            param_hint="--max-inflight-steps",
        )
    return Settings(
        model,
        depths,
        against_transformers=vs is not None,
        kv_transfer_config=kv,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        request_tokens=request_tokens,
        measure_limits=True,
    )


Live: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Watch the engines on this terminal until the figures are there. Takes a part of a "
        "core, so figures may be a little worse.",
    ),
]
