"""Cached prompts, on arms of a known speed."""

from __future__ import annotations

import pytest
from bench_kit import FakeArm, FakeTracer, Log, bench, yardstick

from interlace.bench import hits
from interlace.bench.bars import Bars
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.engine.errors import InterlaceError


async def test_hit_sends_each_prompt_twice() -> None:
    log: Log = []
    rows, checks = await hits.hit(bench(FakeArm("interlace", log, caches=True)), 1000, 2)
    prompts = [work.prompts for _, work in log]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    assert [work.output_tokens for _, work in log] == [1, 17] * 3
    assert rows[0].figures["first token / step"].samples == (1.25, 1.25)
    assert rows[0].figures["cached tokens"].median == 992
    assert (checks[0].value, checks[0].at_most, checks[0].met) == (1.25, 1.5, True)


async def test_a_missed_hit_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="only 0 of 1000"):
        await hits.hit(bench(FakeArm("interlace", [])), 1000, 2)


class PrefixArm(FakeArm):
    """Caches the longest beginning that any earlier prompt had too."""

    async def run(self, work: Work) -> Sample:
        (prompt,) = work.prompts
        self._cached_tokens = max((_common(prompt, seen) for seen in self._seen), default=0)
        return await super().run(work)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


async def test_one_prefix_is_computed_once_and_what_follows_is_new_each_time() -> None:
    log: Log = []
    rows, checks = await hits.hit_with_new(bench(PrefixArm("ours", log)), 32, [4, 1], 2)
    prompts = [work.prompts[0] for _, work in log]
    assert [len(prompt) for prompt in prompts] == [32, *([36, 33] * 3)]
    assert {prompt[:32] for prompt in prompts} == {prompts[0]}
    assert len({prompt[32] for prompt in prompts[1:]}) == 6
    assert {work.output_tokens for _, work in log} == {1}
    assert [row.case for row in rows] == ["ours, 32 cached + 4 new", "ours, 32 cached + 1 new"]
    assert rows[0].figures["cached tokens"].low == 32
    assert rows[0].figures["first token ms"].median == 625.0
    assert [check.name for check in checks] == ["worst event-loop lag, ms"]


async def test_a_prefix_that_is_not_found_whole_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="only 31 of 32"):
        await hits.hit_with_new(bench(FakeArm("ours", [], cached_tokens=31)), 32, [4], 1)


async def test_a_hit_is_told_as_a_share_of_what_takes_longer() -> None:
    for rates, share in (((1e4, 1e9), "reading"), ((1e9, 1e4), "computing")):
        measure = yardstick(read_rate=rates[0], matrix_rate=rates[1])
        rows, _ = await hits.hit_with_new(
            bench(PrefixArm("ours", []), yardstick=measure), 32, [4], 1
        )
        size = measure.size(1, 32, 4)
        least_s = (size.num_bytes if share == "reading" else size.flops) / 1e4
        assert rows[0].figures["of limit"].median == pytest.approx(least_s / 0.625)


async def test_bars_and_kernels_of_a_gpu() -> None:
    ours = PrefixArm("ours", [])
    on_gpu = bench(ours, on_gpu=True, tracer=FakeTracer([(1.0, 1.5)]), bars=Bars(hits={4: 700.0}))
    rows, checks = await hits.hit_with_new(on_gpu, 8192, [4, 5], 1)
    assert rows[1].figures["no kernel"].median == pytest.approx(0.2)
    assert [(c.value, c.at_most) for c in checks[:-1]] == [(625.0, 700.0)]
    rows, checks = await hits.hit(bench(FakeArm("ours", [], caches=True), on_gpu=True), 1000, 1)
    assert checks[0].at_most is None
