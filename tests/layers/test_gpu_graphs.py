"""Which captured step stands for a step: decided without a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduling import make_scheduler

from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.layers.gpu import runner
from interlace.layers.gpu.forward import Answer
from interlace.layers.gpu.graphs import GraphPool, StepToReplay
from interlace.layers.gpu.inputs import InputBuffer, StepSize
from interlace.layers.gpu.steps import chunk_lengths
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kernels.gathered_attention import KeyRoom


@dataclasses.dataclass(frozen=True)
class _Graph:
    size: StepSize
    gathers: bool = False
    runtime_mode: GraphMode = GraphMode.FULL
    is_cut: bool = False

    def replay(self, step: StepToReplay) -> Answer:
        raise NotImplementedError


def _pool(*, mixed: list[_Graph], chunks: list[_Graph]) -> GraphPool:
    unused: Any = None
    inputs = InputBuffer(StepSize(8, 8), 8, torch.device("cpu"))
    pool = GraphPool(unused, inputs, unused, nobody=8, max_seq_len=128)
    for shelf, graphs in ((pool._mixed, mixed), (pool._chunks, chunks)):
        for graph in graphs:
            shelf.add(graph)
    return pool


def test_a_graph_that_gathers_stands_only_for_keys_that_fit() -> None:
    short, long = _Graph(StepSize(64, 8)), _Graph(StepSize(256, 8), gathers=True)
    pieces = _Graph(StepSize(640, 8), runtime_mode=GraphMode.PIECEWISE)
    pool = _pool(mixed=[short, long], chunks=[pieces])
    for tokens, can_gather, found in (
        (64, True, short),
        (64, False, short),
        (65, True, long),
        (65, False, pieces),
        (300, True, pieces),
        (700, True, None),
    ):
        size = StepSize(tokens, 2)
        assert pool.find(size, is_decode=False, can_gather=can_gather) is found


@pytest.mark.parametrize(
    ("dtype", "capability", "most", "capacity"),
    [
        (torch.bfloat16, (9, 0), 8192, 26_624),
        (torch.bfloat16, (10, 0), 192, 26_624),
        (torch.bfloat16, (8, 9), 8192, None),
        (torch.bfloat16, (12, 0), 8192, None),
        (torch.float32, (9, 0), 8192, None),
        (torch.bfloat16, (9, 0), 191, None),
    ],
)
def test_there_is_room_for_keys_where_they_are_gathered(
    dtype: torch.dtype,
    capability: tuple[int, int],
    most: int,
    capacity: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the longest request, of 12,288 tokens, and slack."""
    architecture = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128)
    decoder: Any = SimpleNamespace(
        architecture=architecture, max_model_len=12_288, dtype=dtype, device=torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(KeyRoom, "allocate", lambda **sizes: sizes["capacity"])
    found: Any = runner._key_room(decoder, most)
    assert found == capacity


def test_lengths_are_those_at_the_end_of_the_step() -> None:
    scheduler = make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=10)
    params = SamplingParams(ignore_eos=True, temperature=0, max_tokens=9)
    for number, length in enumerate((3, 25)):
        prompt = [number + 1] * length
        scheduler.add_request(
            Request(f"r{number}", prompt, params, seed=0, arrival=number, block_size=4)
        )
    found = []
    for _ in range(4):
        output = scheduler.schedule()
        assert output is not None
        found.append(sorted(chunk_lengths(output)))
        sampled = dict.fromkeys(output.sampling_req_ids, (5,))
        scheduler.update_from_output(output, ModelRunnerOutput(sampled))
    assert found == [[3, 7], [16], [25], []]
