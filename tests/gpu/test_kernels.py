"""The kernels on an NVIDIA GPU, against their plain twins: large shapes, bfloat16, and graphs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_cases import TOLERANCE, AttentionCase, Heads
from kernel_twins import (
    greedy_twin,
    matvec_twin,
    relative_error,
    rope_and_write_twin,
    silu_mul_twin,
)

from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kernels import pointwise
from interlace.layers.kernels.attention_plan import (
    LARGE_TILES,
    SMALL_TILES,
    Tiles,
    plan_attention,
)
from interlace.layers.kernels.gathered_attention import GatheredKeys, KeyRoom, place_keys
from interlace.layers.kernels.greedy import greedy
from interlace.layers.kernels.matvec import matvec
from interlace.layers.kernels.paged_attention import paged_attention, schedule_decode
from interlace.layers.kernels.rope_write import rope_and_write
from interlace.layers.norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    Heads(9, 3, 64),
    Heads(16, 8, 128),
    Heads(32, 8, 128),
    Heads(14, 2, 64),
    Heads(4, 2, 8),
    Heads(4, 4, 80),
    Heads(6, 2, 96),
    Heads(8, 1, 256),
    Heads(40, 2, 64),
]
PADDING = (-1, 1)


def _spans(seed: int) -> list[tuple[int, int]]:
    """Decodes, chunks and padding, mixed, of a few to thousands of tokens."""
    draw = random.Random(seed)
    spans = [(draw.choice([0, 5, 63, 64, 700, 3000]) + draw.randrange(40), 1) for _ in range(6)]
    spans += [(draw.choice([0, 17, 900]), draw.choice([2, 15, 64, 129, 300])) for _ in range(3)]
    spans += [PADDING, (-1, 0), (-1, 7)]
    draw.shuffle(spans)
    return spans


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_mixed_batches_equal_the_twin(heads: Heads, dtype: torch.dtype) -> None:
    for seed, window, block_size in ((0, 0, 16), (1, 100, 16), (2, 0, 24), (3, 4096, 64)):
        case = AttentionCase.random(
            _spans(seed),
            heads,
            dtype=dtype,
            device="cuda",
            seed=seed,
            block_size=block_size,
            spare_rows=seed,
        )
        for more, shares, splits in ((0, 1, 1), (5, 4, 2), (70, 64, 7)):
            items = len(case.seq_lens) + more
            case.check(
                case.plan(decode_items=items, max_shares=shares, chunk_splits=splits), window
            )


@pytest.mark.parametrize("cross_layers", [False, True])
def test_layouts_give_the_same_bits_and_so_does_a_second_run(cross_layers: bool) -> None:
    answers = []
    layouts: tuple[KVCacheLayout, ...] = ("NHD", "HND", "NHD")
    for layout in layouts:
        case = AttentionCase.random(
            _spans(5),
            Heads(32, 8, 128),
            dtype=torch.bfloat16,
            device="cuda",
            layout=layout,
            cross_layers=cross_layers,
        )
        plan = case.plan(decode_items=28, max_shares=16, chunk_splits=3)
        answers += [case.run(plan), case.run(plan)]
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


def test_one_captured_graph_serves_requests_that_come_and_go() -> None:
    """Captured over padding alone, replayed over lengths from 1 to thousands."""
    heads, requests = Heads(32, 8, 128), 8
    plan = plan_attention(
        num_tokens=requests,
        num_requests=requests,
        max_query_len=1,
        max_seq_len=4096,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=torch.bfloat16,
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    assert plan.max_shares > 1
    lengths = [(0, 1), (4095, 1), (1, 1), (16, 1), (2000, 1), (700, 1), PADDING, PADDING]
    case = AttentionCase.random(lengths, heads, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.zeros_like(case.seq_lens)
    table = torch.zeros_like(case.block_table)
    out = torch.full_like(case.q, math.nan)
    workspace = torch.full((plan.workspace_numel,), math.nan, device="cuda")

    schedule = torch.zeros(plan.schedule_shape, dtype=torch.int32, device="cuda")

    def attend() -> None:
        schedule_decode(seq_lens, case.query_start_loc, plan=plan, out=schedule)
        paged_attention(
            case.q,
            case.pages,
            table,
            seq_lens,
            case.query_start_loc,
            plan=plan,
            schedule=schedule,
            scale=case.scale,
            out=out,
            workspace=workspace,
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    order = list(range(requests))
    for seed in range(4):
        random.Random(seed).shuffle(order)
        seq_lens.copy_(case.seq_lens[order])
        table.copy_(case.block_table[order])
        out.fill_(math.nan)
        graph.replay()
        moved = AttentionCase(case.q, case.pages, table, seq_lens, case.query_start_loc)
        assert relative_error(out, moved.expected()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(16, 8, 80), Heads(9, 3, 64)], ids=str)
@pytest.mark.parametrize("tiles", [LARGE_TILES, SMALL_TILES], ids=str)
def test_gathered_keys(heads: Heads, dtype: torch.dtype, tiles: Tiles) -> None:
    for spans in (
        [(0, 600)],
        [(2048, 2048)],
        [(3333, 700), (50, 1), (-1, 3), (129, 17), (7168, 1)],
    ):
        case = AttentionCase.random(spans, heads, dtype=dtype, device="cuda", spare_rows=5)
        for splits in (1, 3):
            case.check(case.gathered_plan(tiles, splits))


@pytest.mark.parametrize("tokens", [256, 528, 688, 2048])
def test_a_captured_step_gathers_whatever_lengths_come(tokens: int) -> None:
    """One graph for steps of one long chunk, of several and of decodes."""
    heads = Heads(32, 8, 128)
    mixes = ([(2000, tokens)], [(500, tokens - 150), (0, 100), (77, 50)], [(300, 1)] * 8)
    cases = [
        AttentionCase.random(
            [*mix, *[(-1, 0)] * (8 - len(mix))],
            heads,
            dtype=torch.bfloat16,
            device="cuda",
            spare_rows=tokens - sum(new for _, new in mix),
        )
        for mix in mixes
    ]
    plan = plan_attention(
        num_tokens=tokens,
        num_requests=8,
        max_query_len=tokens,
        max_seq_len=16384,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=torch.bfloat16,
        num_sms=132,
        may_gather=True,
    )
    assert plan.is_gathered
    room = KeyRoom.allocate(
        capacity=16384,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    most = max(len(case.pages) for case in cases)
    pages = torch.full((most, *cases[0].pages.shape[1:]), math.nan, dtype=torch.bfloat16).cuda()
    q = torch.zeros_like(cases[0].q).contiguous()
    columns = max(case.block_table.shape[1] for case in cases)
    table = torch.zeros((8, columns), dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(8, dtype=torch.int32, device="cuda")
    query_start_loc = torch.zeros(9, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    workspace = torch.empty(plan.workspace_numel, device="cuda")
    starts = torch.zeros_like(query_start_loc)

    def attend() -> None:
        place_keys(seq_lens, query_start_loc, out=starts)
        paged_attention(
            q,
            pages,
            table,
            seq_lens,
            query_start_loc,
            plan=plan,
            scale=cases[0].scale,
            out=out,
            workspace=workspace,
            gathered=GatheredKeys(room, starts),
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in (*cases, *reversed(cases)):
        room.keys.fill_(math.nan)
        room.values.fill_(math.nan)
        pages.fill_(math.nan)
        pages[: len(case.pages)] = case.pages
        q.copy_(case.q)
        table[:, : case.block_table.shape[1]] = case.block_table
        seq_lens.copy_(case.seq_lens)
        query_start_loc.copy_(case.query_start_loc)
        graph.replay()
        rows = int(case.query_start_loc[-1])
        error = relative_error(out[:rows], case.expected()[:rows])
        assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write(heads: Heads, dtype: torch.dtype, norm: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(heads.head_dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    tokens, blocks = 300, 40
    qkv = randn(tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    cos, sin = randn(500, heads.head_dim // 2), randn(500, heads.head_dim // 2)
    positions = torch.randint(0, 500, (tokens,), generator=generator, device="cuda")
    slots = torch.randperm(blocks * 16, generator=generator, device="cuda")[:tokens]
    slots[::7] = -1
    weight = randn(heads.num_heads + heads.num_kv_heads, heads.head_dim) if norm else None
    pages = torch.zeros(
        blocks, 2, 16, heads.num_kv_heads, heads.head_dim, dtype=dtype, device="cuda"
    )
    expected = pages.clone()
    q = rope_and_write(
        qkv,
        positions,
        cos,
        sin,
        slots,
        pages,
        q_out=torch.full(
            (tokens, heads.num_heads, heads.head_dim), math.nan, dtype=dtype, device="cuda"
        ),
        qk_norm=weight,
        eps=1e-6,
    )
    q_expected = rope_and_write_twin(
        qkv,
        positions,
        cos,
        sin,
        slots,
        expected,
        num_heads=heads.num_heads,
        qk_norm=weight,
        eps=1e-6,
    )
    assert relative_error(q, q_expected) < TOLERANCE[dtype]
    assert relative_error(pages, expected) < TOLERANCE[dtype]
    untouched = expected == 0
    assert not pages[untouched].any(), "a slot that is nobody's was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 4096, 14336])
@pytest.mark.parametrize("rows", [1, 333])
def test_pointwise(dtype: torch.dtype, width: int, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(width)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    x, delta, weight, gate_up = (
        randn(rows, width),
        randn(rows, width),
        randn(width),
        randn(rows, 2 * width),
    )
    out = torch.full_like(x, math.nan)
    pointwise.rms_norm(x, weight, 1e-5, out=out)
    assert relative_error(out, rms_norm(x, weight, 1e-5)) < TOLERANCE[dtype] / 2
    total = x + delta
    pointwise.add_rms_norm(x, delta, weight, 1e-5, out=delta)
    assert torch.equal(x, total)
    assert relative_error(delta, rms_norm(total, weight, 1e-5)) < TOLERANCE[dtype] / 2
    out.fill_(math.nan)
    pointwise.silu_mul(gate_up, out=out)
    assert relative_error(out, silu_mul_twin(gate_up)) < TOLERANCE[dtype] / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 3072), (49152, 576), (1001, 14336)])
def test_matvec(dtype: torch.dtype, n: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    weight = torch.randn(n, k, generator=generator, device="cuda").to(dtype)
    for rows in (1, 3, 4, 8):
        x = torch.randn(rows, k, generator=generator, device="cuda").to(dtype)
        bias = torch.randn(n, generator=generator, device="cuda").to(dtype) if rows > 3 else None
        out = torch.full((rows, n), math.nan, dtype=dtype, device="cuda")
        matvec(x, weight, bias, out=out)
        assert relative_error(out, matvec_twin(x, weight, bias)) < TOLERANCE[dtype] / 2
        again = torch.full_like(out, math.nan)
        assert torch.equal(matvec(x, weight, bias, out=again), out), "not deterministic"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [100, 49152, 128256, 151936])
def test_greedy(dtype: torch.dtype, vocab: int) -> None:
    """Many equals in 16 bits; rows that cannot be sampled from."""
    generator = torch.Generator("cuda").manual_seed(vocab)
    logits = torch.randn(33, vocab, generator=generator, device="cuda").to(dtype)
    logits[3], logits[4, vocab - 1], logits[5, 0] = -math.inf, math.nan, math.inf
    rows = torch.randperm(40, generator=generator, device="cuda")[:33]
    newest = torch.full((40,), -7, device="cuda")
    out = torch.full((2, 33), -7, dtype=torch.int32, device="cuda")
    greedy(logits, rows, newest, out=out)
    token_ids, best = greedy_twin(logits)
    assert out[0].tolist() == token_ids
    assert torch.equal(out[1].view(torch.float32).nan_to_num(5e9), best.nan_to_num(5e9))
    assert newest[rows].tolist() == token_ids
