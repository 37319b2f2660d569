"""The engine's end of live views: who may look, what is sent, and that nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_kit import open_engine, until
from live_frames import busy

from interlace.engine import live_socket
from interlace.engine.async_engine import AsyncEngine
from interlace.engine.errors import LiveViewError
from interlace.engine.events import (
    RequestFirstToken,
    RequestQueued,
    StepDone,
    StepLaunched,
    StepScheduled,
)
from interlace.engine.live_feed import MOST_VIEWERS, LiveFeed, watchable
from interlace.engine.live_frame import SCHEMA, EngineFacts, FrameReader, to_line
from interlace.engine.live_rates import RateMeter

FACTS = EngineFacts(os.getpid(), "toy", "cpu", "float32", None)


def feed_of(engine: AsyncEngine, folder: Path, **options: object) -> LiveFeed:
    arguments = {"frame_s": 0.02, "folders": [folder], **options}
    return LiveFeed(engine, FACTS, engine._clock, **arguments)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened(tmp_path: Path, **options: object) -> AsyncIterator[tuple[AsyncEngine, LiveFeed]]:
    async with (
        open_engine(is_open=True) as one,
        feed_of(one.engine, tmp_path / "own", **options) as feed,
    ):
        yield one.engine, feed


def is_recording(engine: AsyncEngine) -> bool:
    return engine._events.active


async def attach(feed: LiveFeed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(feed.path), limit=1 << 22)


async def test_two_viewers_see_the_same_and_nothing_is_recorded_without_any(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as (engine, feed):
        assert not is_recording(engine)
        viewers = [await attach(feed) for _ in range(2)]
        frames = [FrameReader().read(await reader.readline()) for reader, _ in viewers]
        assert is_recording(engine)
        assert {frame.engine for frame in frames} == {FACTS}
        await engine.complete([1, 2, 3])
        for _, writer in viewers:
            writer.close()
        await until(lambda: not is_recording(engine) and feed.num_viewers == 0)


async def test_frames_tell_of_requests_and_rates(tmp_path: Path) -> None:
    async with opened(tmp_path) as (engine, feed):
        reader, writer = await attach(feed)
        await reader.readline()
        await engine.complete([1, 2, 3])
        await until(lambda: engine.snapshot().stats.num_finished_requests == 1)
        for _ in range(20):
            frame = FrameReader().read(await reader.readline())
            if frame.snapshot.stats.num_finished_requests and frame.rates.step_s:
                break
        assert frame.rates.generated_per_s > 0
        assert frame.rates.first_token_s is not None
        writer.close()


async def test_a_slow_viewer_loses_frames_and_holds_up_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path, frame_s=0.004) as (engine, feed):
        slow = await asyncio.to_thread(live_socket.connect, feed.path)
        with slow:
            await until(lambda: feed.num_viewers == 1)
            (viewer,) = feed._viewers
            reader, writer = await attach(feed)
            async with asyncio.timeout(20):
                while not viewer.num_lost:
                    await reader.readline()
            numbers = [json.loads(await reader.readline())["number"] for _ in range(3)]
            assert numbers == list(range(numbers[0], numbers[0] + 3))
            await engine.complete([1, 2, 3])
            writer.close()


async def test_another_user_is_sent_away(tmp_path: Path) -> None:
    async with opened(tmp_path, peer_uid=lambda _: os.getuid() + 1) as (engine, feed):
        reader, writer = await attach(feed)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert feed.num_viewers == 0
        assert not is_recording(engine)
        writer.close()


async def test_who_speaks_and_who_is_one_too_many_is_sent_away(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, feed):
        viewers = [await attach(feed) for _ in range(MOST_VIEWERS)]
        await until(lambda: feed.num_viewers == MOST_VIEWERS)
        reader, late = await attach(feed)
        assert await reader.read() == b""
        viewers[0][1].write(b"hello\n")
        await until(lambda: feed.num_viewers == MOST_VIEWERS - 1)
        for _, writer in [*viewers, (reader, late)]:
            writer.close()


async def test_closing_sends_everybody_away_and_removes_the_socket(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, feed):
        path = feed.path
        assert stat.S_IMODE((await asyncio.to_thread(path.parent.stat)).st_mode) == 0o700
        reader, writer = await attach(feed)
        await reader.readline()
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    assert not await asyncio.to_thread(path.exists)


async def test_a_cancelled_owner_leaves_no_socket(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def own() -> None:
        async with opened(tmp_path):
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(own())
        await entered.wait()
        task.cancel()
    assert await asyncio.to_thread(lambda: list((tmp_path / "own").iterdir())) == []


async def test_an_error_inside_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with opened(tmp_path):
            raise ValueError("mine")


async def test_two_engines_of_a_process_have_two_names(tmp_path: Path) -> None:
    async with opened(tmp_path) as (engine, feed), feed_of(engine, tmp_path / "own") as second:
        places = await asyncio.to_thread(live_socket.find, [tmp_path / "own"])
        assert [place.name for place in places] == [feed.name, second.name]
        assert second.name == f"{os.getpid()}-2"


async def test_without_a_place_a_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(live_socket, "folders", lambda: [tmp_path / "file"])
    async with open_engine(is_open=True) as one:
        async with watchable(one.engine) as feed:
            assert feed is None
        with pytest.raises(LiveViewError, match="no place for the socket"):
            async with one.engine.live_view():
                pass


# ---------------------------------------------------------------- sockets


def test_dead_sockets_go_and_living_ones_stay(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    listener, place = live_socket.listen([folder])
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(folder / "999999.sock"))
    dead.close()
    (folder / ".4194999-00000000.new").touch()
    (folder / "notes.txt").touch()
    assert live_socket.find([folder]) == [place]
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{os.getpid()}.sock", "notes.txt"}
    live_socket.close(listener, place)
    live_socket.close(listener, place)
    assert live_socket.find([folder]) == []


def test_without_a_runtime_folder_it_lies_among_temporary_files(tmp_path: Path) -> None:
    own = tmp_path / "interlace-7"
    assert live_socket.folders({}, tmp_path, 7) == [own]
    assert live_socket.folders({"XDG_RUNTIME_DIR": "relative"}, tmp_path, 7) == [own]
    both = live_socket.folders({"XDG_RUNTIME_DIR": "/run/user/7"}, tmp_path, 7)
    assert both == [Path("/run/user/7/interlace"), own]


def test_a_folder_that_others_may_enter_or_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(LiveViewError, match="chmod 700"):
        live_socket.listen([tmp_path / "open"])
    with pytest.raises(LiveViewError, match="remove it"):
        live_socket.listen([tmp_path / "link"])
    with pytest.raises(LiveViewError, match="another user"):
        live_socket.check_own(tmp_path / "real", os.getuid() + 1)
    assert live_socket.find([tmp_path / "open", tmp_path / "link", tmp_path / "none"]) == []


def test_a_path_that_is_too_long_gives_way_to_a_shorter_one(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(LiveViewError, match="too long a path"):
        live_socket.listen([long])
    listener, place = live_socket.listen([long, tmp_path / "own"])
    assert place.path.parent == tmp_path / "own"
    live_socket.close(listener, place)


def test_a_peer_has_a_uid() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert live_socket.peer_uid(near) == os.getuid()


# ---------------------------------------------------------------- frames


def test_a_frame_comes_back_as_it_was() -> None:
    assert FrameReader().read(to_line(busy())) == busy()


def test_what_was_added_is_ignored() -> None:
    said = json.loads(to_line(busy()))
    said["snapshot"]["news"] = [1]
    assert FrameReader().read(json.dumps(said).encode()) == busy()


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"schema":1}', b'{"schema":"1"}'],
    ids=["empty", "list", "no schema", "not UTF-8", "deep", "bare", "no number"],
)
def test_what_is_no_frame_is_refused(line: bytes) -> None:
    with pytest.raises(LiveViewError, match="no frame"):
        FrameReader().read(line)


def test_a_wrong_field_is_named() -> None:
    said = json.loads(to_line(busy()))
    said["snapshot"]["connectors"][0]["load"]["layers"][3] = "asleep"
    with pytest.raises(LiveViewError, match="layers is 'asleep'"):
        FrameReader().read(json.dumps(said).encode())


def test_a_newer_schema_says_what_to_do() -> None:
    with pytest.raises(LiveViewError, match="the interlace that it runs on"):
        FrameReader().read(json.dumps({"schema": SCHEMA + 1}).encode())


def test_rates_are_of_the_window() -> None:
    meter = RateMeter(0.0)
    meter.follow([RequestQueued(0.1, "a", 5, 0)])
    for i in range(4):
        at = 1.0 + 0.1 * i
        meter.follow(
            [
                StepScheduled(at, i, (("a", 10),)),
                StepLaunched(at, i),
                StepDone(at + 0.05, i, 1),
            ]
        )
    meter.follow([RequestFirstToken(1.05, "a"), StepScheduled(1.4, 9, ()), StepLaunched(1.4, 9)])
    meter.follow([StepDone(1.9, 9, 0)])  # asks a connector, and computes nothing
    meter.note_lag(1.5, 0.003)
    rates = meter.rates(2.0)
    assert rates.generated_per_s == 2.0
    assert rates.computed_per_s == 20.0
    assert rates.step_s == pytest.approx(0.05)
    assert rates.busy_share == pytest.approx(0.1)
    assert rates.first_token_s == pytest.approx(0.95)
    assert rates.loop_lag_s == 0.003
    later = meter.rates(10.0)
    assert (later.generated_per_s, later.step_s, later.loop_lag_s) == (0.0, None, 0.0)
    assert later.first_token_s is not None


def test_a_step_that_was_under_way_before_anybody_looked_is_work() -> None:
    meter = RateMeter(10.0, num_under_way=1)
    assert meter.rates(10.5).busy_share == 1.0
    assert meter.rates(14.0).busy_share == 1.0
    meter.follow([StepDone(14.0, 7, 1), StepScheduled(15.0, 8, (("a", 1),)), StepLaunched(15.0, 8)])
    rates = meter.rates(15.0)
    assert rates.busy_share == pytest.approx(0.5)
    assert rates.step_s is None, "how long that one took nobody knows"
    assert meter.rates(17.0).busy_share == 1.0
    meter.follow([StepDone(17.0, 8, 1)])
    assert meter.rates(17.0).step_s == pytest.approx(2.0)
