"""Blocks through host staging: exact in every layout, both ways; bad arguments change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.engine.errors import ConnectorError
from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kv_copy import copy_kv_blocks, host_buffers
from interlace.layers.kv_memory import CACHE_ONLY_LAYER, PageShape, layer_name
from interlace.layers.kv_pages import KVPages

NUM_BLOCKS = 7


def _pages(
    layout: KVCacheLayout = "NHD",
    cross_layers: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> KVPages:
    """Full of random numbers."""
    shape = PageShape(
        num_layers=2, block_size=3, num_kv_heads=2, head_dim=4, dtype=dtype, cache_only=(2, 3)
    )
    pages = KVPages.of(
        shape,
        num_blocks=NUM_BLOCKS,
        device=torch.device("cpu"),
        layout=layout,
        cross_layers=cross_layers,
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in pages.by_name().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pages


def _taken(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@settings(max_examples=60, deadline=None)
@given(
    layouts=st.lists(
        st.tuples(st.sampled_from(["NHD", "HND"]), st.booleans()), min_size=2, max_size=2
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    num_copies=st.integers(0, NUM_BLOCKS),
    num_host_blocks=st.integers(NUM_BLOCKS, 11),
    seed=st.integers(0, 10**6),
)
def test_blocks_go_out_of_one_layout_and_into_another(
    layouts: list[tuple[KVCacheLayout, bool]],
    dtype: torch.dtype,
    num_copies: int,
    num_host_blocks: int,
    seed: int,
) -> None:
    choice = random.Random(seed)
    sources = choice.sample(range(NUM_BLOCKS), num_copies)
    targets = choice.sample(range(NUM_BLOCKS), num_copies)
    staged = choice.sample(range(num_host_blocks), num_copies)
    here = _pages(*layouts[0], dtype, seed=1).by_name()
    there = _pages(*layouts[1], dtype, seed=2).by_name()
    before, expected = _taken(here), _taken(there)
    for name, tensor in expected.items():
        tensor[targets] = before[name][sources]

    host = host_buffers(here, num_host_blocks)
    copy_kv_blocks(here, host, sources, staged, "d2h")
    copy_kv_blocks(host, there, staged, targets, "h2d")

    for name, tensor in there.items():
        assert torch.equal(tensor, expected[name])
        assert torch.equal(here[name], before[name]), "a source stays as it was"
        untouched = [i for i in range(num_host_blocks) if i not in staged]
        assert not host[name][untouched].any()


def test_host_buffers_of_any_strides_will_do() -> None:
    pages = _pages("HND", cross_layers=True).by_name()
    host = {
        name: torch.zeros((*tensor.shape[1:], 2 * 4), dtype=tensor.dtype).movedim(-1, 0)[::2]
        for name, tensor in pages.items()
    }
    copy_kv_blocks(pages, host, [5, 6], [3, 0], "d2h")
    for name, tensor in pages.items():
        assert torch.equal(host[name][[3, 0]], tensor[[5, 6]])


def test_a_nan_keeps_its_bits() -> None:
    layer = {"layer": torch.tensor([[0x7FC12345, -0x00400000]], dtype=torch.int32)}
    numbers = {"layer": layer["layer"].view(torch.float32)}
    host = host_buffers(numbers, 1)
    copy_kv_blocks(numbers, host, [0], [0], "d2h")
    assert torch.equal(host["layer"].view(torch.int32), layer["layer"])


def test_host_buffers_are_cpu_tensors_of_the_same_kind() -> None:
    pages = _pages("HND", cross_layers=True, dtype=torch.bfloat16).by_name()
    host = host_buffers(pages, 3)
    assert list(host) == [layer_name(0), layer_name(1), CACHE_ONLY_LAYER]
    for name, tensor in host.items():
        assert tensor.shape == (3, *pages[name].shape[1:])
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous()
        assert not tensor.any()
    with pytest.raises(ConnectorError, match="asked for 0 blocks; ask for 1 or more"):
        host_buffers(pages, 0)


def _without_a_layer(arguments: dict[str, Any]) -> None:
    del arguments["dst_kv_caches"][layer_name(1)]


def _with_another_shape(arguments: dict[str, Any]) -> None:
    arguments["dst_kv_caches"][layer_name(1)] = torch.zeros(4, 2, 3, 1, 4)


def _with_another_dtype(arguments: dict[str, Any]) -> None:
    buffers = arguments["dst_kv_caches"]
    buffers[layer_name(1)] = buffers[layer_name(1)].to(torch.bfloat16)


def _elsewhere(arguments: dict[str, Any]) -> None:
    buffers = arguments["dst_kv_caches"]
    buffers[layer_name(1)] = buffers[layer_name(1)].to("meta")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_a_layer, r"one side alone \(model.layers.1.*give both sides the same layers"),
        (_with_another_shape, r"\[2, 3, 2, 4\] and torch.float32 and of shape \[2, 3, 1, 4\]"),
        (_with_another_dtype, r"torch.bfloat16 for model.layers.1.*host_buffers\(\)"),
        (_elsewhere, "model.layers.1.self_attn.attn lies on meta: move it"),
        (lambda a: a["src_block_ids"].append(3), "got 2 source blocks and 1 targets; give one"),
        (lambda a: a.update(src_block_ids=[7]), "source block 7, but .* blocks 0 to 6 there"),
        (lambda a: a.update(dst_block_ids=[4]), "target block 4, but .* blocks 0 to 3 there"),
        (lambda a: a.update(dst_block_ids=[-1]), "target block -1"),
        (lambda a: a.update(direction="d2d"), "no direction 'd2d'; say 'h2d'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_copied(
    spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    pages = _pages().by_name()
    host = host_buffers(pages, 4)
    arguments: dict[str, Any] = {
        "src_kv_caches": pages,
        "dst_kv_caches": dict(host),
        "src_block_ids": [1],
        "dst_block_ids": [2],
        "direction": "d2h",
    }
    spoil(arguments)
    with pytest.raises(ConnectorError, match=message):
        copy_kv_blocks(**arguments)
    assert not any(tensor.any() for tensor in host.values())
