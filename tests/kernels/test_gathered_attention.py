"""Long chunks by gathering: how they are cut, and, interpreted, that the pieces make the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import TOLERANCE, AttentionCase, Heads
from kernel_twins import relative_error
from torch import Tensor

from interlace.layers.kernels import gathered_attention as module
from interlace.layers.kernels.gathered_attention import (
    Cut,
    GatheredChunk,
    GatherWorkspace,
    LibraryAnswer,
    prefers_gathered,
)
from interlace.layers.kernels.toolchain import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")


@given(new=st.integers(1, 9000), context=st.integers(0, 200_000))
def test_the_pieces_are_few_shapes_and_cover_everything_once(new: int, context: int) -> None:
    cut = Cut.of(new, context)
    at = 0
    for piece in cut.pieces:
        assert piece.start == at
        at = piece.stop
        size = piece.stop - piece.start
        assert size >= module.KEY_GRAIN
        assert size & (size - 1) == 0, "a power of two"
    assert at == cut.before
    assert cut.before + cut.skipped == context
    assert cut.skipped < module.KEY_GRAIN
    assert cut.rows % module.QUERY_GRAIN == 0
    assert 0 <= cut.rows - cut.skipped - new < module.QUERY_GRAIN


def _plain(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> LibraryAnswer:
    """What cuDNN computes, in float64, in the layout in which it answers."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), wide_k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    answer = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), wide_v).to(q.dtype).contiguous()
    return LibraryAnswer(answer.transpose(1, 2), scores.logsumexp(-1, keepdim=True).float())


@interpreted
@pytest.mark.parametrize(("new", "context"), [(5, 0), (8, 0), (8, 24), (3, 61), (19, 100)])
def test_the_pieces_make_the_whole(new: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_GRAIN", 8)
    monkeypatch.setattr(module, "KEY_GRAIN", 8)
    monkeypatch.setattr(module, "library_attention", _plain)
    heads = Heads(6, 2, 80)
    case = AttentionCase.random([(context, new)], heads, dtype=torch.float32)
    workspace = GatherWorkspace.allocate(
        max_new=20,
        max_len=128,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (workspace.keys, workspace.values, workspace.queries):
        tensor.fill_(torch.nan)
    found = torch.full_like(case.q, torch.nan)
    chunk = GatheredChunk(new, new + context, case.block_table[0], workspace, scale=case.scale)
    chunk.attend(case.q, case.pages, found)
    assert relative_error(found, case.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("new", "context", "preferred"),
    [(16, 8192, False), (128, 8192, False), (1984, 8192, True), (8192, 0, True), (100, 0, False)],
)
def test_only_long_chunks_are_gathered(new: int, context: int, preferred: bool) -> None:
    for dtype, possible in ((torch.bfloat16, True), (torch.float32, False)):
        choice = prefers_gathered(
            new, context, num_heads=32, head_dim=128, dtype=dtype, num_sms=132
        )
        assert choice == (preferred and possible)


@pytest.mark.parametrize(
    ("new", "context", "preferred"),
    [(688, 8192, False), (1024, 8192, False), (1984, 2048, False), (1984, 8192, True)],
)
def test_a_small_model_takes_the_library_only_where_the_device_is_slower_than_its_launch(
    new: int, context: int, preferred: bool
) -> None:
    """The choices by which the first token of a 0.6B shape was sooner on an H200; by the device's
    time alone it would be the library each time."""
    layer_flops = 2 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072)
    for rest_flops, choice in ((new * layer_flops, preferred), (None, True)):
        assert choice == prefers_gathered(
            new,
            context,
            num_heads=16,
            head_dim=128,
            dtype=torch.bfloat16,
            num_sms=132,
            rest_flops=rest_flops,
        )
