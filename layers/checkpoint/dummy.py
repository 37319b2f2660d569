"""`dummy:` models: a real architecture with random weights, for measuring. No files, no tokenizer.

`dummy:NAME` is a shape written here, `dummy:PATH/config.json` that of any Hugging Face config.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.checkpoint import Checkpoint, WeightOrigin
from interlace.layers.checkpoint.hf_folder import read_json
from interlace.layers.checkpoint.made_weights import RECIPE_VERSION, make_weights

DUMMY_PREFIX: Final = "dummy:"
_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}


def open_dummy(model: str, seed: int) -> Checkpoint:
    """The checkpoint of `model`, which begins with `dummy:`; its weights follow from `seed`.

    No token ends an answer. Raises: `ModelError`; for an unknown name it lists what is possible.
    """
    architecture = Architecture.from_hf_config(_config(model.removeprefix(DUMMY_PREFIX)))
    return Checkpoint(
        name=model,
        architecture=architecture,
        eos_token_ids=(),
        read_weights=functools.partial(make_weights, architecture, seed),
        read_tokenizer=lambda: None,
        weight_origin=lambda: WeightOrigin(recipe=f"dummy {RECIPE_VERSION} seed {seed}"),
    )


def _config(shape: str) -> Mapping[str, Any]:
    if shape in _SHAPES:
        return _SHAPES[shape]
    path = Path(os.path.expanduser(shape))  # noqa: PTH111 - a ~ of nobody stays as it is
    if os.path.isfile(path):  # noqa: PTH113 - Path's own raises for a name that is too long
        return read_json(path)
    names = ", ".join(repr(DUMMY_PREFIX + name) for name in _SHAPES)
    raise ModelError(
        f"there is no dummy model {shape[:200]!r}. A dummy model is {names}, or "
        f"'{DUMMY_PREFIX}PATH' with the path of a config.json in Hugging Face layout."
    )
