"""What PipelineConnector refuses, before anything is copied: options, memory that is not there, and
records and pages that do not fit each other."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_model import deep_model
from pipeline_kit import RECORD_BYTES, Rig, an_engine

from interlace.connectors.pipeline.host_room import container_room
from interlace.connectors.pipeline.layer_pipeline import LayerPipeline
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.records import HostRecords
from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.layers.hardware.host import Memory
from interlace.layers.virtual_lanes import VirtualLanes

# -------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("host_bytes", [0, -1, 1.5, "4G", True, None]),
        ("load_mode", ["", "Bulk", "layer-wise", 1, None, ["bulk"]]),
        ("group_size", [0, -2, 2.0, "2", True, None]),
        ("max_load_stall_ms", [-0.1, 60_001, math.inf, math.nan, "20", True, None]),
    ],
)
def test_each_option_out_of_range_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        config = KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role="kv_both",
            kv_connector_extra_config={name: value},
        )
        with pytest.raises(ConfigError, match=rf"PipelineOptions: {name} must be .*, not "):
            PipelineOptions.of(config)


async def test_an_engine_does_not_open_with_them() -> None:
    said = "group_size must be a whole number from 1 to 4, not 5"
    with pytest.raises(ConfigError, match=said):
        async with an_engine(deep_model(), "bulk", group_size=5):
            pass


# -------------------------------------------------------------------- memory


async def test_more_memory_than_there_is_is_refused_before_any_of_it_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = mmap.mmap

    def small(fileno: int, num_bytes: int) -> mmap.mmap:
        assert num_bytes < 1 << 30, "memory was asked for"
        return take(fileno, num_bytes)

    monkeypatch.setattr("mmap.mmap", small)
    said = r"host_bytes asks for .* GiB .* more than this machine has: give the connector less"
    with pytest.raises(ConfigError, match=said):
        async with an_engine(deep_model(), "bulk", num_records=(1 << 60) // RECORD_BYTES):
            pass


@pytest.mark.parametrize(("asked", "is_too_much"), [(900, False), (990, True), (1001, True)])
def test_a_little_is_left_to_others(
    asked: int, is_too_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = Memory(total_bytes=2000 << 20, available_bytes=1000 << 20)
    monkeypatch.setattr("interlace.layers.hardware.host.memory", lambda: has)
    monkeypatch.setattr("interlace.connectors.pipeline.records.container_room", lambda: None)
    if is_too_much:
        with pytest.raises(ConfigError, match=r"1\.0 GiB of it are available"):
            HostRecords.allocate(asked << 20, (4, 1 << 10), torch.device("cpu"))
    else:
        made = HostRecords.allocate(asked << 20, (4, 1 << 10), torch.device("cpu"))
        assert made.num_records == asked << 8


def test_what_a_container_may_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.connectors.pipeline.records.container_room", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"host_bytes asks for .* 0\.0 GiB of it are available"):
        HostRecords.allocate(2 << 20, (4, 1 << 10), torch.device("cpu"))


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_what_a_container_may_have(tmp_path: Path) -> None:
    """The least of all groups, both kinds; files in the cache can be dropped."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert container_room(proc, groups) is None, "nothing is known"
    write(proc / "self", cgroup="12:cpu,cpuacct:/x\n0::/outer/inner")
    assert container_room(proc, groups) is None, "groups are not to be seen"
    inner, outer = groups / "outer" / "inner", groups / "outer"
    write(inner, memory__max="max", memory__current=5, memory__stat="anon 3\ninactive_file 2")
    assert container_room(proc, groups) is None, "there is no limit"
    write(outer, memory__max=1000, memory__current=700, memory__stat="anon 3\ninactive_file 50")
    assert container_room(proc, groups) == 350
    write(inner, memory__max=100, memory__current=200)
    assert container_room(proc, groups) == 0
    write(proc / "self", cgroup="4:hugetlb,memory:/not/to/be/seen\n0::/")
    old = {"memory__limit_in_bytes": 1 << 62, "memory__usage_in_bytes": 100}
    write(groups / "memory", **old, memory__stat="total_inactive_file 60")
    assert container_room(proc, groups) == (1 << 62) - 40
    write(proc / "self", cgroup="what is this?")
    assert container_room(proc, groups) is None


# -------------------------------------------------------------------- records and pages


def some_pages(**changes: Any) -> list[torch.Tensor]:
    """Three layers: 8 blocks, K and V, 4 tokens, 2 heads of 8."""
    shape = {"shape": (8, 2, 4, 2, 8), "dtype": torch.float32, **changes}
    return [torch.full(shape["shape"], 5, dtype=shape["dtype"]) for _ in range(3)]


PAGE_BYTES = 2 * 4 * 2 * 8 * 4


def some_records(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(shape or (6, 3, PAGE_BYTES), 7, dtype=dtype)


def head_first(pages: torch.Tensor) -> torch.Tensor:
    """The same shape, laid out as "HND"."""
    return pages.transpose(2, 3).contiguous().transpose(2, 3)


WRONG: dict[str, tuple[torch.Tensor, list[torch.Tensor], str]] = {
    "of a model with other heads": (some_records(6, 3, 2 * PAGE_BYTES), some_pages(), "need"),
    "of a model with more layers": (some_records(6, 4, PAGE_BYTES), some_pages(), "need"),
    "of another dtype": (some_records(), some_pages(dtype=torch.float16), "need"),
    "of another block size": (some_records(), some_pages(shape=(8, 2, 8, 2, 8)), "need"),
    "as numbers": (some_records(6, 3, PAGE_BYTES, dtype=torch.int8), some_pages(), "torch.int8"),
    "layer first": (some_records(3, 6, PAGE_BYTES).transpose(0, 1), some_pages(), "contiguous"),
    "none": (some_records(0, 3, PAGE_BYTES), some_pages(), "need contiguous"),
    "without layers": (some_records(6, 3 * PAGE_BYTES), some_pages(), "need contiguous"),
    "not in host memory": (some_records().to("meta"), some_pages(), "allocate them in host memory"),
    "for pages in another layout": (
        some_records(),
        [head_first(pages) for pages in some_pages()],
        "ask for the layout 'NHD'",
    ),
    "for pages that overlap": (
        some_records(),
        [pages[:1].expand(8, -1, -1, -1, -1) for pages in some_pages()],
        "pages of layer 0 have shape",
    ),
    "for layers that differ": (
        some_records(),
        [*some_pages()[:2], *some_pages(shape=(8, 2, 4, 2, 16))[:1]],
        "Leave other layers out",
    ),
    "for no layers": (some_records(), [], "Leave other layers out"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_do_not_fit_are_refused_before_any_copy(wrong: str) -> None:
    records, pages, said = WRONG[wrong]
    lanes = VirtualLanes(0, "eager")
    with pytest.raises(ConnectorError, match=said):
        LayerPipeline.over(records, pages, lanes)
    assert not lanes.trace
    assert all(bool((layer == 5).all()) for layer in pages)
    assert records.is_meta or bool((records == 7).all())


def test_those_that_fit_are_taken() -> None:
    pages = some_pages()
    pipeline = LayerPipeline.over(some_records(), pages, VirtualLanes(0, "eager"))
    pipeline.submit_load([[(0, 1, 2)]], 1)
    assert all(bool((layer[1:3].view(torch.uint8) == 7).all()) for layer in pages)
    assert all(bool((layer[3:] == 5).all()) for layer in pages)


async def test_pages_that_a_connector_cannot_store_keep_the_engine_from_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.install(monkeypatch)
    monkeypatch.setattr(HostRecords, "allocate", _records_of_another_model)
    with pytest.raises(ConnectorError, match=r"register_kv_caches raised.*need contiguous"):
        async with an_engine(deep_model(), "bulk"):
            pass


def _records_of_another_model(num_bytes: int, shape: tuple[int, int], device: Any) -> HostRecords:
    return HostRecords(some_records(6, shape[0] + 1, shape[1]), device, None)
