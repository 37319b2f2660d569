"""The public face over the oracle runner: arguments, streams, limits, seeds, events, life."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_kit import (
    BLOCK_SIZE,
    PATIENCE_S,
    GatedRunner,
    OpenEngine,
    build_engine,
    greedy,
    open_engine,
    read_all,
    right_text,
    tokens_of,
    toy_tokenizer,
    until,
)
from paged_oracle import VOCAB_SIZE, answer

from interlace.engine import request as request_module
from interlace.engine.block_hash import BlockHash, extend_hashes
from interlace.engine.errors import (
    EngineBusyError,
    EngineDeadError,
    PromptError,
    RequestError,
    SamplingError,
)
from interlace.engine.events import (
    BlockStored,
    Event,
    RequestFinished,
    RequestFirstToken,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepLaunched,
    StepScheduled,
)
from interlace.engine.sampling_params import SamplingParams

both_depths = pytest.mark.parametrize("depth", [1, 2])


# --- answers -------------------------------------------------------------------------------------


@both_depths
async def test_answers_of_many_requests_at_once(depth: int) -> None:
    prompts = [[i % 7, 1, 2, 3, 4, i % 3] * 3 for i in range(20)]
    async with open_engine(is_open=True, depth=depth, num_blocks=24) as it:
        done = await asyncio.gather(*(it.engine.complete(p, greedy(9)) for p in prompts))
        assert [list(d.token_ids) for d in done] == [answer(p, 9) for p in prompts]
        assert [d.text for d in done] == [right_text(p, 9) for p in prompts]
        assert {d.finish_reason for d in done} == {"length"}
        assert done[0].usage.num_prompt_tokens == 18
        assert done[0].usage.num_generated_tokens == 9
        await it.assert_nothing_left()


@both_depths
async def test_text_and_messages_become_tokens(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as it:
        for prompt in ("abc", [{"role": "user", "content": "abc"}]):
            done = await it.engine.complete(prompt, greedy(5))
            assert list(done.token_ids) == answer([0, 1, 2], 5)
            assert done.text == right_text([0, 1, 2], 5)


async def test_messages_are_the_callers_own_again_after_the_call() -> None:
    """A chat appends to its list while the old one is still being tokenised in a thread."""
    async with open_engine(is_open=True) as it:
        message = {"role": "user", "content": "abc"}
        messages = [message]
        stream = it.engine.generate(messages, greedy(3))
        message["content"] = "zzz"
        messages.append({"role": "user", "content": "more"})
        assert tokens_of(await read_all(stream)) == answer([0, 1, 2], 3)


@both_depths
async def test_a_stop_string_ends_the_answer_and_is_not_shown(depth: int) -> None:
    prompt = [1, 2, 3]
    text = right_text(prompt, 20)
    stop = text[5:7]
    at = text.index(stop)
    async with open_engine(is_open=True, depth=depth) as it:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
        done = await it.engine.complete(prompt, params)
        assert done.text == text[:at]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert list(done.token_ids) == answer(prompt, at + len(stop))
        await it.assert_works()


@both_depths
async def test_without_detokenizing_there_are_only_ids(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as it:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
        done = await it.engine.complete([1, 2], params)
        assert (done.text, list(done.token_ids)) == ("", answer([1, 2], 5))


async def test_a_slow_reader_gets_everything_in_one_item() -> None:
    # I12
    async with open_engine(is_open=True) as it:
        stream = it.generate([1, 2, 3], 12)
        await until(lambda: it.engine.snapshot().idle)
        deltas = await read_all(stream)
        assert len(deltas) == 1
        assert tokens_of(deltas) == answer([1, 2, 3], 12)
        assert deltas[0].text_delta == right_text([1, 2, 3], 12)
        assert deltas[0].finish_reason == "length"


async def test_a_quick_reader_gets_each_token_as_it_comes() -> None:
    async with open_engine() as it:
        stream = it.generate([1, 2, 3], 3)
        for expected in answer([1, 2, 3], 3):
            it.runner.allow()
            assert (await anext(stream)).token_ids == (expected,)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_second_reader_at_the_same_time_is_refused() -> None:
    async with open_engine() as it:
        stream = it.generate([1, 2, 3], 3)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(read_all(stream))
            await it.runner.next_step()
            with pytest.raises(RequestError, match="read by another task"):
                await anext(stream)
            it.runner.open()
        assert tokens_of(first.result()) == answer([1, 2, 3], 3), "the first one is not disturbed"


# --- arguments -----------------------------------------------------------------------------------

BAD_PROMPTS: list[Any] = [
    "",
    [],
    (),
    np.array([], dtype=np.int64),
    None,
    5,
    b"abc",
    {"role": "user", "content": "abc"},
    [-1],
    [VOCAB_SIZE],
    [0, 2**63],
    [2**70],
    [2**63, -1],
    [[1, 2]],
    [[1], [2, 3]],
    [1, [2]],
    [1.0],
    [1, 2.5],
    [True],
    [1, True],
    [1, np.True_],
    [None],
    [1, None],
    ["a"],
    np.array(5),
    np.array([[1, 2]]),
    np.array([1.0]),
    np.array([True]),
    np.array([-1]),
]


async def test_what_is_no_prompt_is_refused_at_the_call() -> None:
    async with open_engine(is_open=True) as it:
        for prompt in BAD_PROMPTS:
            with pytest.raises(PromptError):
                it.engine.generate(prompt)
        assert it.engine.snapshot().idle
        await it.assert_works()


async def test_the_first_bad_id_is_named() -> None:
    async with open_engine() as it:
        with pytest.raises(PromptError, match=r"token id 50 at position 2 .* \[0, 50\)"):
            it.engine.generate([1, 2, 50, 60])


@pytest.mark.parametrize("ids", [np.array([1, 2], dtype=np.uint8), (1, 2), range(1, 3)])
async def test_any_flat_sequence_of_ids_will_do(ids: Sequence[int]) -> None:
    async with open_engine(is_open=True) as it:
        assert tokens_of(await read_all(it.generate(ids, 3))) == answer([1, 2], 3)


async def test_an_array_may_change_after_the_call() -> None:
    async with open_engine(is_open=True) as it:
        ids = np.array([1, 2, 3])
        stream = it.engine.generate(ids, greedy(3))  # type: ignore[arg-type]
        ids[:] = 9
        assert tokens_of(await read_all(stream)) == answer([1, 2, 3], 3)


@pytest.mark.parametrize("limit", ["model", "pool"])
async def test_b33_longer_than_fits_is_refused_at_the_call(limit: str) -> None:
    most = 20  # of prompt and answer
    sizes = {"model": (most, 32), "pool": (100, most // BLOCK_SIZE)}
    max_model_len, num_blocks = sizes[limit]
    async with open_engine(is_open=True, max_model_len=max_model_len, num_blocks=num_blocks) as it:
        for length in (most, most + 1, 10 * most):
            with pytest.raises(PromptError, match=f"has {length} tokens.* at most {most} fit"):
                it.generate([1] * length)
            with pytest.raises(PromptError, match=f"has {length} tokens.* at most {most} fit"):
                await anext(it.generate("a" * length))  # text is tokenised after the call
        await it.assert_nothing_left()
        for length in (most - 1, most - 2):
            done = await it.engine.complete([1] * length, greedy(None))
            assert list(done.token_ids) == answer([1] * length, most - length)
            assert done.finish_reason == "length"
        await it.assert_works()


async def test_text_that_has_no_tokens_is_refused_at_the_first_item() -> None:
    async with open_engine() as it:
        stream = it.generate("???")
        with pytest.raises(PromptError, match="has no tokens"):
            await anext(stream)
        await it.assert_works()


async def test_messages_that_are_none_are_refused_at_the_first_item() -> None:
    async with open_engine() as it:
        bad: list[Any] = [[{"role": "user"}, 5], [{}], [{"role": "user", "content": 5}]]
        for messages in bad:
            with pytest.raises(PromptError):
                await read_all(it.engine.generate(messages))
        await it.assert_works()


async def test_without_a_tokenizer_only_ids_are_taken() -> None:
    async with open_engine(is_open=True, with_tokenizer=False) as it:
        for prompt in ("abc", [{"role": "user", "content": "abc"}]):
            with pytest.raises(RequestError, match="no tokenizer: give token ids"):
                it.engine.generate(prompt)
        with pytest.raises(SamplingError, match="stop strings need a tokenizer"):
            it.engine.generate([1], SamplingParams(stop="x"))
        done = await it.engine.complete([1, 2], greedy(3))
        assert (done.text, list(done.token_ids)) == ("", answer([1, 2], 3))


BAD_OPTIONS: list[tuple[dict[str, Any], type[RequestError]]] = [
    ({"sampling_params": {"temperature": 0}}, SamplingError),
    ({"sampling_params": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, SamplingError),
    ({"sampling_params": SamplingParams(stop_token_ids=[VOCAB_SIZE])}, SamplingError),
    ({"priority": 1.5}, RequestError),
    ({"priority": None}, RequestError),
    ({"cache_salt": 5}, RequestError),
    ({"cache_salt": b"x"}, RequestError),
    ({"request_id": ""}, RequestError),
    ({"request_id": 5}, RequestError),
    ({"kv_transfer_params": {}}, RequestError),
]


async def test_bad_options_are_refused_at_the_call() -> None:
    async with open_engine() as it:
        for options, error in BAD_OPTIONS:
            with pytest.raises(error):
                it.engine.generate([1, 2], **options)
        with pytest.raises(TypeError, match="unexpected keyword"):
            it.engine.generate([1, 2], colour="red")  # type: ignore[call-arg]
        await it.assert_works()


async def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async with open_engine() as it:
        first = it.generate([1, 2], 3, request_id="mine")
        with pytest.raises(RequestError, match="'mine' is in use"):
            it.generate([3, 4], 3, request_id="mine")
        it.runner.open()
        assert tokens_of(await read_all(first)) == answer([1, 2], 3)
        again = it.generate([3, 4], 3, request_id="mine")
        assert tokens_of(await read_all(again)) == answer([3, 4], 3)


async def test_a_full_waiting_queue_says_busy() -> None:
    # I12
    async with open_engine(max_waiting_requests=3, max_num_seqs=1) as it:
        streams = [it.generate([1, 2], 2)]
        await it.runner.next_step()
        streams += [it.generate([i, 2], 2) for i in range(3)]
        for prompt in ([5, 6], "abc"):
            with pytest.raises(EngineBusyError, match="3 requests are waiting"):
                it.generate(prompt)
        it.runner.open()
        for stream in streams:
            await read_all(stream)
        await it.assert_works()


async def test_requests_that_are_being_tokenised_count_as_waiting() -> None:
    async with open_engine(max_waiting_requests=2) as it:
        streams = [it.generate("abc", 2), it.generate("abd", 2)]
        with pytest.raises(EngineBusyError):
            it.generate([1])
        it.runner.open()
        for stream in streams:
            await read_all(stream)


# --- order and seeds -----------------------------------------------------------------------------


async def test_lower_priority_is_served_first() -> None:
    async with open_engine(max_num_seqs=1, policy="priority") as it:
        streams = [it.generate([1, 2], 1, request_id="first")]
        await it.runner.next_step()
        for name, priority in (("c", 2), ("b", 1), ("a", 0), ("b2", 1)):
            streams.append(it.generate([3, 4], 1, request_id=name, priority=priority))
        it.runner.open()
        for stream in streams:
            await read_all(stream)
        order = [i for step in it.runner.executed for i in step.num_scheduled_tokens]
        assert order == ["first", "a", "b", "b2", "c"]


async def test_arrival_decides_though_preparing_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    encode = toy_tokenizer().encode

    def slow_encode(self: object, text: str, add_special_tokens: bool = True) -> list[int]:
        assert gate.wait(PATIENCE_S)
        return encode(text, add_special_tokens)

    monkeypatch.setattr("interlace.engine.tokenizer.Tokenizer.encode", slow_encode)
    async with open_engine(max_num_seqs=1) as it:
        streams = [it.generate([1, 2], 1, request_id="first")]
        await it.runner.next_step()
        streams.append(it.generate("ab", 1, request_id="text"))
        streams.append(it.generate([5, 6], 1, request_id="ids"))
        gate.set()
        await until(lambda: len(it.engine.snapshot().waiting) == 2)
        it.runner.open()
        for stream in streams:
            await read_all(stream)
        order = [i for step in it.runner.executed for i in step.num_scheduled_tokens]
        assert order == ["first", "text", "ids"]


async def _seeds(it: OpenEngine, traffic: int) -> list[int]:
    for i in range(traffic):
        await it.engine.complete([1, i], SamplingParams(seed=99 + i, max_tokens=1))
    await it.engine.complete([1, 2], SamplingParams(seed=5, max_tokens=1), request_id="mine")
    await it.engine.complete([1, 2], SamplingParams(max_tokens=1), request_id="unseeded")
    new = [new for step in it.runner.executed for new in step.scheduled_new_reqs]
    return [next(n.seed for n in new if n.req_id == name) for name in ("mine", "unseeded")]


async def test_seeds_do_not_depend_on_other_traffic() -> None:
    seen = []
    for traffic in (0, 3):
        async with open_engine(is_open=True, seed=7) as it:
            seen.append(await _seeds(it, traffic))
    assert seen[0] == seen[1], "an unseeded request draws from the engine's seed alone"
    assert seen[0][0] == 5
    async with open_engine(is_open=True, seed=8) as it:
        assert (await _seeds(it, 0))[1] != seen[0][1]


# --- long prompts --------------------------------------------------------------------------------


async def test_long_prompts_are_hashed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}

    def spy(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], *rest: Any) -> None:
        threads.setdefault(len(token_ids), threading.current_thread().name)
        extend_hashes(hashes, root, token_ids, *rest)

    monkeypatch.setattr(request_module, "extend_hashes", spy)
    async with open_engine(is_open=True, num_blocks=5000, max_model_len=18000) as it:
        for prompt in ([1] * 17000, "a" * 8100, [1] * 8000):
            stream = it.generate(prompt, 1)
            await until(lambda: it.engine.snapshot().num_preparing_requests == 0)
            await stream.aclose()
            await it.assert_nothing_left()
    assert threads[17000].startswith("interlace-text")
    assert threads[8100].startswith("interlace-text")
    assert threads[8000] == threading.current_thread().name, "a thread would only cost time"


# --- events and state ----------------------------------------------------------------------------


async def test_events_of_one_request_in_order() -> None:
    async with open_engine(is_open=True) as it:
        stream = it.engine.events()
        await it.engine.complete([1, 2, 3, 4, 5], greedy(2), request_id="mine")
        await until(lambda: it.engine.snapshot().idle)
        await until(lambda: not it.runner.state.requests)
        stream.close()
        events = [event async for event in stream]
    kinds: list[type[Event]] = [type(event) for event in events]
    assert kinds[:9] == [
        RequestQueued,
        RequestScheduled,
        StepScheduled,
        StepLaunched,
        RequestFirstToken,  # it goes out before the step is settled
        BlockStored,
        StepDone,
        StepScheduled,
        StepLaunched,
    ]
    assert kinds.count(RequestFinished) == 1
    done = next(event for event in events if isinstance(event, RequestFinished))
    assert (done.request_id, done.finish_reason, done.num_generated_tokens) == ("mine", "length", 2)
    times = [event.time_s for event in events]
    assert times == sorted(times)


async def test_the_event_of_the_end_says_what_the_caller_hears() -> None:
    prompt = [1, 2, 3, 4, 5]
    stop = right_text(prompt, 3)[-1]
    # The stop string is complete with the very token at which the length ends the answer.
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, stop=stop)
    async with open_engine(is_open=True) as it:
        stream = it.engine.events()
        done = await it.engine.complete(prompt, params)
        stream.close()
        ends = [event async for event in stream if isinstance(event, RequestFinished)]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert [end.finish_reason for end in ends] == ["stop"]


async def test_a_reader_of_events_that_falls_behind_loses_the_oldest() -> None:
    # I12
    async with open_engine(is_open=True) as it:
        all_events, few = it.engine.events(), it.engine.events(max_pending=3)
        await it.engine.complete([1, 2, 3, 4, 5], greedy(4))
        all_events.close()
        few.close()
        everything = [event async for event in all_events]
        last = [event async for event in few]
        assert last == everything[-3:]
        assert few.num_dropped == len(everything) - 3
        assert all_events.num_dropped == 0


async def test_events_end_with_the_engine() -> None:
    async with open_engine() as it:
        stream = it.engine.events()
    assert [event async for event in stream] == []
    assert [event async for event in it.engine.events()] == [], "a later one ends at once"


async def test_resetting_the_prefix_cache() -> None:
    async with open_engine() as it:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert it.engine.reset_prefix_cache(), "nothing to forget is forgotten"
        stream = it.generate(prompt, 1)
        await it.runner.next_step()
        assert not it.engine.reset_prefix_cache()
        it.runner.open()
        await read_all(stream)
        await it.assert_nothing_left()
        done = await it.engine.complete(prompt, greedy(1))
        assert done.usage.num_local_cached_tokens == 8
        assert it.engine.reset_prefix_cache(reset_connector=True)
        assert it.engine.snapshot().num_cached_blocks == 0
        done = await it.engine.complete(prompt, greedy(1))
        assert done.usage.num_local_cached_tokens == 0


@both_depths
async def test_a_salt_shares_nothing(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as it:
        cached = []
        for salt in (None, "x", None, "x", "y", ""):
            done = await it.engine.complete([1, 2, 3, 4, 5], greedy(1), cache_salt=salt)
            cached.append(done.usage.num_local_cached_tokens)
        assert cached == [0, 0, 4, 4, 0, 0]


async def test_snapshot_shows_where_requests_are() -> None:
    async with open_engine(max_num_seqs=1) as it:
        streams = [it.generate([1, 2], 2, request_id="running")]
        await it.runner.next_step()
        streams.append(it.generate([1, 2], 2, request_id="waiting"))
        streams.append(it.generate("ab", 2))
        snapshot = it.engine.snapshot()
        assert [r.request_id for r in snapshot.running] == ["running"]
        assert [r.request_id for r in snapshot.waiting] == ["waiting"]
        assert (snapshot.num_preparing_requests, snapshot.num_inflight_steps) == (1, 1)
        assert not snapshot.idle
        assert "running=1" in repr(it.engine)
        it.runner.open()
        for stream in streams:
            await read_all(stream)


# --- life ----------------------------------------------------------------------------------------


async def test_outside_its_block_the_engine_refuses_work() -> None:
    runner = GatedRunner(is_open=True)
    engine = build_engine(runner)
    with pytest.raises(EngineDeadError, match="inside `async with`"):
        engine.generate([1, 2])
    async with engine:
        pass
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="is closed"):
            engine.generate([1, 2])
        with pytest.raises(EngineDeadError, match="is closed"):
            await engine.complete("abc")
    assert not engine.abort("request-0")
    assert engine.snapshot().idle
    assert runner.closed


async def test_an_engine_is_opened_once() -> None:
    runner = GatedRunner(is_open=True)
    engine = build_engine(runner)
    async with engine:
        with pytest.raises(EngineDeadError, match="opened once"):
            await engine.__aenter__()
        done = await engine.complete([1, 2], greedy(3))
        assert list(done.token_ids) == answer([1, 2], 3)
    with pytest.raises(EngineDeadError, match="opened once"):
        async with engine:
            pass


async def test_two_engines_do_not_disturb_each_other() -> None:
    async with open_engine(is_open=True) as one, open_engine(is_open=True, depth=2) as two:
        prompts = [[i, 1, 2, 3, 4, 5] for i in range(5)]
        done = await asyncio.gather(
            *(it.engine.complete(p, greedy(7)) for p in prompts for it in (one, two))
        )
        assert [list(d.token_ids) for d in done] == [answer(p, 7) for p in prompts for _ in "12"]
        await one.assert_nothing_left()
        assert one.engine.reset_prefix_cache()
        assert two.engine.snapshot().num_cached_blocks > 0
    assert not {id(a) for a in vars(one.engine).values()} & {
        id(b) for b in vars(two.engine).values() if type(b).__module__.startswith("interlace")
    }
