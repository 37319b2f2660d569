"""`load_checkpoint`: everything an engine needs of a model, from its name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch

from interlace.engine.config import DTYPES
from interlace.engine.errors import ConfigError, ModelError
from interlace.engine.ports import Progress
from interlace.engine.tokenizer import Tokenizer
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.checkpoint import Checkpoint, WeightOrigin
from interlace.layers.checkpoint.memory import telling_what_is_needed
from interlace.layers.checkpoint.resolve import open_checkpoint
from interlace.layers.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer | None
    """None if it was skipped, or the model has none."""
    architecture: Architecture
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer, from the model's files and the tokenizer."""
    max_model_len: int
    """Most tokens of one sequence."""
    weights: Mapping[str, torch.Tensor]
    """What the decoder computes with, by the names of `weight_shapes`; shared, not a copy."""
    weight_origin: WeightOrigin = dataclasses.field(default_factory=WeightOrigin)
    """Where the weights come from, so that `model_identity` need not read them all."""


def load_checkpoint(
    model: str,
    *,
    tokenizer: str | None = None,
    skip_tokenizer: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load `model`: `smollm2-135m`, a .gguf file, a Hugging Face folder, a hub id, or `dummy:`.

    `tokenizer` is a folder to use in place of the model's own. `dtype` "auto" is float32 on a
    CPU, bfloat16 elsewhere. `device` is where the weights go, "cpu" or "cuda". `max_model_len` may
    lower the model's own limit. `seed` is that of a dummy model's weights. May take minutes (a
    download, a conversion); runs on the caller's thread, which must not be the event loop's.

    Raises: `ModelError` for whatever is wrong with the model, `ConfigError` for an option.
    """
    progress = progress or Silent()
    target = _device(device)
    weight_dtype = _dtype(dtype, target)
    checkpoint = open_checkpoint(model, progress, seed=seed)
    length = _model_len(checkpoint.architecture, max_model_len)
    checkpoint.architecture.check_window(length)
    text = None if skip_tokenizer else _tokenizer(checkpoint, tokenizer)
    origin = checkpoint.weight_origin()
    with telling_what_is_needed(checkpoint.architecture, weight_dtype, target):
        weights = checkpoint.read_weights(weight_dtype, target, progress)
    vocab_size = checkpoint.architecture.vocab_size
    ends = (*checkpoint.eos_token_ids, *(text.eos_token_ids if text else ()))
    return LoadedModel(
        name=checkpoint.name,
        decoder=Decoder(checkpoint.architecture, weights, max_model_len=length),
        tokenizer=text,
        architecture=checkpoint.architecture,
        eos_token_ids=tuple(i for i in dict.fromkeys(ends) if i < vocab_size),
        max_model_len=length,
        weights=weights,
        weight_origin=origin if checkpoint.weight_origin() == origin else WeightOrigin(),
    )


def _model_len(architecture: Architecture, asked: int | None) -> int:
    limit = architecture.max_position
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked} is more than the {limit} tokens that the model is made for; "
            "ask for less or leave it out."
        )
    return limit if asked is None else asked


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device {name!r} is not one that torch knows; use 'cpu' or 'cuda'."
        ) from error
    if device.type == "cuda":
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {name!r} cannot be used: {error}; use 'cpu'.") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _tokenizer(checkpoint: Checkpoint, folder: str | None) -> Tokenizer | None:
    text = Tokenizer.from_folder(folder) if folder is not None else checkpoint.read_tokenizer()
    if text is not None and text.vocab_size > checkpoint.architecture.vocab_size:
        raise ModelError(
            f"the tokenizer has {text.vocab_size} tokens, but {checkpoint.name} knows only "
            f"{checkpoint.architecture.vocab_size}; pass --tokenizer DIR with the model's own."
        )
    return text


class Silent:
    """A `Progress` that nobody watches."""

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """Show nothing."""
        yield lambda _done: None
