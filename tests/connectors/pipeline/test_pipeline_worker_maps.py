"""Registered slabs without an engine: what comes and goes when, and who waits for whom."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_memory import StrictMemory

from interlace.connectors.pipeline.messages import Load, PipelineMetadata, RecordRun
from interlace.connectors.pipeline.worker_maps import RegisteredSlabs
from interlace.connectors.slab_store.mapping import MappedSlab, Outlook
from interlace.layers.record_space import RecordBytes, RecordSpace

SHAPE = (1, 4096)
"""Of a record."""
NUM_HOST = 5


class Kit:
    """Slabs of three records, whatever should be mapped, and a clock."""

    def __init__(self, folder: Path, most_records: int = 100, code: int = 0) -> None:
        self.now_s = 100.0
        self.memory = StrictMemory(code=code)
        self.space = RecordSpace(torch.zeros(NUM_HOST, *SHAPE, dtype=torch.uint8))
        self.wanted: list[str] = []
        self.stale: set[str] = set()
        self._folder = folder
        self.maps = RegisteredSlabs(
            self.space,
            self,  # type: ignore[arg-type]
            self.memory,
            most_bytes=most_records * 4096,
            clock=lambda: self.now_s,
        )

    def look(self, held: set[str]) -> Outlook:
        """As a scout does."""
        return Outlook(
            tuple(self.slab(name) for name in self.wanted if name not in held),
            frozenset(self.stale & held),
        )

    def slab(self, name: str) -> MappedSlab:
        path = self._folder / name
        if not path.exists():
            path.write_bytes(np.full(3 * 4096, len(name), np.uint8).tobytes())
        return MappedSlab.open(path, first_byte=0, num_records=3, record_bytes=4096)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()
        self.wanted.remove(name)

    def visit(self, *, is_computing: bool = False) -> tuple[list[str], set[str]]:
        """(slabs that are registered by it, slabs that are closing)."""
        self.maps.visit(is_computing=is_computing)
        mapped, closing = self.maps.take_news()
        return [one.slab for one in mapped], set(closing)

    def step(self, *loads: Load, closed: frozenset[str] = frozenset()) -> None:
        self.maps._end.set()  # no thread
        self.maps.begin_step(PipelineMetadata(1, loads=loads, closed=closed))


def load_of(record: int, load_id: int = 7) -> Load:
    return Load(load_id, "a", (RecordRun(record, 1, 2),), is_async=True, checksums={record: 1})


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_at_the_beginning_all_are_registered_and_told_with_the_handshake(kit: Kit) -> None:
    kit.wanted = ["a", "b"]
    kit.maps.open_recent()
    mapped, closing = kit.maps.take_news()
    assert [(one.slab, one.first, one.num_records) for one in mapped] == [("a", 6, 3), ("b", 10, 3)]
    assert not closing
    assert kit.space.holds(10, 3)
    assert kit.memory.num_bytes == kit.maps.num_bytes == 6 * 4096
    assert kit.maps.close(1)
    assert not kit.memory.registered
    assert not kit.space.holds(6, 1)
    assert kit.maps.close(1)


def test_later_one_comes_at_a_time_and_seldom_while_requests_compute(kit: Kit) -> None:
    kit.wanted = ["a", "b", "c"]
    kit.maps.look()
    kit.now_s += 60
    assert kit.visit(is_computing=True) == (["a"], set())
    assert kit.visit(is_computing=True) == ([], set())
    kit.now_s += 60
    assert kit.visit(is_computing=True) == (["b"], set())
    assert kit.visit() == (["c"], set()), "while nothing computes at once"
    assert kit.visit() == ([], set())
    assert not kit.maps.has_news
    kit.maps.close(1)


def test_what_is_to_go_stays_until_nobody_loads_from_it(kit: Kit) -> None:
    kit.wanted = ["a"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.step(load_of(7))
    kit.remove("a")
    kit.maps.look()
    assert kit.visit() == ([], {"a"})
    assert kit.visit() == ([], set()), "it is told once"
    kit.step(load_of(6, 8), closed=frozenset({"a"}))  # that was ordered before it was told
    kit.visit()
    kit.maps.end_load(7)
    kit.visit()
    assert kit.memory.registered
    assert kit.space.holds(6, 3)
    kit.maps.end_load(8)
    kit.visit()
    assert not kit.memory.registered
    assert not kit.space.holds(6, 1)
    kit.maps.close(1)


def test_while_nobody_comes_by_a_removed_file_goes_by_itself(kit: Kit) -> None:
    kit.wanted = ["a", "b"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.step(load_of(11))
    for name in ("a", "b"):
        kit.remove(name)
    kit.maps.look()
    assert kit.maps.num_bytes == 6 * 4096, "somebody came by just now"
    kit.now_s += 2
    kit.maps.look()
    assert kit.maps.num_bytes == 3 * 4096, "the other one is being loaded from"
    kit.maps.end_load(7)
    kit.maps.look()
    assert not kit.memory.registered
    assert kit.visit() == ([], {"a", "b"}), "and the scheduler side hears of it"
    kit.maps.close(1)


def test_room_is_made_before_more_is_registered(tmp_path: Path) -> None:
    kit = Kit(tmp_path, most_records=6)
    kit.wanted = ["a", "b"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.wanted, kit.stale = ["b", "c"], {"a"}
    kit.maps.look()
    assert kit.visit() == ([], {"a"})
    kit.step(closed=frozenset({"a"}))
    assert kit.visit() == ([], set()), "a goes"
    assert kit.visit() == (["c"], set())
    assert kit.maps.num_bytes == 6 * 4096
    assert kit.space.holds(14, 3), "under a number of its own"
    kit.maps.close(1)


def test_what_waits_to_be_registered_and_is_removed_is_let_go_of(kit: Kit) -> None:
    kit.wanted = ["a"]
    kit.maps.look()
    kit.remove("a")
    kit.now_s += 2
    kit.maps.look()
    assert kit.visit() == ([], set())
    assert kit.memory.num_registered == 0
    kit.maps.close(1)


def test_who_is_refused_is_not_asked_again(tmp_path: Path) -> None:
    kit = Kit(tmp_path, code=801)
    kit.wanted = ["a"]
    kit.maps.open_recent()
    for _ in range(3):
        kit.maps.look()
        assert kit.visit() == ([], set())
    assert kit.maps.num_bytes == 0
    assert kit.maps.close(1)


def test_what_is_being_registered_is_not_mapped_once_more(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that comes meanwhile, or began before, finds it again: registered twice, it would
    never be let go of."""
    kit.wanted = ["a"]
    kit.maps.look()
    before = kit.look(set())
    register = kit.memory.register

    def register_slowly(address: int, num_bytes: int, *, read_only: bool = False) -> int:
        kit.maps.look()
        return register(address, num_bytes, read_only=read_only)

    monkeypatch.setattr(kit.memory, "register", register_slowly)
    assert kit.visit() == (["a"], set())
    kit.maps._note(before)
    kit.now_s += 60
    assert kit.visit() == ([], set())
    assert kit.memory.num_registered == 1
    kit.maps.close(1)
    assert not kit.memory.registered


def test_a_folder_that_cannot_be_looked_at_costs_nothing_but_a_word(
    kit: Kit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(held: set[str]) -> Outlook:
        raise PermissionError("no")

    monkeypatch.setattr(kit, "look", fail)
    kit.maps.open_recent()
    assert "none is registered: no" in caplog.text
    assert kit.maps.close(1)


def test_what_the_thread_lets_go_of_meanwhile_is_not_let_go_of_twice(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw that nobody came by for a second; now somebody does, and both find the same slab."""
    kit.wanted = ["a"]
    kit.maps.open_recent()
    kit.remove("a")
    kit.maps.look()
    kit.visit(is_computing=True)
    kit.step(closed=frozenset({"a"}))
    remove = kit.maps._remove

    def remove_late(one: Any) -> None:
        kit.maps._let_go_of_removed()
        remove(one)

    monkeypatch.setattr(kit.maps, "_remove", remove_late)
    kit.visit()
    assert not kit.memory.registered
    kit.maps.close(1)


def test_what_waits_for_room_and_is_removed_or_unwanted_is_let_go_of(tmp_path: Path) -> None:
    """Else it would keep its room on the disk while requests come, and others from being
    registered."""
    kit = Kit(tmp_path, most_records=3)
    kit.wanted = ["a"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.wanted, kit.stale = ["b"], {"a"}
    kit.maps.look()
    kit.remove("b")
    kit.wanted, kit.stale = ["a"], set()
    kit.maps.look()
    assert not kit.maps._fresh, "removed"
    kit.wanted, kit.stale = ["c"], {"a"}
    kit.maps.look()
    kit.wanted, kit.stale = ["a"], {"c"}
    kit.maps.look()
    assert not kit.maps._fresh, "not wanted any more"
    kit.maps.close(1)


def test_a_file_that_its_server_forgets_counts_as_removed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle of a network's file system; the thread lives on."""
    kit.wanted = ["a"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.wanted = []
    with monkeypatch.context() as patched:

        def stale(fd: int) -> os.stat_result:
            raise OSError(errno.ESTALE, "stale file handle")

        patched.setattr(os, "fstat", stale)
        kit.maps.look()
    assert kit.visit() == ([], {"a"})
    kit.maps.close(1)


def test_nothing_is_unmapped_while_something_is_mapped(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread, at that moment: what was just mapped would be lost, and never be loaded."""
    kit.wanted = ["a"]
    kit.maps.look()
    add = kit.space.map

    def add_alone(rows: RecordBytes) -> int:
        assert kit.maps._lock.locked()
        return add(rows)

    monkeypatch.setattr(kit.space, "map", add_alone)
    assert kit.visit() == (["a"], set())
    kit.maps.close(1)


def test_another_file_by_the_name_of_one_that_was_let_go_of_is_left_alone(kit: Kit) -> None:
    """The scheduler side would answer that it is closed, and go on ordering loads from it."""
    kit.wanted = ["a"]
    kit.maps.open_recent()
    kit.maps.take_news()
    kit.remove("a")
    kit.now_s += 2
    kit.maps.look()
    assert not kit.memory.registered
    kit.wanted = ["a"]
    kit.maps.look()
    assert kit.visit() == ([], {"a"})
    kit.maps.close(1)
