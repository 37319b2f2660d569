"""A step of a real engine on a CPU, recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from step_trace_kit import Ticks, a_trace

from interlace.bench.session import Prepared, prepare
from interlace.bench.settings import Settings
from interlace.bench.step_trace.build import LayerLoad
from interlace.bench.step_trace.connector import _TapedCopies
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.file import to_json
from interlace.bench.step_trace.parse import from_json
from interlace.bench.step_trace.session import median_trace, record_timeline
from interlace.bench.step_trace.setup import TimelinePlan
from interlace.bench.step_trace.tape import StepTape
from interlace.bench.step_trace.trace import HybridTrace, StepTrace
from interlace.connectors.pipeline import worker_backward
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.page_copies import CopyWay, PageCopies

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Prepared]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = Settings(f"dummy:{tmp_path}/config.json", max_num_batched_tokens=128)
    with contextlib.closing(prepare(settings, Silent())) as ready:
        yield ready


async def test_a_step_of_a_real_engine(prepared: Prepared) -> None:
    plan = TimelinePlan(prefix_tokens=96, new_tokens=20, repeats=2, group_size=9)
    async with asyncio.timeout(60):
        report, trace = await record_timeline(prepared, plan, MonotonicClock(), Silent())
    assert isinstance(trace, StepTrace)
    facts = trace.facts
    assert (facts.loaded_tokens, facts.new_tokens, facts.clock) == (96, 20, "host")
    assert facts.group_size == 3, "there are no more layers"
    assert facts.step_id > 1
    assert [span.label for span in trace.load] == ["0", "1", "2"]
    assert [span.label for span in trace.compute] == ["embed", "0", "1", "2", "head"]
    # K and V of 96 tokens, 2 heads of 16 numbers of 4 bytes
    assert [span.num_bytes for span in trace.load] == [96 * 2 * 2 * 16 * 4] * 3
    assert trace.compute[1].begin_ns <= trace.compute[1].end_ns
    assert 0 < figures_of(trace).total_s < 60
    assert from_json(to_json(trace)) == trace
    (row,) = report.rows
    assert row.case == "20 new"
    assert len(row.figures["total ms"].samples) == 2
    assert report.settings["group_size"] == 3


def test_layers_of_a_group_are_noted_one_by_one() -> None:
    records = torch.ones(4, 3, 8, dtype=torch.uint8)
    layers = [torch.zeros(6, 8, dtype=torch.uint8) for _ in range(3)]
    tape = StepTape(Ticks())
    copies = _TapedCopies(PageCopies(records, layers), tape)
    copied = copies.load_layers(range(1, 3), copies.prepare([(0, 1, 2), (2, 5, 1)]))
    assert next(iter(copied)) == (CopyWay.STRIDED, 2, 24)
    assert tape._loads == {1: LayerLoad(1000, 2000, 24)}, "each as it is asked for"
    assert len(list(copied)) == 1
    assert tape._loads == {1: LayerLoad(1000, 2000, 24), 2: LayerLoad(3000, 4000, 24)}
    assert layers[2].any()


async def test_a_prompt_from_both_ends_of_a_real_engine(prepared: Prepared) -> None:
    plan = TimelinePlan(prefix_tokens=320, new_tokens=20, repeats=3, load_mode="hybrid")
    async with asyncio.timeout(60):
        report, trace = await record_timeline(prepared, plan, MonotonicClock(), Silent())
    assert isinstance(trace, HybridTrace)
    facts = trace.facts
    assert (facts.num_layers, facts.block_size, facts.clock) == (3, 16, "host")
    assert facts.front_tokens + facts.loaded_tokens == 320
    assert facts.front_tokens >= 16 <= facts.loaded_tokens, "a block at least from each side"
    assert sum(step.num_tokens for step in facts.steps) == facts.front_tokens + 20
    ids = [step.step_id for step in facts.steps]
    assert ids == sorted(set(ids))
    assert [span.label for span in trace.compute] == ["embed", "0", "1", "2", "head"] * len(ids)
    # K and V of a token in 3 layers, 2 heads of 16 numbers of 4 bytes
    num_bytes = sum(span.num_bytes for span in trace.load)
    assert num_bytes == facts.loaded_tokens * 3 * 2 * 2 * 16 * 4
    assert max(span.end_ns for span in trace.load) <= trace.compute[-1].end_ns == trace.end_ns
    assert from_json(to_json(trace)) == trace
    (row,) = report.rows
    both = [row.figures[f"{side} tokens"] for side in ("front", "back")]
    assert [a + b for a, b in zip(*(spread.samples for spread in both), strict=True)] == [320] * 3
    assert len(row.figures["steps"].samples) == 3
    assert report.settings["load_mode"] == "hybrid"
    assert "group_size" not in report.settings


async def test_each_slice_of_a_real_engine_is_seen(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of one block each, as a large model would have several of more."""
    monkeypatch.setattr(worker_backward, "SLICES_PER_WINDOW", 1 << 40)
    plan = TimelinePlan(prefix_tokens=320, new_tokens=20, repeats=2, load_mode="hybrid")
    async with asyncio.timeout(60):
        _, trace = await record_timeline(prepared, plan, MonotonicClock(), Silent())
    assert isinstance(trace, HybridTrace)
    first = trace.facts.meeting_block
    assert [span.label for span in trace.load] == [str(n) for n in range(19, first - 1, -1)]
    assert {span.num_bytes for span in trace.load} == {16 * 3 * 2 * 2 * 16 * 4}


async def test_new_tokens_behind_both_ends_may_take_several_steps(prepared: Prepared) -> None:
    plan = TimelinePlan(prefix_tokens=64, new_tokens=200, repeats=1, load_mode="hybrid")
    async with asyncio.timeout(60):
        _, trace = await record_timeline(prepared, plan, MonotonicClock(), Silent())
    assert isinstance(trace, HybridTrace)
    assert len(trace.facts.steps) >= 3
    assert max(step.num_tokens for step in trace.facts.steps) == 128


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TimelinePlan(16, 20, 1, load_mode="hybrid"), "take 32 or more for --load-mode hybrid"),
        (TimelinePlan(40, 20, 1, load_mode="hybrid"), "take a multiple of 16"),
        (TimelinePlan(64, 20, 1, 2, "hybrid"), "--group-size is of loads layer by layer"),
    ],
)
def test_plans_for_both_ends_that_cannot_be_had(plan: TimelinePlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan.check()


async def test_new_tokens_that_take_several_steps(prepared: Prepared) -> None:
    plan = TimelinePlan(prefix_tokens=96, new_tokens=200, repeats=1, group_size=1)
    with pytest.raises(ConfigError, match="computed 128 of 200 new tokens"):
        await record_timeline(prepared, plan, MonotonicClock(), Silent())


async def test_a_prefix_that_is_not_whole_blocks(prepared: Prepared) -> None:
    plan = TimelinePlan(prefix_tokens=100, new_tokens=20, repeats=1, group_size=1)
    with pytest.raises(ConfigError, match="take a multiple of 16"):
        await record_timeline(prepared, plan, MonotonicClock(), Silent())


def test_the_median() -> None:
    traces = [a_trace(2, load_us=us) for us in (500, 100, 300, 200)]
    assert median_trace(traces) is traces[3]
    assert median_trace(traces[:3]) is traces[2]


def test_a_tape_of_half_a_step_is_refused() -> None:
    tape = StepTape(Ticks())
    tape.end_forward()  # of a step that loads nothing
    tape.end()
    with pytest.raises(InterlaceError, match="0 layers loaded, 0 computed"):
        tape.marks()
    tape.begin()
    tape.reach(0)
    tape.go_on(0)
    tape.end_forward()
    tape.end()
    with pytest.raises(InterlaceError, match="0 layers loaded, 1 computed"):
        tape.marks()
    tape.add_load(0, tape.now_ns(), 10)
    tape.add_load(0, tape.now_ns(), 20)
    (load,) = tape.marks().loads
    assert load.num_bytes == 30
    tape.clear()
    with pytest.raises(InterlaceError):
        tape.marks()
