"""Arms of a known speed, and what a benchmark needs beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from interlace.bench.apparatus import Bench, Tracer, Yardstick
from interlace.bench.bars import NO_BARS, Bars
from interlace.bench.device_idle import Interval
from interlace.bench.limits import Limits
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.layers.architecture import Architecture

Log = list[tuple[str, Work]]

TINY = Architecture(
    name="tiny",
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=10,
    rms_eps=1e-5,
    max_position=64,
)


def tiny_dummy(folder: Path) -> str:
    """Writes a small model's config.json there; what `--model` takes for it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "max_position_embeddings": 512,
    }
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return f"dummy:{file}"


class CountingProgress:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, float | None]] = []
        self.done = 0.0

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        self.tasks.append((description, total))
        yield self._advance

    def _advance(self, amount: float) -> None:
        self.done += amount


class FakeArm:
    """An arm whose speed a test sets; writes down what it ran."""

    def __init__(
        self,
        name: str,
        log: list[tuple[str, Work]],
        *,
        step_s: float = 0.5,
        cached_tokens: int = 0,
        loaded_tokens: int = 0,
        caches: bool = False,
    ) -> None:
        self.name = name
        self._log = log
        self._step_s = step_s
        self._cached_tokens = cached_tokens
        self._loaded_tokens = loaded_tokens
        self._caches = caches
        self._seen: set[tuple[int, ...]] = set()

    async def run(self, work: Work) -> Sample:
        self._log.append((self.name, work))
        cached = self._cached_tokens
        if self._caches and work.prompts[0] in self._seen:
            cached = work.prompt_tokens - 8
        self._seen.update(work.prompts)
        steps = work.output_tokens - 1
        return Sample(
            batch_size=work.batch_size,
            prompt_tokens=work.prompt_tokens,
            first_token_s=self._step_s * 1.25,
            decode_s=steps * self._step_s,
            decode_steps=steps,
            decode_tokens=steps * work.batch_size,
            median_step_s=self._step_s,
            cached_tokens=cached,
            loaded_tokens=self._loaded_tokens,
            worst_lag_s=0.003,
        )


class FakeTracer:
    """Tells of every run that these kernels ran."""

    def __init__(self, kernels: Sequence[Interval]) -> None:
        self._kernels = tuple(kernels)

    async def trace(
        self, run: Callable[[], Awaitable[Sample]], /
    ) -> tuple[Sample, tuple[Interval, ...]]:
        return await run(), self._kernels


def yardstick(*, read_rate: float = 1.0, matrix_rate: float = 1.0) -> Yardstick:
    """Of a device with these rates and a tiny model in float32."""
    return Yardstick(Limits(Spread.of([read_rate]), Spread.of([matrix_rate])), TINY, 4)


def bench(
    ours: FakeArm,
    theirs: FakeArm | None = None,
    *,
    yardstick: Yardstick | None = None,
    tracer: Tracer | None = None,
    on_gpu: bool = False,
    bars: Bars = NO_BARS,
) -> Bench:
    """A benchmark of `ours`."""
    source = WorkSource(vocab_size=100, seed=0)
    return Bench([ours], theirs, source, CountingProgress(), yardstick, tracer, on_gpu, bars)
