"""Random traffic through the real engine: whoever stays gets the right answer, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from engine_kit import ALPHABET, PATIENCE_S, OpenEngine, greedy, open_engine
from paged_oracle import answer

from interlace.engine.outputs import RequestOutput


async def _one_client(it: OpenEngine, number: int, seed: int) -> None:
    """Submit something, then read it to the end or leave on the way, in some way."""
    rng = random.Random(seed * 1000 + number)
    prompt = [rng.choice((0, 1, 2)) for _ in range(rng.randint(1, 30))]
    as_text = rng.random() < 0.3
    max_tokens = rng.randint(1, 25)
    stay = rng.choice((0, 1, 3, None, None, None))
    for _ in range(rng.randint(0, 20)):
        await asyncio.sleep(0)
    stream = it.engine.generate(
        "".join(ALPHABET[i] for i in prompt) if as_text else prompt,
        greedy(max_tokens),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice((None, None, "x")),
    )
    deltas: list[RequestOutput] = []
    if stay is None:
        deltas = [delta async for delta in stream]
    else:
        for _ in range(stay):
            if deltas and deltas[-1].finished:
                break
            deltas.append(await anext(stream))
        leave = rng.randint(0, 3)
        if leave == 0:
            await stream.aclose()
        elif leave == 1:
            it.engine.abort(stream.request_id)
            deltas += [delta async for delta in stream]
        elif leave == 2:
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                while True:
                    async with asyncio.timeout(0):
                        deltas.append(await anext(stream))
        else:
            del stream
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    assert tokens == answer(prompt, len(tokens))
    assert "".join(delta.text_delta for delta in deltas) == "".join(ALPHABET[i] for i in tokens)
    if stay is None:
        assert deltas[-1].finish_reason == "length"
        assert len(tokens) == max_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_random_clients(depth: int, seed: int) -> None:
    """I1 to I4 through the public face; the pool holds one long request, so some are preempted."""
    async with (
        open_engine(
            is_open=True,
            depth=depth,
            num_blocks=16,
            max_num_batched_tokens=(64, 3, 16, 7)[seed],
            max_num_seqs=8,
            policy="priority" if seed % 2 else "fcfs",
        ) as it,
        asyncio.timeout(PATIENCE_S),
    ):
        async with asyncio.TaskGroup() as tasks:
            for number in range(40):
                tasks.create_task(_one_client(it, number, seed))
        await it.assert_works()
