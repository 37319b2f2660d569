"""KV pages in every layout: equal to a plain twin to the bit, and lying in memory as they say."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.engine.errors import ConfigError
from interlace.engine.scheduler_output import BlockCopy
from interlace.layers.attention_backend import KVCacheLayout, attention_backend
from interlace.layers.kv_memory import CACHE_ONLY_LAYER, PageShape, layer_name
from interlace.layers.kv_pages import K, KVPages, V

CPU = torch.device("cpu")
LAYOUTS: tuple[KVCacheLayout, ...] = ("NHD", "HND")
WAYS = tuple(itertools.product(LAYOUTS, (False, True)))
SHAPE = PageShape(
    num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, cache_only=(3, 5)
)
NUM_BLOCKS = 6

shapes = st.builds(
    PageShape,
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cache_only=st.sampled_from([None, (1, 3), (2, 2)]),
)


class Twin:
    """What the pages should hold, kept in the plainest way."""

    def __init__(self, shape: PageShape, seed: int) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(seed)
        logical = (NUM_BLOCKS, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.layers = [torch.zeros(logical, dtype=shape.dtype) for _ in range(shape.num_layers)]
        vectors = shape.cache_only or (0, 0)
        self.kept = torch.zeros((NUM_BLOCKS, shape.block_size, *vectors), dtype=shape.dtype)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.shape.dtype)

    def write(self, pages: list[KVPages], slots: list[int]) -> None:
        """New K and V in every layer, here and in all `pages`."""
        size, heads, dim = self.shape.block_size, self.shape.num_kv_heads, self.shape.head_dim
        where = torch.tensor(slots)
        for i, layer in enumerate(self.layers):
            # As the decoder gives them: views with gaps between the tokens.
            k, v = self.numbers(len(slots), heads, 2, dim).unbind(2)
            for slot, new_k, new_v in zip(slots, k, v, strict=True):
                layer[slot // size, K, slot % size] = new_k
                layer[slot // size, V, slot % size] = new_v
            for each in pages:
                each.write(i, each.kv_rows(where), k, v)
        if self.shape.cache_only is not None:
            kept = self.numbers(len(slots), *self.shape.cache_only)
            for slot, vectors in zip(slots, kept, strict=True):
                self.kept[slot // size, slot % size] = vectors
            for each in pages:
                each.write_cache_only(where, kept)

    def copy(self, copies: list[BlockCopy]) -> None:
        for tensor in (*self.layers, self.kept):
            for source, target in copies:
                tensor[target] = tensor[source]

    def zero(self, block_ids: list[int]) -> None:
        for tensor in (*self.layers, self.kept):
            tensor[block_ids] = 0

    def check(self, pages: KVPages, block_ids: list[int]) -> None:
        """The pages hold the same, and `gather` brings the same of `block_ids`."""
        ids = torch.tensor(block_ids)
        for i, layer in enumerate(self.layers):
            assert torch.equal(pages.layers[i], layer)
            for half in (K, V):
                out = torch.empty((len(ids), *layer.shape[2:]), dtype=layer.dtype)
                assert torch.equal(pages.gather(i, half, ids, out), layer[ids, half])
        if pages.cache_only is not None:
            assert torch.equal(pages.cache_only, self.kept)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 10**6), num_actions=st.integers(1, 5))
def test_every_layout_holds_what_the_plain_twin_holds(
    shape: PageShape, seed: int, num_actions: int
) -> None:
    choice, twin = random.Random(seed), Twin(shape, seed)
    pages = [
        KVPages.of(shape, num_blocks=NUM_BLOCKS, device=CPU, layout=layout, cross_layers=cross)
        for layout, cross in WAYS
    ]
    num_slots = NUM_BLOCKS * shape.block_size
    for _ in range(num_actions):
        twin.write(pages, choice.sample(range(num_slots), choice.randint(1, num_slots)))
        source, *blocks = choice.sample(range(NUM_BLOCKS), 5)
        copies = [BlockCopy(source, target) for target in blocks[: choice.randint(0, 2)]]
        zeroed = blocks[choice.randint(0, 3) :]
        twin.copy(copies)
        twin.zero(zeroed)
        for each in pages:
            each.copy_blocks(copies)
            each.zero_blocks(zeroed)
            twin.check(each, choice.choices(range(NUM_BLOCKS), k=choice.randint(1, 9)))


def _pages(layout: KVCacheLayout, cross_layers: bool, **other: Any) -> KVPages:
    shape = dataclasses.replace(SHAPE, **other)
    return KVPages.of(
        shape, num_blocks=NUM_BLOCKS, device=CPU, layout=layout, cross_layers=cross_layers
    )


@pytest.mark.parametrize(
    ("layout", "cross_layers", "strides"),
    [
        ("NHD", False, (128, 64, 16, 8, 1)),
        ("HND", False, (128, 64, 8, 32, 1)),
        ("NHD", True, (3 * 128, 64, 16, 8, 1)),
        ("HND", True, (3 * 128, 64, 8, 32, 1)),
    ],
)
def test_strides_tell_the_physical_order(
    layout: KVCacheLayout, cross_layers: bool, strides: tuple[int, ...]
) -> None:
    pages = _pages(layout, cross_layers)
    for layer in pages.layers:
        assert layer.shape == (NUM_BLOCKS, 2, 4, 2, 8)
        assert layer.stride() == strides
    contiguous = layout == "NHD" and not cross_layers
    assert all(layer.is_contiguous() == contiguous for layer in pages.layers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_the_cross_layer_tensor_is_one_record_of_all_layers(
    layout: KVCacheLayout,
) -> None:
    pages = _pages(layout, cross_layers=True)
    tensor = pages.cross_layers_tensor
    assert tensor is not None
    assert tensor.is_contiguous()
    tail = (4, 2, 8) if layout == "NHD" else (2, 4, 8)
    assert tensor.shape == (NUM_BLOCKS, 3, 2, *tail)
    tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))
    for i, layer in enumerate(pages.layers):
        inner = tensor[5, i] if layout == "NHD" else tensor[5, i].transpose(1, 2)
        assert torch.equal(layer[5], inner)
    order = pages.attention_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    logical = (3, *pages.layers[0].shape)
    assert tensor.shape == tuple(logical[i] for i in order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_is_no_cross_layer_tensor_unless_asked_for(layout: KVCacheLayout) -> None:
    assert _pages(layout, cross_layers=False).cross_layers_tensor is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_backend_tells_the_physical_order_of_a_layer(layout: KVCacheLayout) -> None:
    backend = attention_backend(layout)
    assert backend.get_name() == "TRITON_ATTN"
    layer = _pages(layout, cross_layers=False).layers[0]
    assert layer.shape == backend.get_kv_cache_shape(NUM_BLOCKS, 4, 2, 8)
    assert layer.permute(backend.get_kv_cache_stride_order()).is_contiguous()


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="'LBHNC' is unknown; use 'NHD' or 'HND'"):
        attention_backend("LBHNC")


@pytest.mark.parametrize(("layout", "cross_layers"), WAYS)
def test_a_block_has_the_bytes_that_its_shape_says(
    layout: KVCacheLayout, cross_layers: bool
) -> None:
    for cache_only in (None, (3, 5)):
        pages = _pages(layout, cross_layers, cache_only=cache_only)
        held = sum(tensor[0].nbytes for tensor in pages.by_name().values())
        assert pages.page_shape.block_bytes == held


@pytest.mark.parametrize(("layout", "cross_layers"), WAYS)
def test_the_cache_only_layer_comes_last_and_is_in_no_group(
    layout: KVCacheLayout, cross_layers: bool
) -> None:
    pages = _pages(layout, cross_layers)
    names = [layer_name(i) for i in range(3)]
    assert list(pages.by_name()) == [*names, CACHE_ONLY_LAYER]
    assert pages.by_name()[CACHE_ONLY_LAYER].shape == (NUM_BLOCKS, 4, 3, 5)
    (group,) = pages.describe().kv_cache_groups
    assert group.layer_names == tuple(names)


def test_pages_are_described_before_they_exist() -> None:
    config = SHAPE.describe(NUM_BLOCKS)
    pages = _pages("HND", cross_layers=True)
    assert config == pages.describe()
    assert config.num_blocks == NUM_BLOCKS
    spec = config.kv_cache_groups[0].kv_cache_spec
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (4, 2, 8)
    assert spec.dtype is torch.float32
    assert spec.page_size_bytes == pages.layers[0][0].nbytes


def test_released_pages_hold_nothing() -> None:
    pages = _pages("NHD", cross_layers=True)
    pages.release()
    assert not pages.by_name()
    assert pages.cross_layers_tensor is None
