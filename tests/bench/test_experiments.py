"""Turns, cases, figures and bars of the benchmarks, on arms of a known speed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from interlace.bench import experiments
from interlace.bench.arms import Case, Shape, run_in_turns
from interlace.bench.experiments import Bench
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.errors import InterlaceError

Log = list[tuple[str, Work]]
SHAPE = Shape(prompt_tokens=32, output_tokens=5, repeats=3)


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
            cached_tokens=cached,
            loaded_tokens=self._loaded_tokens,
            worst_lag_s=0.003,
        )


def bench(ours: FakeArm, theirs: FakeArm | None = None) -> Bench:
    return Bench([ours], theirs, WorkSource(vocab_size=100, seed=0), CountingProgress())


async def test_cases_take_turns_on_the_same_new_prompts() -> None:
    log: list[tuple[str, Work]] = []
    ours, theirs = FakeArm("ours", log), FakeArm("theirs", log)
    cases = [Case(ours, 1), Case(theirs, 1), Case(ours, 3)]
    progress = CountingProgress()
    source = WorkSource(vocab_size=50, seed=0)

    samples = await run_in_turns(cases, Shape(8, 4, 2), source, progress, "decode")

    order = [(name, work.batch_size) for name, work in log]
    assert order == [("ours", 1), ("theirs", 1), ("ours", 3)] * 3
    assert [len(taken) for taken in samples] == [2, 2, 2]
    assert all(log[i][1] == log[i + 1][1] for i in (0, 3, 6))
    of_ours = [prompt for name, work in log if name == "ours" for prompt in work.prompts]
    assert len(set(of_ours)) == len(of_ours) == 3 * (1 + 3)
    assert (progress.tasks, progress.done) == ([("decode", 9)], 9)
    assert cases[2].name == "ours, batch 3"


async def test_decode_compares_with_transformers_at_batch_1() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log, step_s=0.5), FakeArm("transformers", log, step_s=1.0))
    rows, checks = await experiments.decode(both, [1, 8], SHAPE)
    names = ["interlace, batch 1", "transformers, batch 1", "interlace, batch 8"]
    assert [row.case for row in rows] == names
    assert rows[0].figures["tokens/s"].samples == (2.0, 2.0, 2.0)
    assert rows[0].figures["ms/step"].median == 500.0
    assert rows[2].figures["tokens/s"].median == 16.0
    assert [(c.value, c.at_least) for c in checks[:2]] == [(2.0, 1.3), (16.0, 4.5)]
    assert [(c.value, c.at_most) for c in checks[2:]] == [(3.0, 20.0)]
    assert all(check.met for check in checks)


async def test_decode_alone_has_no_ratios() -> None:
    rows, checks = await experiments.decode(bench(FakeArm("interlace", [])), [2], SHAPE)
    assert [row.case for row in rows] == ["interlace, batch 2"]
    assert [check.name for check in checks] == ["worst event-loop lag, ms"]


async def test_transformers_runs_at_batch_1_even_if_we_do_not() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log), FakeArm("transformers", log))
    rows, checks = await experiments.decode(both, [4], SHAPE)
    assert [row.case for row in rows] == ["interlace, batch 4", "transformers, batch 1"]
    assert [(c.value, c.at_least) for c in checks[:1]] == [(4.0, None)]


async def test_prefill_asks_for_one_token() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log, step_s=0.4), FakeArm("transformers", log, step_s=0.8))
    rows, checks = await experiments.prefill(both, [1], SHAPE)
    assert {work.output_tokens for _, work in log} == {1}
    assert rows[0].figures["prompt tokens/s"].median == pytest.approx(64.0)
    assert rows[0].figures["first token ms"].median == pytest.approx(500.0)
    assert checks[0].value == pytest.approx(2.0)
    assert checks[0].at_least == 1.0


async def test_a_new_prompt_that_was_cached_spoils_the_figures() -> None:
    for measure in (experiments.decode, experiments.prefill):
        with pytest.raises(InterlaceError, match="prefix cache"):
            await measure(bench(FakeArm("interlace", [], cached_tokens=16)), [1], SHAPE)
        with pytest.raises(InterlaceError, match="KV connector"):
            await measure(bench(FakeArm("interlace", [], loaded_tokens=16)), [1], SHAPE)


async def test_hit_sends_each_prompt_twice() -> None:
    log: Log = []
    rows, checks = await experiments.hit(bench(FakeArm("interlace", log, caches=True)), 1000, 2)
    prompts = [work.prompts for _, work in log]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    assert [work.output_tokens for _, work in log] == [1, 17] * 3
    assert rows[0].figures["first token / step"].samples == (1.25, 1.25)
    assert rows[0].figures["cached tokens"].median == 992
    assert (checks[0].value, checks[0].at_most, checks[0].met) == (1.25, 1.5, True)


async def test_a_missed_hit_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="only 0 of 1000"):
        await experiments.hit(bench(FakeArm("interlace", [])), 1000, 2)
