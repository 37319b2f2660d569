"""A grid's file: what it comes to, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.grid.axes import AXES
from interlace.bench.grid.plan import engines_of, names_of, order_of
from interlace.bench.grid.spec import MAX_ARMS, GridSpec, parse_grid
from interlace.engine.errors import ConfigError

RUNS = Path(__file__).parents[2] / "bench" / "runs"


def parsed(text: str) -> GridSpec:
    return parse_grid(text.encode(), "my.toml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    message = str(caught.value)
    assert message.startswith("my.toml")
    return message


def test_lists_are_axes() -> None:
    spec = parsed('[grid]\nconnector = "PipelineConnector"\nprefix = [32, 64]\nbatch = [1, 2]')
    found = [(point.prefix, point.batch) for point in spec.points]
    assert found == [(32, 1), (32, 2), (64, 1), (64, 2)]
    assert (spec.title, spec.repeats, spec.seed) == ("my.toml", 5, 0)
    names = ("prefix 32, batch 1", "prefix 32, batch 2", "prefix 64, batch 1", "prefix 64, batch 2")
    assert names_of(spec.points) == names


def test_an_empty_file_is_one_arm() -> None:
    (point,) = parsed("").points
    assert (point.model, point.connector, point.load_mode) == ("smollm2-135m", "none", None)
    assert names_of([point]) == ("16 new",)


def test_arms_that_are_the_same_are_one() -> None:
    spec = parsed(
        '[grid]\nconnector = ["none", "PipelineConnector"]\nload_mode = ["cached", "recompute",'
        ' "bulk", "layerwise"]\nprefix = 32\ngroup_size = [1, 2]\ndelay_ms = [0, 5]'
    )
    found = [(p.connector, p.load_mode, p.group_size, p.delay_ms) for p in spec.points]
    pipeline = "PipelineConnector"
    assert found == [
        ("none", "cached", None, None),
        ("none", "recompute", None, None),
        (pipeline, "cached", None, None),
        (pipeline, "recompute", None, None),
        (pipeline, "bulk", None, 0),
        (pipeline, "bulk", None, 5),
        *[(pipeline, "layerwise", group, delay) for group in (1, 2) for delay in (0, 5)],
    ]


def test_engines_are_shared_by_what_a_request_can_say() -> None:
    spec = parsed(
        '[grid]\nconnector = ["none", "PipelineConnector"]\nload_mode = ["recompute", "bulk",'
        ' "layerwise"]\nprefix = [32, 64]\nbatch = [1, 4]\ngroup_size = [1, 2]\ndelay_ms = [0, 5]'
    )
    engines = engines_of(spec)
    assert [(key.connector, key.group_size) for key in engines] == [
        ("none", None),
        ("PipelineConnector", 1),
        ("PipelineConnector", 2),
    ]
    assert sum(len(points) for points in engines.values()) == len(spec.points)
    modes = {point.load_mode for point in list(engines.values())[2]}
    assert modes == {"layerwise"}, "the others do not care, and share the first one"


def test_points_are_arms_beside_the_product_or_alone() -> None:
    alone = parsed("[grid]\nnew = 8\n[[points]]\nprefix = 16\n[[points]]\nprefix = 32\nnew = 4")
    assert [(point.prefix, point.new) for point in alone.points] == [(16, 8), (32, 4)]
    beside = parsed("[grid]\nnew = [8, 9]\n[[points]]\nnew = 7")
    assert [point.new for point in beside.points] == [8, 9, 7]


def test_excluded_arms() -> None:
    spec = parsed(
        "[grid]\nprefix = [16, 32]\nbatch = [1, 2]\n[[exclude]]\nprefix = 16\nbatch = [2, 3]"
    )
    assert [(p.prefix, p.batch) for p in spec.points] == [(16, 1), (32, 1), (32, 2)]


def test_connectors_of_ones_own() -> None:
    spec = parsed(
        '[grid]\nconnector = ["files", "tuned"]\nload_mode = ["bulk", "layerwise"]\nprefix = 32\n'
        '[connectors.files]\nkv_connector = "ExampleConnector"\nkv_role = "kv_both"\n'
        'kv_connector_extra_config = { shared_storage_path = "{scratch}" }\n'
        '[connectors.tuned]\nkv_connector = "PipelineConnector"\nkv_role = "kv_both"\n'
        "kv_connector_extra_config = { max_load_stall_ms = 5 }"
    )
    found = [(point.connector, point.load_mode) for point in spec.points]
    assert found == [("files", "own"), ("tuned", "bulk"), ("tuned", "layerwise")]


def test_transformers_computes_alone() -> None:
    spec = parsed('[grid]\nengine = ["interlace", "transformers"]\nprefix = 32\nload_mode="cached"')
    assert [(p.engine, p.connector, p.load_mode) for p in spec.points] == [
        ("interlace", "none", "cached"),
        ("transformers", None, "recompute"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repeats = = 1", ["is not TOML", "line 1", "mend it"]),
        ("[grdi]", ["grdi", "did you mean 'grid'?", "known: title, repeats"]),
        ("prefix = 32", ["prefix", "computed before", "move it below [grid]"]),
        ("[grid]\nprefx = 32", ["grid.prefx", "did you mean 'prefix'?"]),
        ("[grid]\nprefix = 100", ["grid.prefix = 100", "whole blocks", "such as 96 or 112"]),
        ("[grid]\nprefix = [32, -16]", ["grid.prefix = -16", "give 0 to 1,048,576"]),
        ("[grid]\nprefix = [32, 32]", ["grid.prefix = 32", "twice: leave one out"]),
        ("[grid]\nnew = []", ["grid.new = []", "give one value at least"]),
        ("[grid]\nbatch = true", ["grid.batch = True", "give a whole number from 1 to 256"]),
        ("[grid]\nbatch = 1.0", ["grid.batch = 1.0", "give a whole number"]),
        ("[grid]\ndelay_ms = nan", ["grid.delay_ms = nan", "give a number from 0 to 60000"]),
        (
            '[grid]\nload_mode = "layer-wise"',
            ["how the prefix comes", "did you mean 'layerwise'?", "choose of cached, auto"],
        ),
        ('[grid]\nconnector = "Pipeline"', ["did you mean 'PipelineConnector'?"]),
        (
            '[grid]\nconnector = "ExampleConnector"',
            ["[connectors.ExampleConnector]", "kv_role"],
        ),
        ("repeats = 0", ["repeats = 0", "measured rounds", "give 1 to 1,000"]),
        ("grid = 5", ["grid = 5", "write it as [grid]"]),
        ("points = 5", ["points = 5", "write each as [[points]]"]),
        ("[[points]]", ["points[1]", "it is empty"]),
        ("[[points]]\nprefix = [16, 32]", ["points[1].prefix", "give one value in a point"]),
        (
            "[grid]\nnew = [1, 2]\n[[points]]\nprefix = 16",
            ["points[1].new", "say it in the point"],
        ),
        (
            "[grid]\nnew = [1, 2]\n[[exclude]]\nnew = 3",
            ["exclude[1]", "no arm is so"],
        ),
        ("[grid]\nnew = [1, 2]\n[[exclude]]\nnwe = 1", ["exclude[1].nwe", "did you mean 'new'?"]),
        ("[grid]\nnew = 1\n[[points]]\nnew = 2\n[[exclude]]\nnew = 2", ["there is no product"]),
        ("[grid]\nnew = [1, 2]\n[[exclude]]\nprefix = 0", ["comes to 0 arms"]),
        (
            f"[grid]\nnew = {list(range(1, MAX_ARMS + 2))}",
            ["grid", f"{MAX_ARMS + 1} arms", f"1 to {MAX_ARMS}"],
        ),
        ("[connectors.none]\nkv_connector = 'X'", ["connectors.none", "another name"]),
        ("[connectors.x]\nkv_role = 'kv_both'", ["connectors.x.kv_connector", "give a name"]),
        ("[connectors.x]\nkv_connector = 'X'", ["connectors.x", "needs a kv_role"]),
        ("[connectors.x]\nkv_conector = 'X'", ["connectors.x", "Did you mean 'kv_connector'?"]),
        (
            (
                "[connectors.x]\nkv_connector = 'PipelineConnector'\nkv_role = 'kv_both'\n"
                "kv_connector_extra_config = { load_mode = 'bulk' }"
            ),
            ["connectors.x.kv_connector_extra_config.load_mode", "say load_mode in [grid]"],
        ),
        (
            (
                "[connectors.x]\nkv_connector = 'PipelineConnector'\nkv_role = 'kv_both'\n"
                "kv_connector_extra_config = { path = '/x' }"
            ),
            ["--path DIR"],
        ),
        (
            '[grid]\nengine = ["interlace", "transformers"]\nbatch = [1, 8]',
            ["grid.batch = 8", "transformers is run with one", "[[exclude]]"],
        ),
    ],
)
def test_refusals_name_the_key_and_the_remedy(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_grid_or_refused(content: bytes) -> None:
    found = parsed_or_refusal(content)
    assert isinstance(found, GridSpec) or found.startswith("my.toml")


def parsed_or_refusal(content: bytes) -> GridSpec | str:
    try:
        return parse_grid(content, "my.toml")
    except ConfigError as error:
        return str(error)


_SCALARS = st.one_of(
    st.integers(-5, 2000),
    st.booleans(),
    st.floats(),
    st.text("abcyz_1 ", max_size=8),
    st.just("bulk"),
)


@given(
    st.dictionaries(
        st.sampled_from([*AXES, "prefx", ""]), st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3))
    )
)
def test_any_values_are_taken_or_refused(values: dict[str, object]) -> None:
    lines = [f"{_toml(key)} = {_toml(value)}" for key, value in values.items()]
    text = "\n".join(["[grid]", *lines])
    spec = parsed_or_refusal(text.encode())
    if isinstance(spec, str):
        assert spec.startswith("my.toml: ")
        assert "; " in spec
        return
    assert len(set(spec.points)) == len(spec.points) > 0
    assert len(set(names_of(spec.points))) == len(spec.points)
    for point in spec.points:
        for key, value in point.facts().items():
            assert value is None or AXES[key].check(value) is None or value == "own"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower()


@given(st.integers(0, 2**63 - 1), st.integers(0, 50), st.integers(1, 60))
def test_an_order_is_each_arm_once_and_decided_by_the_seed(
    seed: int, number: int, count: int
) -> None:
    order = order_of(seed, number, count)
    assert sorted(order) == list(range(count))
    assert order == order_of(seed, number, count)


def test_orders_differ_from_round_to_round() -> None:
    assert order_of(0, 0, 6) == (0, 4, 3, 1, 5, 2)
    assert len({order_of(0, number, 20) for number in range(10)}) == 10


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.name)
def test_the_projects_own_files(path: Path) -> None:
    spec = parse_grid(path.read_bytes(), path.name)
    assert spec.title != path.name
    assert len(spec.points) > 1
