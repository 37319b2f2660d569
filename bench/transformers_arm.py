"""The yardstick: transformers on the same weights in the same process.

The model is built from our decoder's weights as views, so the memory is shared and both arms
multiply by the same bytes. Decoding is transformers' own `forward` with its `DynamicCache` and
SDPA attention in a bare greedy loop, which is faster than its `generate`: the harder yardstick.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interlace.bench.timeline import Sample, sample_of
from interlace.bench.workload import Work
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.ports import Clock
from interlace.layers.architecture import Architecture
from interlace.layers.rotary import inverse_frequencies


def import_transformers() -> Any:
    """The package. Raises: `ConfigError` that names the extra if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--vs transformers needs the package transformers: pip install 'interlace[dev]'."
        ) from error
    return transformers


def build_model(architecture: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """transformers' model of `architecture` over `weights`, named as `weight_shapes` does.

    The parameters are views of `weights`: nothing is copied. In evaluation mode, dtype of the
    weights. Raises: `ConfigError` if transformers is not installed.
    """
    transformers = import_transformers()
    with torch.device("meta"):  # no memory for parameters that are replaced at once
        model = transformers.AutoModelForCausalLM.from_config(
            _config(transformers, architecture), attn_implementation="sdpa"
        )
    model.load_state_dict(_state(architecture, weights), strict=True, assign=True)
    # One table of frequencies for both arms. It is no parameter, so it was left without memory.
    model.model.rotary_emb.register_buffer(
        "inv_freq",
        inverse_frequencies(architecture).to(weights["norm"].device),
        persistent=False,
    )
    return model.eval()


def _config(transformers: Any, a: Architecture) -> Any:
    """A configuration of the family that has what `a` has."""
    common = {
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": a.max_position,
        "rms_norm_eps": a.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
        "tie_word_embeddings": a.tied_head,
    }
    if a.qk_norm:
        return transformers.Qwen3Config(**common, attention_bias=a.qkv_bias)
    if a.qkv_bias and not a.o_bias:
        return transformers.Qwen2Config(**common)
    return transformers.LlamaConfig(**common, attention_bias=a.qkv_bias, mlp_bias=a.mlp_bias)


def _state(a: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameter names -> views of our weights."""
    state = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["norm"],
        "lm_head.weight": weights["embed" if a.tied_head else "head"],
    }
    for index in range(a.num_layers):
        ours = f"layers.{index}."
        theirs = f"model.layers.{index}."
        for name, tensor in weights.items():
            if name.startswith(ours):
                for part, view in _parts(a, name.removeprefix(ours), tensor).items():
                    state[theirs + part] = view
    return state


_ONE_TO_ONE = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def _parts(a: Architecture, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What one of our weights is called there; fused ones are cut along their rows."""
    if name in _ONE_TO_ONE:
        return {_ONE_TO_ONE[name]: tensor}
    kind = "bias" if name.endswith("_bias") else "weight"
    if name.startswith("qkv"):
        rows = {"self_attn.q": a.q_size, "self_attn.k": a.kv_size, "self_attn.v": a.kv_size}
    else:
        assert name.startswith("gate_up"), f"unknown weight {name}"
        rows = {"mlp.gate": a.intermediate_size, "mlp.up": a.intermediate_size}
    starts = itertools.accumulate(rows.values(), initial=0)
    return {
        f"{part}_proj.{kind}": tensor[start : start + size]
        for start, (part, size) in zip(starts, rows.items(), strict=False)
    }


class TransformersArm:
    """Runs work of one prompt at a time, on the device thread that all arms share."""

    name = "transformers"

    def __init__(self, model: Any, clock: Clock, device: DeviceThread) -> None:
        """`model` is what `build_model` returned, on `device`."""
        self._model = model
        # The argument was called `past_key_values` before it was `cache`, which warns of the old.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._clock = clock
        self._stop = threading.Event()
        self._thread = device

    async def run(self, work: Work) -> Sample:
        """Prefill the prompt and decode greedily, past every end of sequence.

        Cancelling: the thread stops at its next token, then `CancelledError` is raised.
        """
        assert work.batch_size == 1, "the yardstick is batch 1"
        future = self._thread.submit(self._generate, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._stop.set()
            with contextlib.suppress(InterlaceError):
                await finish_despite_cancel(future)
            raise

    def _generate(self, work: Work) -> Sample:
        """One greedy answer, with the time of each token. Device thread."""
        arrivals: list[float] = []
        started = self._clock.monotonic()
        cache = import_transformers().DynamicCache(config=self._model.config)
        options = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        ids = torch.tensor(work.prompts, dtype=torch.int64, device=self._model.device)
        with torch.inference_mode():
            for _ in range(work.output_tokens):
                if self._stop.is_set():
                    raise InterlaceError("the benchmark was stopped")
                out = self._model(ids, **options)
                ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)
                ids.tolist()  # the caller would read the id before the next step
                arrivals.append(self._clock.monotonic())
        return sample_of(work, started, [arrivals])
