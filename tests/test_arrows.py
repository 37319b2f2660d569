"""Which folder may import which, and what must never be imported at all."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "engine": {"engine"},
    "layers": {"engine", "layers"},
    "connectors": {"engine", "layers", "connectors"},
    "bench": {"engine", "layers", "connectors", "bench"},
    "cli": {"engine", "layers", "connectors", "bench", "cli"},
}
USES_THE_FRONT_DOOR = ("bench/", "cli/", "connectors/conformance")
DEVICE_PACKAGES = {"torch", "triton"}
FILES = sorted(
    path.relative_to(ROOT)
    for folder in (*MAY_IMPORT, "src/interlace")
    for path in (ROOT / folder).glob("*.py" if folder.startswith("src") else "**/*.py")
)
OWNED = [path for path in FILES if path.parts[0] in MAY_IMPORT]


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere under `node`, in functions too, with full names."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"line {found.lineno}: write imports absolute"
            assert found.module is not None
            if found.module == "interlace":
                yield from (f"interlace.{alias.name}" for alias in found.names)
            else:
                yield found.module


def imports_of_module_level(tree: ast.Module) -> Iterator[str]:
    """What runs when the module is imported: all but functions and `if TYPE_CHECKING:`."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from imports(statement)
        is_types = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)
        if not is_types:
            children = ast.iter_child_nodes(statement)
            todo += [child for child in children if isinstance(child, ast.stmt)]


def parts(names: Iterator[str]) -> set[str]:
    """The owner folders, or names of the front door, among imported modules."""
    ours = [name.split(".") for name in names if name.split(".")[0] == "interlace"]
    return {name[1] if len(name) > 1 else "the front door" for name in ours}


@pytest.mark.parametrize("path", OWNED, ids=str)
def test_a_folder_imports_only_what_it_may(path: Path) -> None:
    folders = parts(imports(tree_of(path))) & set(MAY_IMPORT)
    assert folders <= MAY_IMPORT[path.parts[0]], f"{path} imports {folders}"


@pytest.mark.parametrize("path", OWNED, ids=str)
def test_few_import_the_front_door_and_those_inside_functions(path: Path) -> None:
    tree = tree_of(path)
    names = imports(tree)
    if path.as_posix().startswith(USES_THE_FRONT_DOOR):
        names = imports_of_module_level(tree)
    found = parts(names) - set(MAY_IMPORT)
    assert not found, f"{path} imports {found} of the front door"


@pytest.mark.parametrize("path", [p for p in OWNED if p.parts[0] == "engine"], ids=str)
def test_the_engine_knows_no_device_and_reads_no_clock(path: Path) -> None:
    packages = {name.split(".")[0] for name in imports(tree_of(path))}
    assert not packages & DEVICE_PACKAGES
    if path.name != "clock.py":
        assert "time" not in packages, "time is injected: take a ports.Clock"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_says_what_it_is_and_avoids_what_is_banned(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    assert not {name.split(".")[0] for name in imports(tree)} & banned
    bare = [f"{path}:{line}" for line in bare_tasks(tree)]
    assert not bare, f"{bare}: use a TaskGroup, a bare task has no owner"


def bare_tasks(tree: ast.Module) -> Iterator[int]:
    """Lines where a task is made by a loop or by asyncio itself, and not by a task group."""
    makers = {"create_task", "ensure_future", "run_coroutine_threadsafe"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in makers:
            owner = ast.unparse(node.value)
            if owner == "asyncio" or "loop" in owner.rpartition(".")[2]:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and makers & {alias.name for alias in node.names}:
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.create_task(f())",
        "asyncio.ensure_future(f())",
        "from asyncio import create_task",
        "self._loop.create_task(f())",
        "asyncio.get_running_loop().create_task(f())",
    ],
)
def test_bare_tasks_are_found(code: str) -> None:
    assert list(bare_tasks(ast.parse(code))) == [1]
    assert not list(bare_tasks(ast.parse("group.create_task(f()); self._tasks.create_task(f())")))


ALL_OF_ENGINE = """
import importlib, pkgutil, interlace.engine as engine
for module in pkgutil.iter_modules(engine.__path__):
    importlib.import_module(f"interlace.engine.{module.name}")
"""
HELP_OF_CHAT = """
import sys
from interlace.cli.app import main
sys.argv = ["interlace", "chat", "--help"]
try:
    main()
except SystemExit:
    pass
"""
CHECK = """
import sys
loaded = {"torch", "triton", "transformers"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "code",
    [
        "import interlace.engine, interlace",
        "from interlace import EngineConfig, SamplingParams, KVTransferConfig, InterlaceError",
        ALL_OF_ENGINE,
        HELP_OF_CHAT,
    ],
    ids=["packages", "plain names of the front door", "all of engine", "chat --help"],
)
def test_torch_is_not_loaded_before_it_is_needed(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + CHECK],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "interlace", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout
    assert not re.search(r"\| +torch\b", done.stderr)
