"""Launching a step never makes the host wait for the steps before it."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from scheduling import make_scheduler
from tiny_model import tiny_model

from interlace.engine.ports import PendingStep
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.kv_pages import KVPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BLOCK = 4


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever would wait for the device raises."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def small_runner() -> GpuRunner:
    model = tiny_model(dtype=torch.float32, head_dim=64, device="cuda")
    a = model.architecture
    pages = KVPages(
        num_layers=a.num_layers,
        num_blocks=21,
        block_size=BLOCK,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        dtype=torch.float32,
        device=torch.device("cuda"),
    )
    return GpuRunner(model.decoder, pages, (), max_num_seqs=4, max_num_batched_tokens=16, num_sms=8)


def test_no_launch_waits_for_the_device() -> None:
    """Blocks that are copied and uploaded, chunks, decodes, and rows that draw."""
    runner = small_runner()
    scheduler = make_scheduler(
        num_blocks=20, depth=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=40
    )
    num_copied = 0
    inflight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
    for number in range(8):
        params = SamplingParams(
            ignore_eos=True, temperature=0.8 * (number % 2), top_k=9, top_p=0.9, max_tokens=6
        )
        prompt = [number % 4 + 1, 5, 9, 2, 7, 1, 3]
        scheduler.add_request(
            Request(str(number), prompt, params, seed=number, arrival=number, block_size=BLOCK)
        )
        if number % 4 < 3:
            continue
        # The second time each prompt finds a block that begins with its last tokens.
        while True:
            while len(inflight) < 2 and (output := scheduler.schedule()) is not None:
                num_copied += len(output.block_copies)
                with nothing_waits():
                    inflight.append((output, runner.launch(output)))
            if not inflight:
                break
            output, pending = inflight.popleft()
            for update in scheduler.update_from_output(output, pending()):
                assert update.request.error is None
    runner.close()
    assert num_copied, "a block was begun"


def test_the_end_of_a_step_that_samples_nothing_is_waited_for() -> None:
    runner = small_runner()
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(ignore_eos=True, temperature=0, max_tokens=1)
    prompt = [1, 2, 3] * 15
    scheduler.add_request(Request("long", prompt, params, seed=0, arrival=0, block_size=BLOCK))
    for is_timed in (False, True):  # the first time kernels are compiled
        output = scheduler.schedule()
        assert output is not None
        assert not output.sampling_req_ids
        if is_timed:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: 0.1 s
        result = runner.launch(output)()
        assert torch.cuda.current_stream().query()
        assert result.sampled_token_ids == {}
        scheduler.update_from_output(output, result)
    runner.close()


def test_blocks_are_zeroed_without_waiting() -> None:
    pages = KVPages(
        num_layers=2,
        num_blocks=4,
        block_size=BLOCK,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cuda"),
    )
    for layer in pages.layers:
        layer.fill_(1.0)
    with nothing_waits():
        pages.zero_blocks([1, 3])
    for layer in pages.layers:
        assert layer.flatten(1).mean(dim=1).tolist() == [1.0, 0.0, 1.0, 0.0]
