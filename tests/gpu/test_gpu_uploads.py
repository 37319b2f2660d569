"""What a step uploads comes by while a load of a GB is on its way, however long the step is."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from interlace.layers.attention import SequenceChunk
from interlace.layers.gpu.inputs import BatchItem, InputBuffer, StepSize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MOST_TOKENS, MOST_ADDITIONS = 8192, 1024
NUM_COPIES, COPY_BYTES = 32, 32 << 20


@pytest.mark.parametrize("num_tokens", [1, 100, 300, 700, 2000, 8192])
def test_an_upload_does_not_wait_for_copies_on_another_stream(num_tokens: int) -> None:
    device = torch.device("cuda", 0)
    buffer = InputBuffer(StepSize(MOST_TOKENS, 1), MOST_ADDITIONS, device)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pages = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    known = np.arange(num_tokens, dtype=np.int64) * 7
    item = BatchItem(0, SequenceChunk(list(range(1, 513)), 0, num_tokens), known)
    places = np.arange(513), np.arange(513)
    waits, loads = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(beside):
            for _ in range(NUM_COPIES):
                pages.copy_(host, non_blocking=True)
        queued = time.perf_counter()
        inputs, added = buffer.upload([item], StepSize(num_tokens, 1), 16, 1, places)
        torch.cuda.current_stream().synchronize()
        waits.append(time.perf_counter() - queued)
        assert not beside.query()
        beside.synchronize()
        loads.append(time.perf_counter() - begin)
        assert inputs.token_ids.tolist() == known.tolist()
        assert added is not None
        assert added.block_ids[:513].tolist() == list(range(513))
    print(
        f"\n{num_tokens} tokens are there {sorted(waits)[2] * 1e6:.0f} us after they were queued,"
        f" beside a load of {sorted(loads)[2] * 1e3:.1f} ms"
    )
    assert sorted(waits)[2] < sorted(loads)[2] / 4
