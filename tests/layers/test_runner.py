"""The real runner on a tiny random decoder: right, repeatable to the bit, blind to poison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from tiny_model import VOCAB_SIZE, plain_answer, plain_logits, tiny_model

from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from interlace.layers.kv_pages import KVPages
from interlace.layers.runner import ModelRunner

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=50, logprobs=3)


class Driver:
    """Sends one request's steps to a runner whose pages are poisoned wherever nobody wrote."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.model = tiny_model()
        a = self.model.architecture
        self.pages = KVPages(
            num_layers=a.num_layers,
            num_blocks=20,
            block_size=BLOCK,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        for layer in self.pages.layers:
            layer[1:] = math.nan
        self.runner = ModelRunner(self.model.decoder, [self.pages], ())
        self.prompt = tuple(prompt)
        self.num_steps = 0

    def first(
        self, num_tokens: int, *, start: int = 0, copies: tuple[BlockCopy, ...] = ()
    ) -> ModelRunnerOutput:
        """Begin at `start`, with blocks 7, 8, ... or the copies' targets for everything."""
        blocks = list(range(7, 20))
        for copy in copies:
            blocks[copy.source_block_id - 7] = copy.target_block_id
        new = NewRequestData("r", self.prompt, GREEDY, 0, (blocks,), start)
        return self._send([new], CachedRequestData(), start, num_tokens, copies)

    def more(self, start: int, num_tokens: int) -> ModelRunnerOutput:
        cached = CachedRequestData(
            req_ids=["r"],
            new_block_ids=[None],
            num_computed_tokens=[start],
            num_output_tokens=[max(0, start + num_tokens - len(self.prompt))],
        )
        return self._send([], cached, start, num_tokens)

    def _send(
        self,
        new: list[NewRequestData],
        cached: CachedRequestData,
        start: int,
        num_tokens: int,
        copies: tuple[BlockCopy, ...] = (),
    ) -> ModelRunnerOutput:
        self.num_steps += 1
        samples = start + num_tokens >= len(self.prompt)
        return self.runner.execute(
            SchedulerOutput(
                step_id=self.num_steps,
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": num_tokens},
                total_num_scheduled_tokens=num_tokens,
                finished_req_ids=frozenset(),
                preempted_req_ids=frozenset(),
                sampling_req_ids=frozenset({"r"} if samples else ()),
                block_copies=copies,
            )
        )


def _prompt(length: int) -> list[int]:
    return [(7 * i + i * i) % VOCAB_SIZE for i in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 64])
def test_any_chunks_give_the_plain_answer_over_poisoned_pages(length: int, chunk: int) -> None:
    driver = Driver(_prompt(length))  # I4
    output = driver.first(min(chunk, length))
    for start in range(chunk, length, chunk):
        assert not output.sampled_token_ids
        output = driver.more(start, min(chunk, length - start))
    tokens = [*output.sampled_token_ids["r"]]
    for position in range(length, length + 7):
        tokens += driver.more(position, 1).sampled_token_ids["r"]
    assert tokens == plain_answer(driver.model, driver.prompt, 8)


def test_nothing_is_kept_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each operation of a step costs more."""
    driver = Driver(_prompt(5))
    modes: list[bool] = []

    def sample(*_: object) -> ModelRunnerOutput:
        modes.append(torch.is_inference_mode_enabled())
        return ModelRunnerOutput()

    monkeypatch.setattr("interlace.layers.runner.sample_requests", sample)
    driver.first(5)
    assert modes == [True]


def test_equal_schedules_give_equal_bits() -> None:
    def logprobs() -> list[object]:
        driver = Driver(_prompt(13))
        driver.first(6)
        outputs = [driver.more(6, 7)] + [driver.more(13 + i, 1) for i in range(6)]
        return [output.logprobs["r"] for output in outputs]

    assert logprobs() == logprobs()  # I13


def test_a_prefix_that_lies_on_the_device_gives_the_bits_of_the_run_that_computed_it() -> None:
    driver = Driver(_prompt(13))
    driver.first(8)
    computed = driver.more(8, 5)
    # Another request whose first two blocks are there already, scheduled in the same way.
    hit = driver.first(5, start=8)
    assert hit.logprobs == computed.logprobs  # I13


@pytest.mark.parametrize("num_copied", [1, 3])
def test_a_copied_block_is_as_good_as_the_block(num_copied: int) -> None:
    driver = Driver(_prompt(13))
    driver.first(4 + num_copied)
    computed = driver.more(4 + num_copied, 9 - num_copied)
    # What the step computes goes to the copy: the source keeps its own last tokens.
    before = [pages[8].clone() for pages in driver.pages.layers]
    for pages in driver.pages.layers:
        pages[9:] = math.nan
    copied = driver.first(9 - num_copied, start=4 + num_copied, copies=(BlockCopy(8, 3),))
    assert copied.logprobs == computed.logprobs  # I13, I14
    assert all(
        torch.equal(pages[8], old) for pages, old in zip(driver.pages.layers, before, strict=True)
    )
    assert all(torch.equal(pages[3], pages[8]) for pages in driver.pages.layers)


def test_logprobs_are_those_of_the_plain_logits() -> None:
    driver = Driver(_prompt(9))
    (found,) = driver.first(9).logprobs["r"]
    expected = torch.log_softmax(plain_logits(driver.model, driver.prompt).double(), 0)
    top = expected.topk(3)
    assert [i for i, _ in found.top] == top.indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert (found.rank, found.logprob) == (1, found.top[0][1])


def test_a_step_without_tokens_only_forgets() -> None:
    driver = Driver(_prompt(3))
    driver.first(3)
    empty = SchedulerOutput(
        2, [], CachedRequestData(), {}, 0, frozenset({"r", "unknown"}), frozenset(), frozenset()
    )
    assert driver.runner.execute(empty) == ModelRunnerOutput()
    assert not driver.runner.state.requests
