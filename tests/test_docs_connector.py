"""docs/write-a-connector.md stays true: its connector works, is right, and has sixty lines."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_model import plain_answer, tiny_model

from interlace import EngineConfig, KVTransferConfig, SamplingParams, front_door
from interlace.connectors.conformance import check_connector
from interlace.engine.outputs import Usage

PAGE = Path(__file__).parent.parent / "docs" / "write-a-connector.md"
PROMPT = [(i * i + 3 * i) % 47 for i in range(21)]


def blocks(language: str) -> list[str]:
    """The page's code blocks in that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


CONNECTOR, CONFIG, FAULTS, PYTEST = range(4)
"""Places of the page's Python blocks."""
CHANGES = re.findall(
    r"^\| `([^|]*)` \| `([^|]*)` \| `([a-z-]+)` \|$", PAGE.read_text("utf-8"), re.M
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_kv", None)


def saved(code: str) -> ModuleType:
    """`code` as the module that the page lets its readers save."""
    Path("my_kv.py").write_text(code, "utf-8")
    return importlib.import_module("my_kv")


def test_the_page_counts_its_lines_rightly() -> None:
    code = blocks("python")[CONNECTOR]
    beside = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            beside |= {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            beside.add(node.lineno)
    lines = [
        line
        for number, line in enumerate(code.splitlines(), start=1)
        if number not in beside and line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) == 60


def page_config() -> KVTransferConfig:
    """The configuration that the page shows."""
    names = {"EngineConfig": EngineConfig, "KVTransferConfig": KVTransferConfig}
    config: EngineConfig = eval(blocks("python")[CONFIG], names)  # noqa: S307 - our own page
    assert config.kv_transfer_config is not None
    return config.kv_transfer_config


def stored_files() -> list[Path]:
    """In the folder that the page names."""
    return sorted(Path("kv").rglob("*.npy"))


async def ask(**options: Any) -> Usage:
    """A prompt's usage in an engine of its own; its answer is right."""
    model = tiny_model()
    config = EngineConfig(
        model="tiny",
        block_size=4,
        num_gpu_blocks_override=33,
        kv_transfer_config=page_config(),
        **options,
    )
    async with front_door.AsyncEngine.from_loaded(config, model) as engine:
        done = await engine.complete(
            PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
    assert list(done.token_ids) == plain_answer(model, PROMPT, 12)
    return done.usage


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_second_engine_loads_what_the_first_one_saved(depth: int, workers: int) -> None:
    saved(blocks("python")[CONNECTOR])
    for num_loaded in (0, 20):
        usage = await ask(max_inflight_steps=depth, tensor_parallel_size=workers)
        assert usage.num_external_cached_tokens == num_loaded


async def test_a_file_that_is_gone_is_computed_and_saved_again() -> None:
    saved(blocks("python")[CONNECTOR])
    await ask()
    files = stored_files()
    assert len(files) == 8
    files[3].write_bytes(b"")
    await ask()
    assert len(files[3].read_bytes()) == len(files[0].read_bytes())
    assert (await ask()).num_external_cached_tokens == 20


def test_the_page_s_connector_passes_the_check() -> None:
    """By the page's own three lines."""
    names = vars(saved(blocks("python")[CONNECTOR]))
    exec(blocks("python")[PYTEST], names)  # noqa: S102 - our own page
    names["test_my_connector"]()


def test_it_reports_exactly_the_files_that_are_lost() -> None:
    module = saved(blocks("python")[CONNECTOR] + "\n" + blocks("python")[FAULTS])
    report = check_connector(module.FolderConnector, only=["failures-exact"], workers=2)
    assert report.result("failures-exact").verdict == "ok", report.lines()


@pytest.mark.parametrize(("right", "wrong", "property_id"), CHANGES)
def test_a_broken_one_is_found_as_the_page_says(right: str, wrong: str, property_id: str) -> None:
    code = blocks("python")[CONNECTOR] + "\n" + blocks("python")[FAULTS]
    assert code.count(right) == 1
    module = saved(code.replace(right, wrong))
    report = check_connector(module.FolderConnector, only=[property_id], fail_fast=True)
    assert report.failed == [property_id], "\n".join(report.lines())


def test_the_page_names_some_mistakes() -> None:
    assert len(CHANGES) >= 5
