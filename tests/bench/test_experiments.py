"""Turns, cases, figures and bars of the benchmarks, on arms of a known speed."""

from __future__ import annotations

import pytest
from bench_kit import CountingProgress, FakeArm, FakeTracer, Log, bench, yardstick

from interlace.bench import experiments
from interlace.bench.arms import Case, Grid, run_in_turns
from interlace.bench.bars import Bars
from interlace.bench.workload import WorkSource
from interlace.engine.errors import InterlaceError


def grid(*batch_sizes: int) -> Grid:
    return Grid(batch_sizes, [32], output_tokens=5, repeats=3)


async def test_cases_take_turns_on_the_same_new_prompts() -> None:
    log: Log = []
    ours, theirs = FakeArm("ours", log), FakeArm("theirs", log)
    cases = [Case(ours, 1, 8), Case(theirs, 1, 8), Case(ours, 3, 8)]
    progress = CountingProgress()
    source = WorkSource(vocab_size=50, seed=0)

    samples = await run_in_turns(cases, Grid([1, 3], [8], 4, 2), source, progress, "decode")

    order = [(name, work.batch_size) for name, work in log]
    assert order == [("ours", 1), ("theirs", 1), ("ours", 3)] * 3
    assert [len(taken) for taken in samples] == [2, 2, 2]
    assert all(log[i][1] == log[i + 1][1] for i in (0, 3, 6))
    of_ours = [prompt for name, work in log if name == "ours" for prompt in work.prompts]
    assert len(set(of_ours)) == len(of_ours) == 3 * (1 + 3)
    assert (progress.tasks, progress.done) == ([("decode", 9)], 9)
    assert Grid([1, 3], [8], 4, 2).name(cases[2]) == "ours, batch 3"
    assert Grid([1, 3], [8, 9], 4, 2).name(cases[2]) == "ours, batch 3, 8 tokens"


async def test_decode_compares_with_transformers_at_batch_1() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log, step_s=0.5), FakeArm("transformers", log, step_s=1.0))
    rows, checks = await experiments.decode(both, grid(1, 8))
    names = ["interlace, batch 1", "transformers, batch 1", "interlace, batch 8"]
    assert [row.case for row in rows] == names
    assert rows[0].figures["tokens/s"].samples == (2.0, 2.0, 2.0)
    assert rows[0].figures["ms/step"].median == 500.0
    assert rows[2].figures["tokens/s"].median == 16.0
    assert [(c.value, c.at_least) for c in checks[:2]] == [(2.0, 1.3), (16.0, 4.5)]
    assert [(c.value, c.at_most) for c in checks[2:]] == [(3.0, 20.0)]
    assert all(check.met for check in checks)


async def test_decode_alone_has_no_ratios() -> None:
    rows, checks = await experiments.decode(bench(FakeArm("interlace", [])), grid(2))
    assert [row.case for row in rows] == ["interlace, batch 2"]
    assert [check.name for check in checks] == ["worst event-loop lag, ms"]


async def test_transformers_runs_at_batch_1_even_if_we_do_not() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log), FakeArm("transformers", log))
    rows, checks = await experiments.decode(both, grid(4))
    assert [row.case for row in rows] == ["interlace, batch 4", "transformers, batch 1"]
    assert [(c.value, c.at_least) for c in checks[:1]] == [(4.0, None)]


async def test_prefill_asks_for_one_token() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log, step_s=0.4), FakeArm("transformers", log, step_s=0.8))
    rows, checks = await experiments.prefill(both, grid(1))
    assert {work.output_tokens for _, work in log} == {1}
    assert rows[0].figures["prompt tokens/s"].median == pytest.approx(64.0)
    assert rows[0].figures["first token ms"].median == pytest.approx(500.0)
    assert checks[0].value == pytest.approx(2.0)
    assert checks[0].at_least == 1.0


async def test_a_new_prompt_that_was_cached_spoils_the_figures() -> None:
    for measure in (experiments.decode, experiments.prefill):
        with pytest.raises(InterlaceError, match="prefix cache"):
            await measure(bench(FakeArm("interlace", [], cached_tokens=16)), grid(1))
        with pytest.raises(InterlaceError, match="KV connector"):
            await measure(bench(FakeArm("interlace", [], loaded_tokens=16)), grid(1))


async def test_each_length_of_prompts_is_compared_with_transformers_at_that_length() -> None:
    log: Log = []
    both = bench(FakeArm("interlace", log, step_s=0.5), FakeArm("transformers", log, step_s=1.0))
    sizes = Grid([1, 2], [8, 16], output_tokens=3, repeats=1)
    rows, checks = await experiments.decode(both, sizes)
    assert [row.case for row in rows] == [
        "interlace, batch 1, 8 tokens",
        "transformers, batch 1, 8 tokens",
        "interlace, batch 2, 8 tokens",
        "interlace, batch 1, 16 tokens",
        "transformers, batch 1, 16 tokens",
        "interlace, batch 2, 16 tokens",
    ]
    assert [work.prompt_tokens for _, work in log] == [8, 8, 8, 16, 16, 16] * 2
    assert [check.value for check in checks[:4]] == [2.0, 4.0, 2.0, 4.0]


async def test_decode_is_told_as_a_share_of_reading() -> None:
    ours = bench(FakeArm("interlace", [], step_s=0.5), yardstick=yardstick(read_rate=100.0))
    rows, _ = await experiments.decode(ours, grid(2))
    assert ours.yardstick is not None
    least_s = ours.yardstick.size(2, 32 + 2, 1).num_bytes / 100.0
    assert rows[0].figures["median step ms"].median == 500.0
    assert rows[0].figures["of memory limit"].median == pytest.approx(least_s / 0.5)


async def test_prefill_is_told_as_a_share_of_computing() -> None:
    ours = bench(FakeArm("interlace", [], step_s=0.4), yardstick=yardstick(matrix_rate=1e4))
    rows, _ = await experiments.prefill(ours, grid(2))
    assert ours.yardstick is not None
    least_s = ours.yardstick.size(2, 0, 32).flops / 1e4
    assert rows[0].figures["of matrix limit"].median == pytest.approx(least_s / 0.5)


async def test_the_bars_of_a_machine_are_for_its_median_step_and_its_prompts() -> None:
    bars = Bars(decode_steps={2: 400.0}, long_prompt=600.0)
    on_gpu = bench(FakeArm("interlace", [], step_s=0.5), on_gpu=True, bars=bars)
    sizes = Grid([1, 2], [200], output_tokens=5, repeats=1)
    _, checks = await experiments.decode(on_gpu, sizes)
    assert [(c.name, c.value, c.at_most) for c in checks[:-1]] == [
        ("decode step, ms: interlace, batch 2", 500.0, 400.0)
    ]
    _, checks = await experiments.prefill(on_gpu, Grid([1], [8192, 512], 1, 1))
    assert [(c.name, c.value, c.at_most) for c in checks[:-1]] == [
        ("prefill, ms: interlace, batch 1, 8192 tokens", 625.0, 600.0)
    ]


async def test_on_a_gpu_ratios_to_transformers_have_no_bar() -> None:
    both = bench(FakeArm("interlace", []), FakeArm("transformers", []), on_gpu=True)
    for measure in (experiments.decode, experiments.prefill):
        _, checks = await measure(both, grid(1))
        assert (checks[0].at_least, checks[0].met) == (None, True)


async def test_what_kernels_take_is_told_of_one_more_run_of_ours() -> None:
    log: Log = []
    tracer = FakeTracer([(10.0, 11.0), (10.5, 11.2), (11.4, 12.0)])
    both = bench(FakeArm("interlace", log, step_s=0.5), FakeArm("transformers", log), tracer=tracer)
    rows, _ = await experiments.decode(both, grid(1))
    assert [name for name, _ in log] == ["interlace", "transformers"] * 4 + ["interlace"]
    assert rows[0].figures["kernels ms"].median == pytest.approx(1800 / 4)
    assert rows[0].figures["no kernel"].median == pytest.approx(0.1)
    assert "no kernel" not in rows[1].figures
    rows, _ = await experiments.prefill(both, grid(1))
    assert rows[0].figures["kernels ms"].median == pytest.approx(600)


async def test_a_tracer_that_saw_nothing_tells_nothing() -> None:
    rows, _ = await experiments.decode(bench(FakeArm("a", []), tracer=FakeTracer([])), grid(1))
    assert "no kernel" not in rows[0].figures
