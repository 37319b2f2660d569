"""The Makefile: a prompt is only ever text, and what is installed is not installed again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUB = """#!/bin/sh
echo "$@" >> args
if [ -n "${TRITON_INTERPRET+set}" ]; then echo interpreting >> args; fi
if [ -n "${INTERLACE_PROMPT+set}" ]; then printf '%s' "$INTERLACE_PROMPT" > prompt; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile and a .venv that looks installed and holds stubs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("interlace", "python", "pytest"):
        stub = tmp_path / ".venv/bin" / name
        stub.write_text(STUB)
        stub.chmod(0o755)
    for name in (".made", ".run-installed", ".plot-installed", ".dev-installed"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def make(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make as if from a fresh shell, even when make itself runs these tests."""
    inherited = {k: v for k, v in os.environ.items() if "MAKE" not in k and k != "MFLAGS"}
    inherited.pop("INTERLACE_PROMPT", None)
    return subprocess.run(
        ["make", *args],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the capital of France?",
        "$(shell touch X)",
        "$$(touch X) $(touch X) ${HOME} $HOME $$ $",
        "`touch X`; touch X & touch X | touch X > X",
        """both "double" and 'single' quotes, an odd ' and an odd \" too""",
        "a # b \\ c \\\\ d\\",
        "two\nlines\n\ttouch X",
        "a: b\n\ttouch X\n",
        "trailing blanks  ",
        "x=y := z += $(eval all:;touch X)",
        "-n --version %s \x1b[31m",
        "Größe 日本 🙂",
        "",
    ],
)
def test_a_prompt_arrives_as_it_was_typed_and_is_never_run(checkout: Path, prompt: str) -> None:
    done = make(checkout, "chat", f"PROMPT={prompt}")
    assert done.returncode == 0, done.stderr
    assert (checkout / "prompt").read_text() == prompt
    assert (checkout / "args").read_text() == "chat --prompt-env INTERLACE_PROMPT\n"
    assert not (checkout / "X").exists()


def test_leading_blanks_are_all_that_is_lost(checkout: Path) -> None:
    make(checkout, "chat", "PROMPT=   hi ")
    assert (checkout / "prompt").read_text() == "hi "


@pytest.mark.parametrize("flags", [(), ("-e",)])
def test_a_prompt_in_the_environment_is_ignored(checkout: Path, flags: tuple[str, ...]) -> None:
    make(checkout, *flags, "chat", PROMPT="$(shell touch X)")
    assert (checkout / "args").read_text() == "chat\n"
    assert not (checkout / "prompt").exists()
    assert not (checkout / "X").exists()


def test_a_second_run_installs_nothing(checkout: Path) -> None:
    done = make(checkout, "test")
    assert done.returncode == 0
    assert "nstall" not in done.stdout
    assert (checkout / "args").read_text().splitlines() == [
        "-W error -n 2 --dist loadfile --ignore=tests/kernels",
        "-W error -n 2 --dist loadfile tests/kernels",
        "interpreting",
    ]


@pytest.mark.parametrize(
    ("target", "wanted"), [("chat", "-e ."), ("plot", "-e .[plot]"), ("test", "-e .[dev]")]
)
@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(
    checkout: Path, target: str, wanted: str, changed: str
) -> None:
    later = (checkout / ".venv/.made").stat().st_mtime + 10
    os.utime(checkout / changed, (later, later))
    (checkout / ".venv/bin/python").write_text("#!/bin/sh\necho ran: $@\n")
    done = make(checkout, target)
    assert "Installing" in done.stdout
    assert "ran: -m pip install" in done.stdout
    assert f"-c constraints.txt {wanted}\n" in done.stdout


@pytest.mark.parametrize("target", ["plot", "test"])
def test_installing_for_more_serves_chat_too(target: str, checkout: Path) -> None:
    for name in (".run-installed", ".plot-installed", ".dev-installed"):
        (checkout / ".venv" / name).unlink()
    assert make(checkout, target).returncode == 0
    assert "Installing" not in make(checkout, "chat").stdout


def test_a_failed_installation_is_tried_again(checkout: Path) -> None:
    (checkout / ".venv/.run-installed").unlink()
    (checkout / ".venv/bin/python").write_text("#!/bin/sh\nexit 1\n")
    assert make(checkout, "chat").returncode != 0
    assert not (checkout / ".venv/.run-installed").exists()
    assert not (checkout / "args").exists()


def only_python(folder: Path, script: str) -> str:
    """A PATH on which every Python is `script`."""
    folder.mkdir()
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    for tool in ("make", "touch", "sh", "echo"):
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return str(folder)


def test_no_suitable_python_is_said_clearly(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv/.made").unlink()
    path = only_python(tmp_path / "path", "#!/bin/sh\nexit 1\n")
    done = make(checkout, "chat", PATH=path)
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert not (checkout / ".venv/.made").exists()
    assert not (checkout / "args").exists()


def test_the_first_python_that_works_makes_the_environment(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv/.made").unlink()
    path = only_python(tmp_path / "path", "#!/bin/sh\nexit 1\n")
    good = "#!/bin/sh\nif [ $1 = -m ]; then echo made: $@; else echo Python 3.11.0; fi\n"
    (tmp_path / "path/python3.11").write_text(good)
    done = make(checkout, "chat", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "Making .venv with Python 3.11.0." in done.stdout
    assert "made: -m venv .venv" in done.stdout


def test_every_target_is_explained(checkout: Path) -> None:
    shown = make(checkout, "help").stdout
    for target in ("chat", "test", "test-gpu", "lint", "format", "bench", "clean"):
        assert f"make {target} " in shown


def test_ci_runs_the_two_commands() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert "set -euo pipefail" in script
    assert script.index("make test") < script.index("make lint")
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_constraints_pin_what_ci_runs() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    assert not {"pip", "setuptools"} & {name.lower() for name in pins}
    assert not any("+" in version for version in pins.values())
