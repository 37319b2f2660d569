"""What is kept of a run: JSON that comes back, files that are whole or as they were."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from grid_kit import a_run, loading
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.grid.record import file_name, parse_run, read_run, write_atomically
from interlace.engine.errors import ConfigError

RUN = a_run([(loading("bulk", 32), [0.5, 0.4]), (loading("layerwise", 32), [0.3, 0.2])])


def test_a_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, RUN.to_json())
    assert read_run(path) == RUN
    record = json.loads(path.read_text())
    assert record["is_partial"] is False
    assert [s["round"] for s in record["arms"][0]["samples"]] == [0, 1, 2], "all rounds are kept"


def test_a_partial_run_says_so() -> None:
    run = a_run([(loading("bulk", 32), [0.5])], repeats=3)
    assert json.loads(run.to_json())["is_partial"] is True


def test_the_round_that_warms_up_is_in_no_figure() -> None:
    assert RUN.arms[0].measured("first_token_s") == [0.5, 0.4]
    assert RUN.arms[0].measured("device_s") == []


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match=r"No space left on device.*--out"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"
    monkeypatch.undo()
    write_atomically(path, b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_files() -> None:
    started = datetime.datetime(2026, 8, 1, 12, 0, 5, tzinfo=datetime.UTC)
    assert file_name("group", started, "1a2b3c4d5e") == "group-20260801-120005-1a2b3c4d.json"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "interlace bench run 2"}', "[" * 100_000, "nan"]
)
def test_what_is_no_run_is_refused(content: str) -> None:
    with pytest.raises(ConfigError, match=r"b\.json is no result of `interlace bench run`"):
        parse_run(content.encode(), "b.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*: name what"):
        read_run(tmp_path / "none.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
_PLACES = [
    *[(name,) for name in ("arms", "grid", "machine", "rounds", "seed", "title", "version")],
    *[("arms", 0, name) for name in ("name", "point", "resolved", "samples")],
    *[("arms", 0, "samples", 1, name) for name in ("round", "first_token_s", "step_s")],
]


@given(st.sampled_from(_PLACES), _JSON)
def test_damage_is_refused_or_does_no_harm(place: tuple[str | int, ...], damage: object) -> None:
    record = json.loads(RUN.to_json())
    found = record
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = damage
    try:
        run = parse_run(json.dumps(record).encode(), "b.json")
    except ConfigError:
        return
    for arm in run.arms:
        arm.measured("first_token_s")
