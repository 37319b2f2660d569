"""The GPU's runner without a GPU: its kernels under Triton's interpreter, eager, at both depths."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scheduling import make_scheduler
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace.engine.ports import PendingStep
from interlace.engine.request import Request, RequestStatus
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.gpu import runner as runner_module
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.kernels import attention_plan, matvec, paged_attention
from interlace.layers.kernels.attention_plan import Tiles
from interlace.layers.kernels.gathered_attention import KeyRoom, gather_keys
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
BLOCK = 4
MODEL = tiny_model(dtype=torch.float32)
both_depths = pytest.mark.parametrize("depth", [1, 2])


@pytest.fixture(autouse=True)
def _products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for few rows has tests of its own, and takes most of the time interpreted."""
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)


class Driver:
    """A scheduler over the runner: as many steps are launched ahead as the depth allows."""

    def __init__(
        self, *, depth: int, num_blocks: int = 40, budget: int = 16, seqs: int = 4
    ) -> None:
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK,
            depth=depth,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=MODEL.max_model_len,
        )
        a = MODEL.architecture
        pages = KVPages(
            num_layers=a.num_layers,
            num_blocks=num_blocks + 1,
            block_size=BLOCK,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for layer in pages.layers:
            layer[1:] = torch.nan  # nothing may be read that was not written
        self.runner = GpuRunner(
            MODEL.decoder, pages, (), max_num_seqs=seqs, max_num_batched_tokens=budget, num_sms=4
        )
        self.inflight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.outputs: dict[str, list[int]] = {}

    def add(self, prompt: Sequence[int], **params: Any) -> Request:
        params.setdefault("temperature", 0)
        request = Request(
            f"r{len(self.outputs)}",
            prompt,
            SamplingParams(ignore_eos=True, **params),
            seed=len(self.outputs),
            arrival=len(self.outputs),
            block_size=BLOCK,
        )
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)
        return request

    def step(self) -> bool:
        """Launch what may be launched, then apply the oldest; False if there is nothing to do."""
        while len(self.inflight) < self.scheduler.config.max_inflight_steps:
            output = self.scheduler.schedule()
            if output is None:
                break
            self.inflight.append((output, self.runner.launch(output)))
        if not self.inflight:
            return False
        output, pending = self.inflight.popleft()
        for update in self.scheduler.update_from_output(output, pending()):
            self.outputs[update.request.request_id] += update.new_token_ids
            assert update.request.error is None
        return True

    def run(self) -> None:
        while self.step():
            pass


@pytest.fixture(params=["by pages", "gathered", "no room to gather"])
def gathers_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether keys are gathered, of short chunks in float32 too; a True is added for each call."""
    calls: list[bool] = []
    if request.param == "by pages":
        return calls

    def gather(*args: Any) -> None:
        calls.append(True)
        gather_keys(*args)

    def may(head_dim: int, group: int, max_query_len: int, dtype: torch.dtype) -> bool:
        return max_query_len > 1

    for module in (attention_plan, runner_module):
        monkeypatch.setattr(module, "gathers", may)
    for name in ("LARGE_TILES", "SMALL_TILES"):
        monkeypatch.setattr(attention_plan, name, Tiles(16, 32, num_warps=4, num_stages=2))
    monkeypatch.setattr(paged_attention, "gather_keys", gather)
    if request.param == "no room to gather":
        monkeypatch.setattr(KeyRoom, "holds", lambda *_: False)
    return calls


@both_depths
def test_answers_are_those_of_the_plain_decoder(
    depth: int, gathers_keys: list[bool], request: pytest.FixtureRequest
) -> None:
    """Chunks, decodes and mixed steps, with prefixes shared and one tail copied."""
    driver = Driver(depth=depth, budget=7)
    common = [5, 9, 2, 7, 1, 1, 8, 3]
    prompts = [common + [i] * i for i in range(1, 3)] + [common[:6]]
    for prompt in prompts[:2]:
        driver.add(prompt, max_tokens=3)
    driver.run()
    for prompt in prompts[2:]:
        driver.add(prompt, max_tokens=3)
    driver.run()
    for request_id, prompt in zip(driver.outputs, prompts, strict=True):
        assert driver.outputs[request_id] == plain_answer(MODEL, prompt, 3), request_id
    assert any(gathers_keys) == ("[gathered" in request.node.name)


def test_requests_that_are_preempted_come_to_the_same_end() -> None:
    driver = Driver(depth=2, num_blocks=5, seqs=3)
    prompts = [[i + 1, 4, 2, 9, 7] for i in range(3)]
    for prompt in prompts:
        driver.add(prompt, max_tokens=6)
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    for request_id, prompt in zip(driver.outputs, prompts, strict=True):
        assert driver.outputs[request_id] == plain_answer(MODEL, prompt, 6)


def test_rows_for_the_plain_sampler_see_their_whole_past() -> None:
    """A repetition penalty needs the token that a step in flight is sampling."""
    mixed = Driver(depth=2)
    alone = Driver(depth=1)
    wants: list[dict[str, Any]] = [
        {"repetition_penalty": 5.0},
        {"temperature": 0.8, "top_k": 5},
        {},
    ]
    for i, params in enumerate(wants):
        mixed.add([i + 2, 3, 3, 7], max_tokens=3, **params)
    mixed.run()
    for i, params in enumerate(wants):
        alone.add([i + 2, 3, 3, 7], max_tokens=3, **params)
        alone.run()
    assert mixed.outputs == alone.outputs


def test_random_traffic() -> None:
    """Requests come, and are aborted, at any time; ids are used again."""
    choose = random.Random(2)
    driver = Driver(depth=2, num_blocks=14, budget=9, seqs=3)
    prompts: dict[str, list[int]] = {}
    requests: list[Request] = []
    for _ in range(14):
        if choose.random() < 0.3:
            prompt = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 9))]
            request = driver.add(prompt, max_tokens=choose.randint(1, 7))
            prompts[request.request_id] = prompt
            requests.append(request)
        if choose.random() < 0.1 and requests:
            driver.scheduler.finish_request(choose.choice(requests), RequestStatus.FINISHED_ABORTED)
        driver.step()
    driver.run()
    for request in requests:
        got = driver.outputs[request.request_id]
        assert got == plain_answer(MODEL, prompts[request.request_id], len(got))
    assert not driver.scheduler.requests
