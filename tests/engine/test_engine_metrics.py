"""An engine's metrics: what they count, while it works, fails and closes, and what they cost."""

from __future__ import annotations

import asyncio
import collections
import socket
from contextlib import closing
from typing import Any

import pytest
from engine_kit import GatedRunner, build_engine, greedy, open_engine, read_all, until
from metrics_kit import Values, exchange, port_of, read, request, scrape
from prometheus_client import REGISTRY, generate_latest

from interlace.engine.errors import ConfigError, EngineDeadError, InterlaceError, PromptError
from interlace.engine.events import Event, StepDone
from interlace.engine.metrics_server import listen
from interlace.engine.snapshot import EngineSnapshot

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SOURCES = "interlace_prompt_tokens_by_source_total{{source={}}}"
FINISHED = "interlace_requests_finished_total{{finish_reason={}}}"


def state(values: Values, name: str) -> float:
    return values[f"interlace_requests{{state={name}}}"]


async def test_counters_are_what_the_requests_did() -> None:
    async with open_engine(is_open=True) as opened:
        engine = opened.engine
        recording = engine.record_metrics()
        answers = [await engine.complete(PROMPT, greedy(n)) for n in (5, 3, 4)]
        stream = engine.generate("abc", greedy(50))
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.snapshot().idle)
        values = read(recording.registry)
        usages = [answer.usage for answer in answers]
        num_local = sum(usage.num_local_cached_tokens for usage in usages)
        assert num_local > 0
        assert values["interlace_prompt_tokens_total"] == 3 * len(PROMPT) + 3
        assert values[SOURCES.format("local_cache_hit")] == num_local
        assert values[SOURCES.format("external_kv_transfer")] == 0
        computed = 3 * len(PROMPT) + 3 - num_local
        assert values[SOURCES.format("local_compute")] == computed
        num_steps = values["interlace_step_seconds_count"]
        generated = values["interlace_generated_tokens_total"]
        assert generated == engine.snapshot().stats.num_generated_tokens >= 5 + 3 + 4 + 1
        # Each token but the first of a request stands behind another one.
        assert values["interlace_inter_token_latency_seconds_count"] == generated - 4
        assert values["interlace_time_to_first_token_seconds_count"] == 4
        assert values["interlace_request_queue_time_seconds_count"] == 4
        assert values["interlace_e2e_request_latency_seconds_count"] == 4
        assert values["interlace_step_tokens_count"] == num_steps <= values["interlace_steps_total"]
        # And the one under way when its request was aborted, if there was one.
        assert values["interlace_step_tokens_sum"] - (computed + generated - 4) in (0, 1)
        assert values["interlace_requests_ended_total"] == 4
        assert values[FINISHED.format("length")] == 3
        assert values[FINISHED.format("abort")] == 1
        assert values[FINISHED.format("error")] == values[FINISHED.format("stop")] == 0
        assert values["interlace_engine_up"] == 1
        assert values["interlace_kv_free_blocks"] == values["interlace_kv_usable_blocks"] == 32
        assert values["interlace_kv_usage_ratio"] == 0


async def test_who_ends_while_it_is_tokenised_has_a_reason() -> None:
    async with open_engine(is_open=True) as opened:
        engine = opened.engine
        recording = engine.record_metrics()
        stream = engine.generate("abc", greedy(5))
        assert state(read(engine.metrics), "preparing") == 1
        assert engine.abort(stream.request_id)
        assert not engine.abort(stream.request_id)
        with pytest.raises(PromptError):
            await engine.complete("a" * 5000, greedy(5))
        for reason in ("abort", "error"):
            await until(lambda: read(recording.registry)[FINISHED.format(reason)] == 1)  # noqa: B023
        assert read(engine.metrics)["interlace_requests_ended_total"] == 2
        await until(lambda: engine.snapshot().num_preparing_requests == 0)
        assert not recording._ended, "none of them is in a step that may be told of"


async def test_requests_by_state_and_blocks() -> None:
    async with open_engine(max_num_seqs=1) as opened:
        opened.kept = [opened.generate(PROMPT, 2), opened.generate([7, 7], 2)]
        await opened.runner.next_step()
        values = read(opened.engine.metrics)
        assert (state(values, "running"), state(values, "waiting")) == (1, 1)
        assert values["interlace_queue_depth_requests"] == 1
        assert values["interlace_queue_limit_requests"] == 100
        assert values["interlace_inflight_steps"] == 1
        assert values["interlace_kv_usage_ratio"] == 3 / 32
        assert values["interlace_kv_block_size_tokens"] == 4
        for stream in opened.kept:
            await stream.aclose()
        assert read(opened.engine.metrics)["interlace_kv_fenced_blocks"] == 3


async def test_preemptions_are_counted_and_gaps_go_on() -> None:
    async with open_engine(is_open=True, num_blocks=6) as opened:
        recording = opened.engine.record_metrics()
        streams = [opened.generate([n, 2, 3, 4], 14) for n in (1, 5)]
        await asyncio.gather(*map(read_all, streams))
        await until(lambda: opened.engine.snapshot().idle)
        values = read(recording.registry)
        assert values["interlace_preemptions_total"] > 0
        assert values["interlace_generated_tokens_total"] == 28
        assert values["interlace_inter_token_latency_seconds_count"] == 26
        assert values["interlace_request_queue_time_seconds_count"] == 2


@pytest.mark.parametrize("depth", [1, 2])
async def test_scraped_while_it_works(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as opened:
        server = await opened.engine.serve_metrics()
        streams = [opened.generate([n, *PROMPT], 30) for n in range(8)]
        readers = asyncio.gather(*map(read_all, streams))
        seen: list[Values] = []
        while not readers.done():
            seen.append(await scrape(server.url))
        await readers
        await until(lambda: opened.engine.snapshot().idle)
        seen.append(await scrape(server.url))
        for name in ("interlace_generated_tokens_total", "interlace_steps_total"):
            counts = [values[name] for values in seen]
            assert counts == sorted(counts)
        assert seen[-1]["interlace_generated_tokens_total"] == 8 * 30
        assert seen[-1]["interlace_inter_token_latency_seconds_count"] == 8 * 29
        await opened.assert_works()


async def test_a_failed_engine_still_answers_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_engine() as opened:
        server = await opened.engine.serve_metrics()
        stream = opened.generate(PROMPT, 3)
        await opened.runner.next_step()
        opened.runner.error = RuntimeError("no device")
        opened.runner.open()
        with pytest.raises(EngineDeadError):
            await read_all(stream)
        values = await scrape(server.url)
        assert values["interlace_engine_up"] == 0
        assert values["interlace_steps_total"] == 1
        with pytest.raises(EngineDeadError):
            await opened.engine.serve_metrics()
    with pytest.raises(OSError):
        await scrape(server.url)


async def test_it_closes_with_the_engine_though_a_client_hangs() -> None:
    async with open_engine(is_open=True) as opened:
        server = await opened.engine.serve_metrics()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
        writer.write(b"GET /metr")
        await until(lambda: len(server._connections) == 1)
        await opened.assert_works()
    assert server.is_closed
    assert await reader.read() == b""
    writer.close()
    listen(port_of(server.url)).close()


async def test_closing_the_server_ends_the_recording() -> None:
    async with open_engine(is_open=True) as opened:
        engine = opened.engine
        server = await engine.serve_metrics()
        assert engine._events.active
        server.close()
        await until(lambda: not engine._events.active)
        await opened.assert_works()
        for _ in range(3):
            (await engine.serve_metrics()).close()
        assert len(engine._metrics_servers) == len(engine._recordings) == 1


async def test_two_engines_do_not_mix() -> None:
    before = generate_latest(REGISTRY)
    async with open_engine(is_open=True) as one, open_engine(is_open=True) as other:
        servers = [await opened.engine.serve_metrics() for opened in (one, other)]
        await one.engine.complete(PROMPT, greedy(5))
        values = [await scrape(server.url) for server in servers]
        assert [v["interlace_generated_tokens_total"] for v in values] == [5, 0]
        assert [v["interlace_time_to_first_token_seconds_count"] for v in values] == [1, 0]
    assert b"interlace" not in before
    assert b"interlace" not in generate_latest(REGISTRY)


async def test_two_recordings_count_from_their_own_begins() -> None:
    async with open_engine(is_open=True) as opened:
        early = opened.engine.record_metrics()
        await opened.engine.complete(PROMPT, greedy(5))
        late = opened.engine.record_metrics()
        await opened.engine.complete(PROMPT, greedy(5))
        await until(lambda: opened.engine.snapshot().idle)
        counts = [
            read(one.registry)["interlace_time_to_first_token_seconds_count"]
            for one in (early, late)
        ]
        assert counts == [2, 1]


async def test_a_port_in_use_leaves_nothing_on() -> None:
    async with open_engine(is_open=True) as opened:
        with closing(listen(0)) as taken, pytest.raises(ConfigError, match="is in use"):
            await opened.engine.serve_metrics(taken.getsockname()[1])
        assert not opened.engine._events.active
        await opened.assert_works()


async def test_cancelled_it_serves_nothing() -> None:
    async with open_engine(is_open=True) as opened:
        for num_turns in range(6):
            sock = listen(0)
            port = sock.getsockname()[1]
            async with asyncio.TaskGroup() as group:
                task = group.create_task(opened.engine.serve_metrics(sock))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
            if not task.cancelled():  # it was done
                task.result().close()
            assert not opened.engine._events.active
            sock.close()
            listen(port).close()
        await opened.assert_works()


async def test_a_cancelled_scrape_changes_nothing() -> None:
    async with open_engine(is_open=True) as opened:
        server = await opened.engine.serve_metrics()
        for num_turns in range(8):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(scrape(server.url))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
        await until(lambda: not server._connections)
        assert (await scrape(server.url))["interlace_engine_up"] == 1
        await opened.assert_works()


async def test_only_an_open_engine_records() -> None:
    engine = build_engine(GatedRunner(is_open=True))
    for call in (engine.record_metrics, engine.serve_metrics):
        with pytest.raises(EngineDeadError, match="not open"):
            await result if asyncio.iscoroutine(result := call()) else None
    async with engine:
        recording = engine.record_metrics()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.record_metrics()
    assert read(recording.registry)["interlace_engine_up"] == 0, "the last numbers stay"


async def test_an_engine_that_closes_meanwhile_serves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(GatedRunner(is_open=True))
    async with engine:
        create = asyncio.get_running_loop().create_server

        async def late(*args: Any, **kwargs: Any) -> object:
            engine._end_metrics()
            engine._dead = EngineDeadError("the engine is closed; open a new one.")
            return await create(*args, **kwargs)

        monkeypatch.setattr(asyncio.get_running_loop(), "create_server", late)
        sock = listen(0)
        port = sock.getsockname()[1]
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.serve_metrics(sock)
        listen(port).close()
        assert not engine._events.active


async def test_metrics_are_read_on_the_loop_alone() -> None:
    async with open_engine(is_open=True) as opened:
        with pytest.raises(InterlaceError, match=r"on its event loop.*serve_metrics"):
            await asyncio.to_thread(generate_latest, opened.engine.metrics)


async def test_what_a_scrape_and_a_step_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counting: one snapshot a scrape; without a recording no event is made, with one three for
    each step, four for each request, and one for each full block."""
    async with open_engine(is_open=True) as opened:
        engine = opened.engine
        emitted, snapshots = list[str](), list[EngineSnapshot]()
        emit, snapshot = engine._events.emit, engine.snapshot

        def note(event: Event) -> None:
            emitted.append(event.name)
            emit(event)

        def take() -> EngineSnapshot:
            snapshots.append(snapshot())
            return snapshots[-1]

        monkeypatch.setattr(engine._events, "emit", note)
        monkeypatch.setattr(engine, "snapshot", take)
        await engine.complete(PROMPT, greedy(5))
        generate_latest(engine.metrics)
        assert engine.metrics is engine.metrics
        assert len(snapshots) == 1
        await until(lambda: snapshot().idle)
        assert emitted == []
        num_steps = snapshot().stats.num_steps
        recording = engine.record_metrics()
        assert len(snapshots) == 1, "recording takes none"
        await engine.complete([9, 9, 9], greedy(10))
        await until(lambda: snapshot().idle)
        num_steps = snapshot().stats.num_steps - num_steps
        counts = collections.Counter(name.partition(".")[0] for name in emitted)
        assert counts == {"step": 3 * num_steps, "request": 4, "block": 3}
        recording.close()


async def test_steps_tell_whose_tokens_they_brought_and_when() -> None:
    async with open_engine(is_open=True) as opened:
        events = opened.engine.events()
        await asyncio.gather(
            *(read_all(opened.generate(PROMPT, n, request_id=f"r{n}")) for n in (1, 3))
        )
        await until(lambda: opened.engine.snapshot().idle)
        events.close()
        steps = [event async for event in events if isinstance(event, StepDone)]
        told = [step for step in steps if step.num_sampled_tokens]
        assert [len(step.sampled_req_ids) for step in told] == [
            step.num_sampled_tokens for step in told
        ]
        assert sorted(i for step in told for i in step.sampled_req_ids) == ["r1", "r3", "r3", "r3"]
        assert all(step.tokens_s is not None and step.tokens_s <= step.time_s for step in told)


async def test_the_socket_is_the_servers_own() -> None:
    async with open_engine(is_open=True) as opened:
        sock = listen(0)
        server = await opened.engine.serve_metrics(sock)
        assert port_of(server.url) == sock.getsockname()[1]
        assert (await exchange(server.url, request())).status == 200
    assert isinstance(sock, socket.socket)
    assert sock.fileno() == -1
