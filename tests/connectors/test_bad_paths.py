"""Every place that a connector can be given and cannot use is one error that says what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig
from interlace.engine.errors import ConfigError

PLACES: dict[str, Callable[[Path], Any]] = {
    "a file": lambda root: root / "file",
    "in a file": lambda root: root / "file" / "kv",
    "deep in a file": lambda root: root / "file" / "a" / "b",
    "a link to nothing": lambda root: root / "link",
    "a link to itself": lambda root: root / "loop",
    "a long name": lambda root: root / ("x" * 300),
    "below a long name": lambda root: root / ("x" * 300) / "kv",
    "a long name in what is to be made": lambda root: root / "new" / ("x" * 300),
    "a long path": lambda root: root / "/".join(["xxxx"] * 1000),
    "NUL": lambda root: f"{root}/a\0b",
    "half a character": lambda root: f"{root}/\ud800",
    "nothing": lambda root: "",
    "blanks": lambda root: "  ",
    "a number": lambda root: 7,
    "a list": lambda root: ["kv"],
}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "slabs": ("PipelineConnector", {"store": "file"}, "path"),
    "slabs alone": ("PipelineConnector", {"tiers": ["file"]}, "path"),
    "folders": ("ExampleConnector", {}, "shared_storage_path"),
    "states": ("ExampleHiddenStatesConnector", {}, "shared_storage_path"),
}
MISSING_IS_FINE = {"a link to nothing", "a long name in what is to be made"}
"""For who only loads: others may make what is not there."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "places"
    root.mkdir()
    (root / "file").write_text("")
    (root / "link").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root / "loop")
    return root


def tree(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def config_of(kind: str, place: Any, role: KVRole) -> EngineConfig:
    name, extra, key = KINDS[kind]
    text = str(place) if isinstance(place, Path) else place
    transfer = KVTransferConfig(
        kv_connector=name, kv_role=role, kv_connector_extra_config=extra | {key: text}
    )
    return EngineConfig(kv_transfer_config=transfer)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_bad_place_is_refused_with_a_remedy(
    kind: str, place: str, role: KVRole, root: Path
) -> None:
    before = tree(root)
    config = config_of(kind, PLACES[place](root), role)
    if (kind, role) == ("folders", "kv_consumer") and place in MISSING_IS_FINE:
        KVConnectorFactory().validate_config(config)
        return
    with pytest.raises(ConfigError, match=r"(?i)\b(give|choose|set|must name)\b") as refused:
        KVConnectorFactory().validate_config(config)
    assert len(str(refused.value)) < 6000
    assert tree(root) == before


def test_a_home_of_nobody_is_a_folder_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        KVConnectorFactory().validate_config(config_of(kind, "~nobody-of-that-name/kv", "kv_both"))
    assert not tree(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_system_that_is_only_read(
    kind: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.access` knows nothing of it for some, nor of other users than the real one."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        KVConnectorFactory().validate_config(config_of(kind, root / "kv", "kv_both"))


def test_who_loads_is_told_of_a_folder_that_may_not_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"loaded from .*Permission denied\. Choose"):
        KVConnectorFactory().validate_config(config_of("folders", root, "kv_consumer"))


@pytest.mark.parametrize("module", ["", ".", ".near", "a\0b", "a/b.py", "\ud800", "sys", "exits"])
def test_a_module_that_has_no_connector(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"(?i)\b(check|name|set|must)\b"):
        KVConnectorFactory().validate_config(
            EngineConfig(
                kv_transfer_config=KVTransferConfig(
                    kv_connector="Mine", kv_role="kv_both", kv_connector_module_path=module
                )
            )
        )
