"""What others store is known within a second, though nobody asks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from slab_kit import PATIENCE_S, SPACE, folder_in, found, until, write_slab

from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.watch import Watch

EVERY_S = 0.002


def test_what_comes_and_goes_is_seen(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    catalog = Catalog(folder, SPACE)
    watch = Watch(catalog, every_s=EVERY_S)
    path = write_slab(folder, [1, 2])
    until(lambda: found(catalog, range(4)) == [1, 2])
    path.unlink()
    until(lambda: len(catalog) == 0)
    assert watch.close(PATIENCE_S)
    assert watch.close(PATIENCE_S)
    write_slab(folder, [3])
    time.sleep(5 * EVERY_S)
    assert len(catalog) == 0, "it looks no more"
    catalog.close()


def test_where_somebody_asks_it_does_not_look(tmp_path: Path) -> None:
    catalog = Catalog(folder_in(tmp_path), SPACE, clock=lambda: 7.0)
    catalog.look()
    looked, now_s = threading.Event(), [7.0]

    def clock() -> float:
        looked.set()
        return now_s[0]

    watch = Watch(catalog, every_s=EVERY_S, clock=clock)
    assert looked.wait(PATIENCE_S)
    write_slab(folder_in(tmp_path), [1])
    time.sleep(5 * EVERY_S)
    assert len(catalog) == 0, "the last look is not older"
    now_s[0] = 8.0
    until(lambda: len(catalog) == 1)
    assert watch.close(PATIENCE_S)
    catalog.close()


def test_what_cannot_be_looked_at_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_in(tmp_path)
    catalog = Catalog(folder, SPACE)
    num_tries = [0]
    names = catalog._names

    def refuse() -> set[str]:
        num_tries[0] += 1
        if num_tries[0] < 4:
            raise PermissionError("no")
        return names()

    monkeypatch.setattr(catalog, "_names", refuse)
    watch = Watch(catalog, every_s=EVERY_S)
    write_slab(folder, [1])
    until(lambda: len(catalog) == 1)
    assert watch.close(PATIENCE_S)
    assert [one for one in caplog.messages if "cannot be watched" in one] == [
        "the store cannot be watched: no"
    ]
    catalog.close()


def test_a_look_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(folder_in(tmp_path), SPACE)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hang() -> set[str]:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return set()

    monkeypatch.setattr(catalog, "_names", hang)
    watch = Watch(catalog, every_s=EVERY_S)
    assert has_begun.wait(PATIENCE_S)
    assert not watch.close(0.01)
    may_go_on.set()
    assert watch.close(PATIENCE_S)
