"""Hidden states in the cache-only layer are those of transformers, however a prompt comes in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hidden_states_kit import (
    ALL_STATES,
    HIDDEN_SIZE,
    NUM_LAYERS,
    a_prompt,
    assert_equal_states,
    reference_model,
    states_of,
)
from tiny_model import dense_causal

from interlace.engine.kv_connector import KVConnectorMetadata
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from interlace.layers.forward_context import (
    AttentionLayer,
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadata,
    ForwardContext,
    TritonAttentionMetadata,
)
from interlace.layers.kv_memory import CACHE_ONLY_LAYER
from interlace.layers.kv_pages import KVPages
from interlace.layers.runner import ModelRunner

BLOCK = 4
PROMPT = a_prompt(1, 14)
GREEDY = SamplingParams(temperature=0, max_tokens=50)


class Recorder:
    """A worker connector that notes its layer hooks, and what the context shows."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.pages: dict[str, torch.Tensor] = {}
        self.context: ForwardContext | None = None
        self.has_metadata = True
        self.saved: list[torch.Tensor] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = kv_caches

    def has_connector_metadata(self) -> bool:
        return self.has_metadata

    def start_load_kv(self, context: ForwardContext) -> None:
        self.context = context

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name))
        if layer_name == CACHE_ONLY_LAYER:
            self.saved.append(self.pages[layer_name].clone())

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        self.calls.append(("save", layer_name))
        assert kv_layer is self.pages[layer_name]
        assert self.context is not None
        assert self.context.attn_metadata is not None
        assert attn_metadata is self.context.attn_metadata[layer_name]

    def wait_for_save(self) -> None:
        self.calls.append(("wait_for_save", ""))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Driver:
    """Sends one request's steps to a runner, and reads its cache-only pages."""

    def __init__(
        self,
        ids: Sequence[int] = ALL_STATES,
        *,
        num_workers: int = 1,
        connectors: Sequence[Any] = (),
    ) -> None:
        self.ids = ids
        model, _ = reference_model()
        a = model.architecture
        self.pages = [
            KVPages(
                num_layers=a.num_layers,
                num_blocks=24,
                block_size=BLOCK,
                num_kv_heads=a.num_kv_heads // num_workers,
                head_dim=a.head_dim,
                dtype=torch.float32,
                device=torch.device("cpu"),
                cache_only=(len(ids), a.hidden_size) if ids else None,
            )
            for _ in range(num_workers)
        ]
        for pages in self.pages:
            for tensor in pages.by_name().values():
                tensor[1:] = math.nan
        self.runner = ModelRunner(model.decoder, self.pages, (), connectors, ids)
        self.step_id = 0
        self.tokens: list[int] = []
        self.known: set[str] = set()

    def step(
        self,
        start: int,
        num_tokens: int,
        *,
        prompt: Sequence[int] = PROMPT,
        blocks: Sequence[int] = tuple(range(7, 24)),
        name: str = "r",
        copies: tuple[BlockCopy, ...] = (),
    ) -> None:
        """Tokens [start, start + num_tokens) of a request, new if it was not in a step yet."""
        self.step_id += 1
        samples = start + num_tokens >= len(prompt)
        new, cached = [], CachedRequestData()
        if name in self.known:
            sampled = max(0, start + num_tokens - len(prompt))
            cached = CachedRequestData([name], set(), [None], {}, [start], [sampled])
        else:
            new = [NewRequestData(name, tuple(prompt), GREEDY, 0, (list(blocks),), start)]
        self.known.add(name)
        output = self.runner.execute(
            SchedulerOutput(
                step_id=self.step_id,
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={name: num_tokens},
                total_num_scheduled_tokens=num_tokens,
                finished_req_ids=frozenset(),
                preempted_req_ids=frozenset(),
                sampling_req_ids=frozenset({name} if samples else ()),
                block_copies=copies,
                kv_connector_metadata=_Metadata(),
            )
        )
        self.tokens += output.sampled_token_ids.get(name, ())

    def assert_states(
        self, token_ids: Sequence[int] = PROMPT, blocks: Sequence[int] = tuple(range(7, 24))
    ) -> None:
        """Every worker's cache-only pages hold the states of these tokens."""
        for pages in self.pages:
            assert pages.cache_only is not None
            found = pages.cache_only[list(blocks)].flatten(0, 1)[: len(token_ids)]
            assert_equal_states(found, token_ids, self.ids)


@dataclasses.dataclass(frozen=True)
class _Metadata(KVConnectorMetadata):
    pass


# -------------------------------------------------------------------- the decoder


@pytest.mark.parametrize("ids", [(0,), (NUM_LAYERS,), (2, 0), ALL_STATES])
@pytest.mark.parametrize("rows", [None, [], [3], [0, 13]])
def test_the_decoder_fills_in_what_transformers_gives(
    ids: tuple[int, ...], rows: list[int] | None
) -> None:
    decoder = reference_model()[0].decoder
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    kept = torch.full((len(PROMPT), len(ids), HIDDEN_SIZE), math.nan)
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    with torch.inference_mode():
        states = dict(zip(ids, kept.unbind(1), strict=True))
        hidden = decoder.forward(tokens, positions, dense_causal, chosen, states)
        plain = decoder.forward(tokens, positions, dense_causal, chosen)
    assert_equal_states(kept, PROMPT, ids)
    torch.testing.assert_close(hidden, plain, rtol=1e-5, atol=1e-5)


def test_the_final_state_is_the_normed_one() -> None:
    """What transformers puts last is its `last_hidden_state`: so is ours."""
    _, model = reference_model()
    with torch.no_grad():
        last = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    torch.testing.assert_close(states_of(PROMPT, [NUM_LAYERS])[:, 0], last)


# -------------------------------------------------------------------- the runner


@pytest.mark.parametrize("ids", [(NUM_LAYERS,), (1, 3), ALL_STATES])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_any_chunks_leave_the_states_of_all_tokens(ids: tuple[int, ...], chunk: int) -> None:
    driver = Driver(ids)
    for start in range(0, len(PROMPT), chunk):
        driver.step(start, min(chunk, len(PROMPT) - start))
    for position in range(len(PROMPT), len(PROMPT) + 5):
        driver.step(position, 1)
    driver.assert_states([*PROMPT, *driver.tokens[:5]])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prefix_hit_and_a_copied_block_bring_their_states(num_workers: int) -> None:
    driver = Driver(num_workers=num_workers)
    driver.step(0, len(PROMPT))
    # Two whole blocks are shared; of the third, two tokens are, so it is copied.
    prompt = [*PROMPT[:10], *a_prompt(5, 9)]
    blocks = [7, 8, 3, 4, 5]
    driver.step(10, 9, prompt=prompt, blocks=blocks, name="s", copies=(BlockCopy(9, 3),))
    driver.assert_states(prompt, blocks)
    driver.assert_states()


def test_without_the_option_there_is_nothing_of_it() -> None:
    plain, keeping = Driver(()), Driver()
    for driver in (plain, keeping):
        driver.step(0, 9)
        driver.step(9, 5)
        for position in range(14, 20):
            driver.step(position, 1)
    assert CACHE_ONLY_LAYER not in plain.pages[0].by_name()
    assert plain.tokens == keeping.tokens


# -------------------------------------------------------------------- the connector's hooks


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_layer_hooks_run_once_a_forward_around_the_write(num_workers: int) -> None:
    recorders = [Recorder() for _ in range(num_workers)]
    driver = Driver((0, 3), num_workers=num_workers, connectors=recorders)
    driver.step(0, 9)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)] + [CACHE_ONLY_LAYER]
    expected = [(hook, name) for name in names for hook in ("wait", "save")]
    for recorder in recorders:
        assert recorder.calls == [*expected, ("wait_for_save", "")]
        assert list(recorder.pages) == names
        (before,) = recorder.saved
        assert before[7:10].isnan().any(), "the wait comes before the write"
    driver.step(9, 5)
    assert all(r.calls.count(("save", CACHE_ONLY_LAYER)) == 2 for r in recorders)
    driver.assert_states()


def test_the_context_tells_the_cache_only_layer_from_the_others() -> None:
    recorder = Recorder()
    driver = Driver((1,), connectors=[recorder])
    driver.step(0, 5)
    context = recorder.context
    assert context is not None
    assert context.attn_metadata is not None
    kinds = [type(layer) for layer in context.no_compile_layers.values()]
    assert kinds == [AttentionLayer] * NUM_LAYERS + [CacheOnlyAttentionLayer]
    layer, metadata = (
        context.no_compile_layers[CACHE_ONLY_LAYER],
        context.attn_metadata[CACHE_ONLY_LAYER],
    )
    assert layer.kv_cache is driver.pages[0].cache_only
    assert isinstance(metadata, CacheOnlyAttentionMetadata)
    assert metadata.slot_mapping.tolist() == [28, 29, 30, 31, 32]
    assert (metadata.num_actual_tokens, metadata.seq_lens.tolist()) == (5, [5])
    others = [context.attn_metadata[name] for name in list(context.no_compile_layers)[:-1]]
    assert all(isinstance(one, TritonAttentionMetadata) for one in others)


def test_a_connector_without_metadata_is_left_alone() -> None:
    recorder = Recorder()
    recorder.has_metadata = False
    driver = Driver((0, 3), connectors=[recorder])
    driver.step(0, len(PROMPT))
    assert recorder.calls == [("wait_for_save", "")]
    driver.assert_states()
