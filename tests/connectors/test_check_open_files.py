"""Which open files count as left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.connectors.conformance import open_files
from interlace.connectors.conformance.open_files import FilesSince


@pytest.fixture
def handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for `/proc/self/fd`."""
    monkeypatch.setattr(open_files, "_LISTS", (tmp_path / "not there", tmp_path))
    (tmp_path / "0").symlink_to("/dev/pts/0")
    return tmp_path


def test_what_a_gpus_driver_opens_does_not_count(handles: Path) -> None:
    files = FilesSince()
    (handles / "1").symlink_to("/some/file")
    (handles / "2").symlink_to("socket:[7]")
    for number in range(3, 60):
        (handles / str(number)).symlink_to("/dev/nvidia0")
    (handles / "60").symlink_to("/dev/nvidia-uvm")
    assert files.num_open() == 2


def test_where_handles_are_no_links_all_count(handles: Path) -> None:
    files = FilesSince()
    (handles / "7").write_text("")
    assert files.num_open() == 1
    (handles / "0").unlink()
    (handles / "7").unlink()
    assert files.num_open() == 0
