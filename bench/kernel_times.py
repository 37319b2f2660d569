"""The kernels against the device's limits: `python -m interlace.bench.kernel_times [--json FILE]`.

Each kernel is captured in a graph, called over as much data as keeps it out of the L2 cache, and
timed by device events. What it must move at least, over the rate of a read-only sum taken in the
same run, or what it must compute, over that of a large matrix product, is its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from interlace.bench.limits import Limits, measure_limits
from interlace.bench.spread import Spread
from interlace.bench.work_size import WorkSize
from interlace.engine.errors import ConfigError
from interlace.layers.kernels import pointwise
from interlace.layers.kernels.attention_plan import GATHERED_TOKENS, plan_attention
from interlace.layers.kernels.gathered_attention import GatheredKeys, KeyRoom, place_keys
from interlace.layers.kernels.matvec import matvec
from interlace.layers.kernels.paged_attention import paged_attention, schedule_decode
from interlace.layers.kernels.rope_write import rope_and_write

DTYPE = torch.bfloat16
HEAD_DIM = 128
BLOCK_SIZE = 16
COLD_BYTES = 400_000_000
"""Data that a measurement goes through before it comes back to the same: several L2 caches."""
REPEATS = 7
_CHUNKS = ((16, 8192), (128, 8192), (528, 8192), (688, 8192), (1984, 8192), (8192, 0))
"""New tokens, tokens before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    kernel: str
    shape: str
    microseconds: float
    low: float
    high: float
    """The fastest and the slowest repeat."""
    limit_fraction: float
    """Time at the limit over the time taken."""
    library_microseconds: float | None = None
    """What torch takes for the same, if it has it."""


def limit_row(
    limits: Limits,
    kernel: str,
    shape: str,
    taken: Spread,
    *,
    num_bytes: float = 0.0,
    flops: float = 0.0,
    library: Spread | None = None,
) -> Row:
    """A kernel that must move `num_bytes` or compute `flops`, whichever takes longer."""
    limit = limits.least_s(WorkSize(round(num_bytes), round(flops)))
    return Row(
        kernel,
        shape,
        microseconds=round(taken.median * 1e6, 2),
        low=round(taken.low * 1e6, 2),
        high=round(taken.high * 1e6, 2),
        limit_fraction=round(limit / taken.median, 3),
        library_microseconds=None if library is None else round(library.median * 1e6, 2),
    )


def seconds(calls: Sequence[Callable[[], object]]) -> Spread:
    """Device time of one call, when all are replayed as one graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return _timed(graph.replay, len(calls))


def _timed(run: Callable[[], object], calls: int) -> Spread:
    times = []
    for _ in range(REPEATS):
        begin, end = _event(), _event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return Spread.of(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copies(num_bytes: float) -> int:
    return max(1, min(30, int(COLD_BYTES / num_bytes)))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


class _Requests:
    """Requests of given lengths in pages out of order, in as many layers as keep them cold."""

    def __init__(self, num_heads: int, num_kv_heads: int, spans: Sequence[tuple[int, int]]) -> None:
        """`spans` are (tokens before, new tokens)."""
        lengths = [before + new for before, new in spans]
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        self.kv_bytes = sum(lengths) * num_kv_heads * HEAD_DIM * 4
        self.pages = [
            _random(sum(counts) + 1, 2, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
            for _ in range(_copies(self.kv_bytes))
        ]
        blocks = iter((torch.randperm(sum(counts)) + 1).tolist())
        most = max(counts)
        table = [[next(blocks) for _ in range(count)] + [0] * (most - count) for count in counts]
        self.table = torch.tensor(table, dtype=torch.int32, device="cuda")
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *(new for _, new in spans)]).cumsum(0)
        self.starts = starts.to(torch.int32).cuda()
        self.q = _random(int(starts[-1]), num_heads, HEAD_DIM)
        self.flops = sum(
            4 * num_heads * HEAD_DIM * new * (before + (new + 1) / 2) for before, new in spans
        )

    def attend(self, max_query_len: int, *, may_gather: bool = False) -> list[Callable[[], object]]:
        """A call for each layer."""
        plan = plan_attention(
            num_tokens=len(self.q),
            num_requests=len(self.lengths),
            max_query_len=max_query_len,
            max_seq_len=16384,
            num_heads=self.q.shape[1],
            num_kv_heads=self.pages[0].shape[3],
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
            may_gather=may_gather,
        )
        out = torch.empty_like(self.q)
        workspace = torch.empty(plan.workspace_numel, device="cuda")
        schedule = torch.empty(plan.schedule_shape, dtype=torch.int32, device="cuda")
        schedule_decode(self.lengths, self.starts, plan=plan, out=schedule)

        attend = partial(
            paged_attention,
            block_table=self.table,
            seq_lens=self.lengths,
            query_start_loc=self.starts,
            plan=plan,
            scale=HEAD_DIM**-0.5,
            out=out,
            workspace=workspace,
            schedule=schedule,
            gathered=self._gathered() if plan.is_gathered else None,
        )
        return [partial(attend, self.q, pages) for pages in self.pages]

    def _gathered(self) -> GatheredKeys:
        room = KeyRoom.allocate(
            capacity=16384,
            num_kv_heads=self.pages[0].shape[3],
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            device=self.q.device,
        )
        starts = place_keys(self.lengths, self.starts, out=torch.empty_like(self.starts))
        return GatheredKeys(room, starts)


def decode_rows(limits: Limits) -> Iterator[Row]:
    """One new token a request, for batches and contexts, even and uneven."""
    batches = {
        "1 x 200": [200],
        "8 x 200": [200] * 8,
        "32 x 200": [200] * 32,
        "1 x 8192": [8192],
        "8 x 2048": [2048] * 8,
        "32 x 2048": [2048] * 32,
        "31 x 200 and 8192": [200] * 31 + [8192],
        "32 of 64 to 4000": [64 + i * 1237 % 3937 for i in range(32)],
    }
    for heads in ((32, 8), (16, 8)):
        for name, lengths in batches.items():
            step = _Requests(*heads, [(length - 1, 1) for length in lengths])
            taken = seconds(step.attend(1))
            shape = f"{heads[0]}/{heads[1]} heads, {name}"
            yield limit_row(limits, "attention, decode", shape, taken, num_bytes=step.kv_bytes)


def chunk_rows(limits: Limits) -> Iterator[Row]:
    """A chunk of new tokens behind a cached context: by pages, and by gathered keys."""
    for heads in ((32, 8), (16, 8)):
        for new, context in _CHUNKS:
            step = _Requests(*heads, [(context, new)])
            shape = f"{heads[0]}/{heads[1]} heads, {new} after {context}"
            row = partial(limit_row, limits, shape=shape, num_bytes=step.kv_bytes, flops=step.flops)
            yield row("attention, chunk", taken=seconds(step.attend(new)))
            if new >= GATHERED_TOKENS:
                taken = seconds(step.attend(new, may_gather=True))
                yield row("attention, gathered", taken=taken)


def fused_rows(limits: Limits) -> Iterator[Row]:
    """The small kernels, in the shapes of an 8B model."""
    for tokens in (1, 32, 2048, 8192):
        pairs = [(_random(tokens, 4096), _random(tokens, 4096)) for _ in range(8)]
        add = partial(pointwise.add_rms_norm, weight=_random(4096), eps=1e-5)
        taken = seconds([partial(add, x, delta, out=delta) for x, delta in pairs])
        yield limit_row(
            limits, "add and RMS norm", f"{tokens} x 4096", taken, num_bytes=tokens * 32768
        )
        activate = partial(pointwise.silu_mul, out=_random(tokens, 14336))
        taken = seconds([partial(activate, _random(tokens, 28672)) for _ in range(4)])
        yield limit_row(limits, "SiLU x up", f"{tokens} x 14336", taken, num_bytes=tokens * 86016)
        yield limit_row(
            limits, "QK norm, RoPE, KV write", f"{tokens}", _rope(tokens), num_bytes=tokens * 24576
        )


def _rope(tokens: int) -> Spread:
    qkv = [_random(tokens, 48 * HEAD_DIM) for _ in range(8)]
    positions = torch.arange(tokens, device="cuda")
    table, norm = _random(tokens, HEAD_DIM // 2), _random(40, HEAD_DIM)
    pages = _random(-(-tokens // BLOCK_SIZE), 2, BLOCK_SIZE, 8, HEAD_DIM)
    q_out = _random(tokens, 32, HEAD_DIM)

    write = partial(
        rope_and_write,
        positions=positions,
        cos=table,
        sin=table,
        slot_mapping=positions,
        pages=pages,
        q_out=q_out,
        qk_norm=norm,
        eps=1e-6,
    )
    return seconds([partial(write, part) for part in qkv])


def matvec_rows(limits: Limits) -> Iterator[Row]:
    """Few rows times the weights of an 8B and of a 0.6B model, beside cuBLAS."""
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    shapes += [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
    for n, k in shapes:
        weights = [_random(n, k) for _ in range(max(2, _copies(n * k * 2)))]
        for rows in (1, 2, 4):
            x, out = _random(rows, k), _random(rows, n)
            ours = seconds([partial(matvec, x, weight, out=out) for weight in weights])
            library = seconds([partial(functional.linear, x, weight) for weight in weights])
            name = f"{rows} x {k} by {n}"
            yield limit_row(
                limits, "few-row product", name, ours, num_bytes=n * k * 2, library=library
            )


def table(rows: Sequence[Row]) -> str:
    """Fixed-width lines, for a terminal."""
    lines = [f"{'kernel':24} {'shape':34} {'us':>9} {'of limit':>9} {'torch us':>9}"]
    for row in rows:
        library = "" if row.library_microseconds is None else f"{row.library_microseconds:9.1f}"
        lines.append(
            f"{row.kernel:24} {row.shape:34} {row.microseconds:9.1f} "
            f"{row.limit_fraction:9.2f} {library:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure everything and write a table, and with `--json FILE` all figures.

    Raises: `ConfigError` without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("This measures kernels on an NVIDIA GPU, and torch finds none.")
    torch.manual_seed(0)
    limits = measure_limits(torch.device("cuda"), DTYPE)
    parts = (decode_rows, chunk_rows, fused_rows, matvec_rows)
    rows = [row for part in parts for row in part(limits)]
    rates = (
        f"{limits.bytes_per_s.median / 1e12:.2f} TB/s, "
        f"{limits.flops_per_s.median / 1e12:.0f} TFLOP/s"
    )
    sys.stdout.write(f"{torch.cuda.get_device_name()}: {rates}\n{table(rows)}\n")
    if arguments.json:
        figures: dict[str, object] = {
            "device": torch.cuda.get_device_name(),
            "bytes_per_second": limits.bytes_per_s.median,
            "flops_per_second": limits.flops_per_s.median,
        }
        figures["rows"] = [dataclasses.asdict(row) for row in rows]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
