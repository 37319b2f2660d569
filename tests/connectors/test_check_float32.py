"""`interlace check` with pages of float32, as a GPU has them, on a CPU."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from check_kit import check_in
from graph_connectors import BROKEN
from hypothesis import given
from hypothesis import strategies as st
from memory_broken import Broken, all_broken

from interlace.connectors.conformance import Harness, Script, ScriptedConnector, check_connector
from interlace.connectors.conformance.layer_pages import LayerPages
from interlace.connectors.conformance.number_format import FLOAT32, FLOAT64, NumberFormat
from interlace.connectors.conformance.oracle import Oracle
from interlace.connectors.conformance.pages import Content, Pages
from interlace.connectors.conformance.subject import Subject
from interlace.connectors.conformance.tiny_model import tiny_model
from interlace.engine.block_pool import BlockPool
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import ConfigError
from interlace.engine.events import EventBus
from interlace.engine.sampling_params import SamplingParams

FORMATS = [FLOAT64, FLOAT32]
both_formats = pytest.mark.parametrize("number_format", FORMATS, ids=["float64", "float32"])
MUTANTS = (
    "layer-loads-complete",
    "loaded-kv-right",
    "loads-reported-when-done",
    "loads-write-only-their-blocks",
    "saves-fenced",
    "saves-visible-when-whole",
    "plan-reset",
    "failures-exact",
)


# ---------------------------------------------------------------- numbers as bits


@both_formats
@given(data=st.data())
def test_paint_is_a_nan_that_tells_its_number(
    number_format: NumberFormat, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, number_format.low))
    bits = np.full(3, number_format.paint(number), number_format.bits)
    copied = torch.from_numpy(number_format.as_floats(bits)).clone().numpy()
    assert np.isnan(copied).all()
    assert number_format.numbers_of(copied.view(number_format.bits)) == {number}


@both_formats
@given(data=st.data())
def test_nothing_that_is_computed_is_paint(
    number_format: NumberFormat, data: st.DataObject
) -> None:
    width: Literal[32, 64] = 64 if number_format is FLOAT64 else 32
    number = data.draw(st.floats(width=width, allow_nan=False))
    found = np.array([number, math.nan, -math.nan, math.inf], number_format.floats)
    gpu_nan = np.array([2 ** (width - 1) - 1], number_format.bits)
    bits = np.concatenate([found.view(number_format.bits), gpu_nan])
    assert not number_format.is_paint(bits).any()


@both_formats
def test_numbers_begin_again_at_one(number_format: NumberFormat) -> None:
    most = number_format.low
    assert [number_format.wrapped(n) for n in (1, most, most + 1)] == [1, most, 1]


@both_formats
@pytest.mark.parametrize("is_strided", [False, True])
def test_pages_are_seen_in_place(number_format: NumberFormat, is_strided: bool) -> None:
    pages = torch.zeros(5, 2, 3, 4, 8, dtype=number_format.dtype)
    if is_strided:
        pages = pages.transpose(2, 3).contiguous().transpose(2, 3)
    layer = LayerPages(pages)
    layer.fill(1, number_format.paint(7))
    assert pages[1].isnan().all()
    assert not pages[0].isnan().any()
    pages[2] = 1.5
    assert (number_format.as_floats(layer.all())[2] == 1.5).all()
    layer.put(3, layer.block(2) ^ 1)
    assert (pages[3] != 1.5).all()
    assert torch.allclose(pages[3], pages[2])


# ---------------------------------------------------------------- pages


def painted(number_format: NumberFormat) -> tuple[Pages, torch.Tensor, list[int]]:
    """Pages of which a step's blocks were painted; the tensor, and the ids of the blocks."""
    tensor = torch.zeros(6, 2, 4, 2, 8, dtype=number_format.dtype)
    pages = Pages([{"layer": tensor}], iter(range(1, 100)))
    pool = BlockPool(6, enable_caching=True, clock=MonotonicClock(), events=EventBus())
    pages.follow(pool)
    ids = [block.block_id for block in pool.get_new_blocks(3)]
    pages.planned(1)
    pages.paint(1)
    return pages, tensor, ids


@both_formats
def test_what_lies_in_a_block_is_told_apart(number_format: NumberFormat) -> None:
    pages, tensor, (first, second, third) = painted(number_format)
    right = np.random.default_rng(3).standard_normal((4, 2, 2, 8))
    all_slots = slice(0, 4)
    assert pages.look(0, "layer", first, all_slots, right) is Content.UNTOUCHED
    tensor[first] = tensor[second]
    assert pages.look(0, "layer", first, all_slots, right) is Content.PAINTED
    generation = pages.generation_of(second)
    assert pages.painted_generations(0, "layer", first, all_slots) == {generation}
    tensor[third] = torch.from_numpy(right).swapaxes(0, 1)
    assert pages.look(0, "layer", third, all_slots, right) is Content.RIGHT
    tensor[third, 0, 0, 0, 0] += 0.01
    assert pages.look(0, "layer", third, all_slots, right) is Content.WRONG


@both_formats
def test_a_nudge_changes_numbers_and_no_paint(number_format: NumberFormat) -> None:
    pages, tensor, (first, _, _) = painted(number_format)
    tensor[first, :, :2] = 0.25
    before = tensor.clone()
    pages.nudge([first])
    assert (tensor[first, :, :2] != 0.25).all()
    assert torch.allclose(tensor[first, :, :2], before[first, :, :2])
    assert pages.is_untouched(0, "layer", first, slice(2, 4))
    pages.nudge([first])
    bits = number_format.torch_bits
    assert torch.equal(tensor.view(bits), before.view(bits))


# ---------------------------------------------------------------- right answers


def test_the_oracle_of_a_rounded_model_is_exact_about_it() -> None:
    rounded, exact = tiny_model(3, dtype=torch.float32), tiny_model(3)
    prompt = [5, 9, 2, 7, 1]
    kv, other = Oracle(rounded).kv(prompt)[2], Oracle(exact).kv(prompt)[2]
    assert kv.dtype == np.float64
    assert 0 < np.abs(kv - other).max() < 1e-4


def test_a_draw_next_to_the_edge_may_be_either() -> None:
    """Of many seeds, those whose draw falls near the edge may have the neighbouring token."""
    oracle, params = Oracle(tiny_model(0)), SamplingParams(temperature=1.0)
    prompt, num_near = [5, 9, 2], 0
    for seed in range(100):
        (right,) = oracle.drawn(prompt, [0], params, seed)
        accepted = [t for t in range(64) if oracle.drawn(prompt, [t], params, seed) == [t]]
        assert right in accepted
        assert len(accepted) <= 3
        num_near += len(accepted) > 1
    assert num_near < 10


# ---------------------------------------------------------------- whole checks


def test_a_right_connector_passes() -> None:
    report = check_connector("ExampleConnector", quick=True, dtype="float32")
    report.raise_if_failed()
    assert report.result("loaded-kv-right").verdict == "ok"


def one_of_each() -> list[Broken]:
    """The first mistake with each of those properties."""
    first: dict[str, Broken] = {}
    for broken in all_broken():
        first.setdefault(broken.property_id, broken)
    return [first[property_id] for property_id in MUTANTS]


@pytest.mark.parametrize("broken", one_of_each(), ids=str)
def test_a_broken_connector_is_found(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = (broken.seen_in or broken.property_id,)
    report = check_in(
        monkeypatch,
        scenarios,
        broken.connector,
        broken.extra_config(),
        workers=broken.workers,
        deadline_s=broken.deadline_s,
        dtype="float32",
    )
    assert broken.property_id in report.failed, "\n".join(report.lines())


@pytest.mark.parametrize("connector", BROKEN, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_those_for_a_gpu_are_found_on_a_cpu_too(
    connector: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_in(monkeypatch, ("tokens-hit", "tokens-full-hit"), connector, dtype=dtype)
    assert BROKEN[connector] in report.failed, "\n".join(report.lines())


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', not 'tpu'"),
        ({"dtype": "bfloat16"}, "dtype must be 'float64', 'float32' or None"),
        ({"device": "cuda", "workers": 2}, "workers=2 share KV heads on a CPU only"),
        ({"device": "cuda", "dtype": "float64"}, "do not compute in float64"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Subject(cls=ScriptedConnector, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_clear_error() -> None:
    message = "device='cuda' needs an NVIDIA GPU that torch can use .*: run `interlace info`"
    with pytest.raises(ConfigError, match=message):
        check_connector(ScriptedConnector, device="cuda")
    with pytest.raises(ConfigError, match=message):
        Harness.of(ScriptedConnector, {"script": Script()}, device="cuda")
