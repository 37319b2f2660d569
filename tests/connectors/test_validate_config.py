"""What our own connectors refuse before a model is loaded: options, places, kinds of engines."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from interlace import AsyncEngine
from interlace.connectors.conformance import Script
from interlace.connectors.factory import KVConnectorFactory
from interlace.connectors.slab_store.directory import MARKER, Limits, SlabDirectory
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig
from interlace.engine.errors import ConfigError


def own_config(name: str, extra: dict[str, Any], role: KVRole, **engine: Any) -> EngineConfig:
    transfer = KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)
    return EngineConfig(kv_transfer_config=transfer, **engine)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


PIPELINE, EXAMPLE, STATES = "PipelineConnector", "ExampleConnector", "ExampleHiddenStatesConnector"
PATH, STORAGE = "path", "shared_storage_path"
BAD: list[tuple[str, dict[str, Any], str]] = [
    (PIPELINE, {"host_byte": 1}, "no field 'host_byte'. Did you mean 'host_bytes'"),
    (PIPELINE, {"group_size": 0}, "group_size must be a whole number"),
    (PIPELINE, {"host_bytes": 1 << 60}, "give the connector less"),
    (PIPELINE, {"store": "file"}, "path is for"),
    (PIPELINE, {"store": "file", PATH: ""}, "path must name a directory, not ''"),
    (PIPELINE, {"store": "file", PATH: 5}, "path must name a directory, not 5"),
    (PIPELINE, {"store": "file", PATH: "a\0b"}, "path must name a directory"),
    (PIPELINE, {"store": "file", PATH: "{}/file"}, "is no directory, and cannot become one"),
    (PIPELINE, {"store": "file", PATH: "{}/file/kv"}, "is no directory, and cannot become one"),
    (PIPELINE, {"store": "file", PATH: "{}/link"}, "is no directory, and cannot become one"),
    (PIPELINE, {"tiers": ["file"], PATH: "{}"}, "holds other things than a store of slabs"),
    (PIPELINE, {"tiers": ["file"], PATH: "{}/old"}, "holds slabs of version 99"),
    (EXAMPLE, {}, "shared_storage_path must name a directory"),
    (EXAMPLE, {STORAGE: "{}/file/kv"}, "KV cannot be saved to .*Not a directory"),
    (EXAMPLE, {STORAGE: "{}/old"}, "holds slabs of PipelineConnector's store"),
    (STATES, {STORAGE: "{}/file"}, "hidden states cannot be saved to .*Not a directory"),
    (STATES, {STORAGE: "{}/kv", "deadline_s": 0}, "deadline_s must be a number"),
    ("DecodeBenchConnector", {"fill_std": -1}, "fill_std must be a number"),
    ("ScriptedConnector", {}, "pass a Script object"),
    ("MultiConnector", {}, "at least one child"),
]


@pytest.fixture
def odd_places(tmp_path: Path) -> Path:
    """A file, a link to nothing, and a store of another version."""
    root = tmp_path / "places"
    (root / "old").mkdir(parents=True)
    (root / "old" / MARKER).write_text('{"version": 99}')
    (root / "file").write_text("")
    (root / "link").symlink_to(root / "nothing")
    return root


@pytest.mark.parametrize(("name", "extra", "message"), BAD)
@pytest.mark.parametrize("as_child", [False, True], ids=["alone", "child"])
def test_our_own_connectors_refuse_bad_options_early(
    name: str, extra: dict[str, Any], message: str, as_child: bool, odd_places: Path
) -> None:
    extra = {
        key: value.format(odd_places) if isinstance(value, str) else value
        for key, value in extra.items()
    }
    if as_child:
        child = {"kv_connector": name, "kv_connector_extra_config": extra}
        good = {"kv_connector": PIPELINE, "kv_connector_extra_config": {"host_bytes": 1 << 20}}
        name, extra = "MultiConnector", {"connectors": [good, child]}
        message = rf"MultiConnector: connectors\[1\]: .*{message}"
    before = tree(odd_places)
    config = own_config(name, extra, "kv_both")
    with pytest.raises(ConfigError, match=message):
        KVConnectorFactory().validate_config(config)
    assert tree(odd_places) == before


def test_a_model_is_not_loaded_for_bad_options(
    odd_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("interlace.layers.checkpoint.load_checkpoint", load)

    async def open_engine(config: EngineConfig) -> None:
        async with AsyncEngine.from_config(config):
            pass

    for name, extra, message in BAD:
        if "{" not in str(list(extra.values())):
            with pytest.raises(ConfigError, match=message):
                asyncio.run(open_engine(own_config(name, extra, "kv_both")))
    good = own_config(PIPELINE, {"store": "file", "path": str(odd_places / "kv")}, "kv_both")
    with pytest.raises(AssertionError, match="weights are loaded"):
        asyncio.run(open_engine(good))
    assert not (odd_places / "kv").exists(), "who has no model makes no store"


@pytest.mark.parametrize(("name", "key"), [(PIPELINE, PATH), (EXAMPLE, STORAGE), (STATES, STORAGE)])
def test_a_folder_that_may_not_be_made_is_refused(
    name: str, key: str, odd_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*, prefix: str, dir: Path) -> str:  # noqa: A002 - the library's name
        asked.append(dir)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), prefix)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    extra = {key: str(odd_places / "a" / "b")} | ({"store": "file"} if name == PIPELINE else {})
    with pytest.raises(ConfigError, match="Permission denied"):
        KVConnectorFactory().validate_config(own_config(name, extra, "kv_both"))
    assert asked == [odd_places], "the nearest that there is"
    if name == EXAMPLE:  # it makes nothing
        KVConnectorFactory().validate_config(own_config(name, extra, "kv_consumer"))


def test_what_is_in_order_passes(tmp_path: Path) -> None:
    made = tmp_path / "made"
    SlabDirectory(made, Limits()).prepare()
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    for name, extra in (
        (PIPELINE, {"host_bytes": 1 << 20}),
        (PIPELINE, {"store": "file", "path": str(made), "host_bytes": 1 << 20}),
        (PIPELINE, {"tiers": ["file"], "path": str(tmp_path / "empty"), "host_bytes": 1 << 20}),
        (EXAMPLE, {"shared_storage_path": str(tmp_path / "a" / "b")}),
        (STATES, {"shared_storage_path": str(tmp_path / "empty")}),
        ("DecodeBenchConnector", {}),
        ("ScriptedConnector", {"script": Script()}),
    ):
        KVConnectorFactory().validate_config(own_config(name, extra, "kv_both"))
    assert tree(tmp_path) == before


def test_engines_that_a_connector_does_not_work_in_are_refused_early(tmp_path: Path) -> None:
    for name, extra, engine, message in (
        (PIPELINE, {"host_bytes": 1 << 20}, {"tensor_parallel_size": 2}, "one worker only"),
        (PIPELINE, {"host_bytes": 1 << 20}, {"hidden_state_layer_ids": (0,)}, "not store hidden"),
        (EXAMPLE, {STORAGE: str(tmp_path)}, {"hidden_state_layer_ids": (0,)}, "not store hidden"),
    ):
        with pytest.raises(ConfigError, match=message):
            KVConnectorFactory().validate_config(own_config(name, extra, "kv_both", **engine))
