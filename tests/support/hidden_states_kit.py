"""A small random Llama that transformers made, and the hidden states that transformers gives it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from interlace.layers.checkpoint import LoadedModel, load_checkpoint

NUM_LAYERS = 3
HIDDEN_SIZE = 32
VOCAB_SIZE = 64
ALL_STATES = tuple(range(NUM_LAYERS + 1))


@functools.cache
def reference_model() -> tuple[LoadedModel, Any]:
    """In float32, as our loader reads it and as transformers has it. Random, and always equal."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_checkpoint(folder, skip_tokenizer=True, dtype="float32")
    return loaded, model


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Without helpers: products this small gain nothing by them, and the reference is computed on
    another thread than the engine's, which must not run parallel operations too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def states_of(token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """`hidden_states[i]` of transformers for each layer id, [tokens, layer ids, hidden]."""
    _, model = reference_model()
    with torch.no_grad():
        found = model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    assert len(found) == NUM_LAYERS + 1
    return torch.stack([found[i][0] for i in layer_ids], dim=1)


def a_prompt(seed: int, length: int) -> list[int]:
    """Equal for equal arguments; a shorter one is a prefix of a longer one."""
    return [(7 * i * i + 13 * i + 31 * seed + 3) % VOCAB_SIZE for i in range(length)]


def assert_equal_states(found: torch.Tensor, token_ids: Sequence[int], ids: Sequence[int]) -> None:
    """To 1e-4, as the specification says."""
    torch.testing.assert_close(found, states_of(token_ids, ids), rtol=1e-4, atol=1e-4)
