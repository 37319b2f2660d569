"""Random steps for the kernels: pages out of order, NaN wherever no row may look."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import torch
from kernel_twins import paged_attention_twin, relative_error
from torch import Tensor

from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kernels.attention_plan import KEY_GRAIN, AttentionPlan, Tiles, plan_attention
from interlace.layers.kernels.gathered_attention import GatheredKeys, KeyRoom, place_keys
from interlace.layers.kernels.paged_attention import paged_attention, schedule_decode
from interlace.layers.kv_pages import KVPages

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative errors in the norm. Matrix products in TF32 would miss the first by a factor of 100."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCase:
    """One step: what `paged_attention` takes."""

    q: Tensor
    pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    @classmethod
    def random(
        cls,
        spans: Sequence[tuple[int, int]],
        heads: Heads,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
        block_size: int = 16,
        layout: KVCacheLayout = "NHD",
        cross_layers: bool = False,
        spare_rows: int = 0,
    ) -> AttentionCase:
        """Requests with `spans` (tokens before, new tokens); None before is a padding request.

        `spare_rows` rows of `q` belong to nobody.
        """
        lengths = [before + new if before >= 0 else 0 for before, new in spans]
        counts = [-(-length // block_size) for length in lengths]
        pages = KVPages(
            num_layers=2,
            num_blocks=sum(counts) + 2,
            block_size=block_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=dtype,
            device=torch.device(device),
            layout=layout,
            cross_layers=cross_layers,
        ).layers[1]
        generator = torch.Generator(device).manual_seed(seed)
        pages.copy_(torch.randn(pages.shape, generator=generator, device=device))
        blocks = list(range(1, pages.shape[0]))
        random.Random(seed).shuffle(blocks)
        pages[[0, blocks.pop()]] = math.nan
        table = torch.full((len(spans), max(*counts, 1) + 1), -(10**9), dtype=torch.int32)
        for row, length, count in zip(table, lengths, counts, strict=True):
            for place in range(count):
                row[place] = blocks.pop()
            if length % block_size:
                pages[int(row[count - 1]), :, length % block_size :] = math.nan
        starts = torch.tensor([0] + [new for _, new in spans]).cumsum(0)
        q = torch.randn(
            (int(starts[-1]) + spare_rows, heads.num_heads + 1, heads.head_dim),
            generator=generator,
            device=device,
        ).to(dtype)[:, 1:]  # with gaps between the tokens, as in a QKV matrix
        return cls(
            q,
            pages,
            table.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            starts.to(torch.int32).to(device),
        )

    def plan(self, **changes: int) -> AttentionPlan:
        """The plan for this step, changed where asked."""
        plan = plan_attention(
            num_tokens=self.q.shape[0],
            num_requests=len(self.seq_lens),
            max_query_len=int(self.query_start_loc.diff().max()),
            max_seq_len=self.block_table.shape[1] * self.pages.shape[2],
            num_heads=self.q.shape[1],
            num_kv_heads=self.pages.shape[3],
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
            num_sms=1,
        )
        return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]

    def schedule(self, plan: AttentionPlan, window: int = 0) -> Tensor:
        """As dealt out on the device, into poisoned memory."""
        out = torch.full(plan.schedule_shape, -(10**9), dtype=torch.int32, device=self.q.device)
        return schedule_decode(
            self.seq_lens, self.query_start_loc, plan=plan, out=out, window=window
        )

    def gathered_plan(self, tiles: Tiles, splits: int) -> AttentionPlan:
        """One that gathers keys, with these tiles."""
        return dataclasses.replace(self.plan(chunk_splits=splits), is_gathered=True, chunk=tiles)

    def gathered(self) -> GatheredKeys:
        """As placed on the device, in a room for just these spans, poisoned."""
        several = self.query_start_loc.diff() > 1
        lengths = self.seq_lens[several].tolist()
        room = KeyRoom.allocate(
            capacity=max(1, sum(-(-length // KEY_GRAIN) * KEY_GRAIN for length in lengths)),
            num_kv_heads=self.pages.shape[3],
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
            device=self.q.device,
        )
        assert room.holds(lengths)
        for part in (room.keys, room.values):
            part[..., : self.q.shape[2]] = math.nan
        starts = torch.full_like(self.query_start_loc, -(10**9))
        return GatheredKeys(room, place_keys(self.seq_lens, self.query_start_loc, out=starts))

    def run(self, plan: AttentionPlan, window: int = 0, schedule: Tensor | None = None) -> Tensor:
        """The kernel's answer, into poisoned memory."""
        device = self.q.device
        return paged_attention(
            self.q,
            self.pages,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            plan=plan,
            scale=self.scale,
            out=torch.full(self.q.shape, math.nan, dtype=self.q.dtype, device=device),
            workspace=torch.full((plan.workspace_numel,), math.nan, device=device),
            schedule=schedule,
            gathered=self.gathered() if plan.is_gathered else None,
            window=window,
        )

    @property
    def scale(self) -> float:
        """The usual one."""
        return 1 / math.sqrt(self.q.shape[2])

    def expected(self, window: int = 0) -> Tensor:
        """The twin's answer, float64; NaN in rows that belong to nobody."""
        return paged_attention_twin(
            self.q,
            self.pages,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            scale=self.scale,
            window=window,
        )

    def check(self, plan: AttentionPlan, window: int = 0) -> None:
        """Assert that the kernel's rows are the twin's, and that rows of nobody are left alone."""
        found, expected = self.run(plan, window), self.expected(window)
        rows = int(self.query_start_loc[-1])
        assert found[rows:].isnan().all(), "rows of nobody were written"
        error = relative_error(found[:rows], expected[:rows])
        assert error < TOLERANCE[self.q.dtype], f"relative error {error:.1e}"
