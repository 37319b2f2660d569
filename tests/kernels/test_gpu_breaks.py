"""What breaks the GPU's runner: steps that turn out void, and memory that nobody lets go of."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from scheduling import make_scheduler
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.ports import PendingStep
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers import batch_sampler
from interlace.layers.batch_sampler import Draw
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.device_copies import Upload
from interlace.layers.gpu import runner as runner_module
from interlace.layers.gpu.graphs import GraphSizes
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.gpu.sampling import Mark
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kernels import matvec
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
BLOCK = 4
MODEL = tiny_model(dtype=torch.float32)


@pytest.fixture(autouse=True)
def _products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for few rows has tests of its own, and takes most of the time interpreted."""
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)


def _pages() -> KVPages:
    a = MODEL.architecture
    return KVPages(
        num_layers=a.num_layers,
        num_blocks=41,
        block_size=BLOCK,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _runner(pages: KVPages) -> GpuRunner:
    return GpuRunner(MODEL.decoder, pages, (), max_num_seqs=4, max_num_batched_tokens=9, num_sms=4)


def test_a_token_of_a_void_step_is_not_an_input_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt's last chunk is under way when the step before it says that its prefix is bad."""
    pages = _pages()
    runner = _runner(pages)
    scheduler = make_scheduler(
        num_blocks=40,
        block_size=BLOCK,
        depth=2,
        max_num_batched_tokens=9,
        max_num_seqs=4,
        max_model_len=MODEL.max_model_len,
        failure_policy="recompute",
    )
    # There is no connector to hear of the rest of a report.
    monkeypatch.setattr(scheduler, "_apply_reports", lambda *_: None)
    answers: dict[str, list[int]] = {"stores": [], "beside": [], "hits": []}

    def add(name: str, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(ignore_eos=True, temperature=0, max_tokens=max_tokens)
        request = Request(name, prompt, params, seed=0, arrival=0, block_size=BLOCK)
        scheduler.add_request(request)
        return request

    def run(bad: set[int]) -> None:
        """The first step that is applied reports `bad` blocks."""
        inflight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        while True:
            while len(inflight) < 2 and (output := scheduler.schedule()) is not None:
                inflight.append((output, runner.launch(output)))
            if not inflight:
                return
            output, pending = inflight.popleft()
            reports = KVConnectorOutput(invalid_block_ids=bad) if bad else None
            result = dataclasses.replace(pending(), kv_connector_output=reports)
            bad = set()
            for update in scheduler.update_from_output(output, result):
                assert update.request.error is None
                answers[update.request.request_id] += update.new_token_ids

    prompt = [5, 9, 2, 7, 1, 1, 8, 3, 4, 6, 2, 9]
    stored = add("stores", prompt[:9], 1)
    run(set())
    block = scheduler.kv_cache.pool.get_cached_block(stored.block_hashes[1])
    assert block is not None
    for layer in pages.layers:
        layer[block.block_id] *= -3
    # It takes most of the first step's budget, and little later: then all that is to be computed
    # again fits into one step.
    add("beside", [3, 1, 4, 1, 5, 9, 2], 3)
    add("hits", prompt, 4)
    run({block.block_id})
    assert answers["hits"] == plain_answer(MODEL, prompt, 4)


def test_a_runner_goes_when_nobody_has_it_any_more() -> None:
    """Its graphs and buffers are memory that the next one needs: not when the collector comes."""
    runner = _runner(_pages())
    graphs = weakref.ref(runner._graphs)
    runner.close()
    del runner
    assert graphs() is None


def test_what_all_requests_draw_with_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting float64 rows of a whole vocabulary takes more memory than many a step."""
    drawn: list[tuple[int, ...]] = []

    def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw], upload: Upload) -> torch.Tensor:
        drawn.append(tuple(logits.shape))
        assert any(draw.top_k for draw in draws), "with the sort"
        return batch_sampler.draw_tokens(logits, draws, upload)

    monkeypatch.setattr(runner_module, "draw_tokens", draw_tokens)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _runner(_pages()).run_padding()
    assert drawn == [(4, VOCAB_SIZE)]


def test_a_step_that_samples_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a long prompt's chunks would all be under way at once."""
    waited: list[str] = []
    monkeypatch.setattr(Mark, "wait", lambda mark: waited.append("end"))
    runner = _runner(_pages())
    scheduler = make_scheduler(num_blocks=40, block_size=BLOCK, max_num_batched_tokens=9)
    params = SamplingParams(ignore_eos=True, temperature=0, max_tokens=1)
    scheduler.add_request(
        Request("long", [1, 2, 3] * 5, params, seed=0, arrival=0, block_size=BLOCK)
    )
    output = scheduler.schedule()
    assert output is not None
    pending = runner.launch(output)
    assert waited == []
    assert pending().sampled_token_ids == {}
    assert waited == ["end"]


def test_no_memory_to_prepare_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_attention(runner: GpuRunner, progress: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(GpuRunner, "_compile_attention", compile_attention)
    with pytest.raises(ConfigError, match=r"prepare attention: lower gpu_memory_utilization"):
        _runner(_pages()).capture(GraphMode.NONE, GraphSizes(), Silent())
