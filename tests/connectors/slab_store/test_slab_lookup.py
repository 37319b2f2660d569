"""What the event loop knows of a store: looks on a lane, places, thresholds."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from slab_kit import PATIENCE_S, SPACE, WritingKit, block_hash, folder_in, record, write_slab

from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.lookup import AVOIDED_S, StoredBlocks
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import VirtualLanes


@dataclasses.dataclass
class World:
    """A store, somebody who writes to it, and somebody who asks."""

    kit: WritingKit
    writing: VirtualLanes
    asking: VirtualLanes
    stored: StoredBlocks
    now_s: list[float]

    def write(self, *numbers: int) -> None:
        self.kit.write(*numbers)
        self.writing.drain()

    def ask(self, *numbers: int) -> int:
        return self.stored.num_stored([block_hash(number) for number in numbers])


def world(root: Path, *, threshold: int = 1) -> World:
    writing, asking = (VirtualLanes(n, "lazy", polls_per_work=1_000_000) for n in range(2))
    kit = WritingKit(root, writing.lane("write"))
    now_s = [0.0]
    stored = StoredBlocks(
        Catalog(kit.folder, SPACE),
        asking.lane("look"),
        threshold=threshold,
        clock=lambda: now_s[0],
    )
    return World(kit, writing, asking, stored, now_s)


def test_looks_are_begun_by_questions_and_never_waited_for(tmp_path: Path) -> None:
    one = world(tmp_path)
    one.write(0, 1)
    assert one.ask(0, 1) == 0, "the first look is under way"
    assert len(one.asking.pending) == 1
    one.asking.drain()
    assert one.ask(0, 1, 2) == 2
    one.write(2)
    assert not one.asking.pending, "it is not time yet"
    one.now_s[0] = 0.5
    assert one.ask(0, 1, 2) == 2
    assert len(one.asking.pending) == 1
    assert one.ask(0, 1, 2) == 2
    assert len(one.asking.pending) == 1, "one at a time"
    one.asking.drain()
    assert one.ask(0, 1, 2, 3) == 3
    assert one.ask(7, 0) == 0, "from the first one on"


def test_places_are_those_that_were_written(tmp_path: Path) -> None:
    one = world(tmp_path)
    write = one.kit.write(0, 1, 2, 3)
    one.writing.drain()
    one.asking.drain()
    hashes = [block_hash(number) for number in range(4)]
    found = one.stored.places(hashes)
    assert found is not None
    assert [
        StoredPlace(place.slab.path.name, place.entry.record, place.entry.checksum)
        for place in found
    ] == list(write.places)
    assert one.stored.places([*hashes, block_hash(4)]) is None


def test_what_is_damaged_is_not_found_again(tmp_path: Path) -> None:
    one = world(tmp_path)
    one.write(0, 1, 2)
    one.asking.drain()
    hashes = [block_hash(number) for number in range(3)]
    places = one.stored.places(hashes)
    assert places is not None
    one.stored.lose(hashes[1], places[1])
    for _ in range(3):
        assert one.ask(0, 1, 2) == 1
        one.now_s[0] += 100
        one.asking.drain()
    assert one.stored.wants(hashes[1]), "it may be stored again"
    one.write(1)
    one.now_s[0] += 1
    one.ask(0)
    one.asking.drain()
    assert one.ask(0, 1, 2) == 3


def test_what_could_not_be_read_now_is_found_later(tmp_path: Path) -> None:
    """Whatever hung, or failed once, may be well by then."""
    one = world(tmp_path)
    one.write(0, 1)
    one.asking.drain()
    one.stored.avoid(block_hash(1))
    assert one.ask(0, 1) == 1
    one.now_s[0] += AVOIDED_S - 0.1
    assert one.ask(0, 1) == 1
    one.now_s[0] += 0.1
    assert one.ask(0, 1) == 2


def test_a_slab_that_goes_takes_its_blocks_along(tmp_path: Path) -> None:
    one = world(tmp_path)
    one.write(0, 1, 2, 3)
    one.asking.drain()
    assert one.ask(0, 1, 2, 3) == 4
    oldest = one.kit.directory.slabs()[0]
    assert one.stored.places([block_hash(0)]) is not None
    oldest.path.unlink()
    one.now_s[0] += 1
    one.ask(0)
    one.asking.drain()
    assert [one.ask(number) for number in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_block_is_worth_storing_at_its_so_manieth_use(threshold: int, tmp_path: Path) -> None:
    one = world(tmp_path, threshold=threshold)
    assert [one.stored.wants(block_hash(0)) for _ in range(threshold)] == [
        *[False] * (threshold - 1), True
    ]  # fmt: skip
    one.stored.begin_store([block_hash(0)])
    assert not one.stored.wants(block_hash(0))
    one.write(0)
    one.stored.end_store([block_hash(0)])
    one.ask(0)
    one.asking.drain()
    assert one.ask(0) == 1
    assert not any(one.stored.wants(block_hash(0)) for _ in range(threshold))


def test_what_was_dropped_is_worth_storing_at_its_next_use(tmp_path: Path) -> None:
    """What was written and has gone since is not: its uses are counted anew."""
    one = world(tmp_path, threshold=3)
    dropped, written = hashes = [block_hash(0), block_hash(1)]
    assert [all([*map(one.stored.wants, hashes)]) for _ in range(3)] == [False, False, True]
    one.stored.begin_store(hashes)
    one.stored.end_store(hashes, {dropped})
    assert [one.stored.wants(dropped), one.stored.wants(written)] == [True, False]
    assert one.stored.wants(dropped), "until it is stored"


def test_what_was_stored_is_not_stored_again_before_a_look_can_find_it(tmp_path: Path) -> None:
    one = world(tmp_path)
    one.asking.drain()
    one.stored.begin_store([block_hash(0)])
    one.stored.end_store([block_hash(0)])
    assert not one.stored.wants(block_hash(0)), "and a look is begun"
    assert not one.stored.wants(block_hash(0))
    one.asking.drain()
    assert one.stored.wants(block_hash(0)), "it has gone already, since it was not found"
    one.stored.end_store([block_hash(0)])
    one.stored.forget_all()
    assert one.stored.wants(block_hash(0))


def test_a_store_that_cannot_be_looked_at_is_told_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = world(tmp_path)
    one.write(0)

    def fail(catalog: Catalog) -> None:
        raise PermissionError("not for you")

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "look", fail)
        one.now_s[0] += 1
        one.stored._look = None
        one.ask(0)
        one.asking.drain()
    with caplog.at_level(logging.WARNING):
        one.now_s[0] += 1
        one.ask(0)
    assert "cannot be looked at: not for you" in caplog.text
    one.asking.drain()
    assert one.ask(0) == 1


def test_a_look_that_a_question_begins_comes_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first one: that is waited for. And the end waits for no moment."""
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    catalog = Catalog(tmp_path, SPACE)
    waits: list[float] = []
    looks: list[int] = []
    monkeypatch.setattr(catalog, "look", lambda: looks.append(len(waits)))
    stored = StoredBlocks(catalog, lanes.lane("look"), refresh_s=0.0, delay_s=0.25)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 2

    monkeypatch.setattr(stored, "_end", SimpleNamespace(wait=wait, set=lambda: None))
    for _ in range(3):
        lanes.drain()
        stored.refresh()
    lanes.drain()
    assert waits == [0.0, 0.25, 0.25, 0.25]
    assert looks == [1, 2], "then it was to end"


def test_the_end_does_not_wait_for_the_next_look(tmp_path: Path) -> None:
    stored = StoredBlocks(
        Catalog(tmp_path, SPACE), ThreadLanes().lane("look"), refresh_s=0.0, delay_s=3600.0
    )
    assert stored.wait_for_look(20.0)
    stored.refresh()
    assert stored.is_looking
    assert stored.close(20.0)


def test_the_end(tmp_path: Path) -> None:
    kit = WritingKit(tmp_path, ThreadLanes().lane("write"))
    kit.write(0)
    kit.writer.close(PATIENCE_S)
    stored = StoredBlocks(Catalog(kit.folder, SPACE), ThreadLanes().lane("look"))
    assert stored.close(PATIENCE_S)
    assert stored.num_stored([block_hash(0)]) == 0
    stored._looked_s = float("-inf")
    stored.refresh()  # says so, and goes on
    assert stored.close(PATIENCE_S)


def test_what_is_forgotten_is_found_when_it_is_stored_again(tmp_path: Path) -> None:
    """Also what was being stored meanwhile, and was seen by no look yet: not even when it is stored
    once more."""
    one = world(tmp_path)
    hashes = [block_hash(number) for number in range(3)]
    one.write(0, 1)
    one.asking.drain()
    assert one.ask(0, 1) == 2
    begun_ns = one.stored.begin_store([hashes[2]])
    one.stored.forget_all()
    one.kit.writer.write([record(2)._replace(saved_ns=begun_ns)])
    one.writing.drain()
    one.stored.end_store([hashes[2]])
    for _ in range(3):
        assert one.ask(0, 1, 2) == one.ask(2) == 0
        assert one.stored.places(hashes[:1]) is None
        one.asking.drain()
        one.now_s[0] += 1
    assert all(one.stored.wants(one_hash) for one_hash in hashes)
    begun_ns = one.stored.begin_store(hashes)
    assert one.ask(2) == 0, "not yet"
    again = one.kit.writer.write([record(n)._replace(saved_ns=begun_ns) for n in range(3)])
    one.writing.drain()
    one.stored.end_store(hashes)
    one.ask(0)
    one.asking.drain()
    assert one.ask(0, 1, 2) == 3
    found = one.stored.places(hashes)
    assert found is not None
    assert [place.entry.record for place in found] == [place.record for place in again.places]


def test_what_was_used_is_written_down_though_a_look_still_waits_at_the_end(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    path, lanes = write_slab(folder, [1]), ThreadLanes()
    stored = StoredBlocks(
        Catalog(folder, SPACE), lanes.lane("look"), refresh_s=0.0, delay_s=PATIENCE_S
    )
    assert stored.wait_for_look(PATIENCE_S)
    os.utime(path, (1, 1))
    assert stored.places([block_hash(1)])
    stored.refresh()
    assert stored.is_looking
    assert stored.close(PATIENCE_S)
    assert path.stat().st_mtime > 1
