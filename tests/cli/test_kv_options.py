"""What `--kv-connector`, `--kv-transfer-config` and `--kv-dir` come to, alone and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from interlace.cli.kv_options import kv_transfer_config
from interlace.engine.config import KVTransferConfig

FILES: dict[str, Any] = {
    "kv_connector": "PipelineConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "store": "file",
        "path": "some/folder",
        "host_bytes": 1 << 30,
        "slab_bytes": 16 << 20,
    },
}


def fields(connector: str | None, config: object, directory: str | None) -> dict[str, Any]:
    """The configuration as a mapping, without what nobody stated and the random engine id."""
    text = None if config is None else json.dumps(config)
    made = kv_transfer_config(connector, text, directory)
    assert made is not None
    plain = KVTransferConfig(kv_connector="x", kv_role="kv_both")
    names = {*FILES, "kv_connector_module_path", "kv_port"}
    return {
        name: getattr(made, name)
        for name in names
        if name in ("kv_connector", "kv_role") or getattr(made, name) != getattr(plain, name)
    }


def refused(*options: str | None) -> str:
    with pytest.raises(typer.BadParameter) as caught:
        kv_transfer_config(*options)
    assert caught.value.param_hint in ("--kv-connector", "--kv-transfer-config", "--kv-dir")
    return f"{caught.value.param_hint}: {caught.value.message}"


def test_no_option_is_no_connector() -> None:
    assert kv_transfer_config(None, None, None) is None


def test_a_folder_is_short_for_json() -> None:
    assert fields(None, None, "some/folder") == FILES
    assert fields(None, FILES, None) == FILES


def test_a_folder_of_the_user() -> None:
    extra = fields(None, None, "~/kv")["kv_connector_extra_config"]
    assert extra["path"] == str(Path("~/kv").expanduser())


def test_a_connector_saves_and_loads() -> None:
    assert fields("Some", None, None) == {"kv_connector": "Some", "kv_role": "kv_both"}
    assert fields("my.own.module:Some", None, None) == {
        "kv_connector": "Some",
        "kv_connector_module_path": "my.own.module",
        "kv_role": "kv_both",
    }


def test_json_adds_to_the_short_forms_and_wins_over_their_defaults() -> None:
    extra = {"load_mode": "bulk", "host_bytes": 5}
    more = {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    assert fields(None, more, "some/folder") == FILES | {
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": FILES["kv_connector_extra_config"] | extra,
    }
    assert fields("Some", {"kv_role": "kv_producer", "kv_port": 5}, None) == {
        "kv_connector": "Some",
        "kv_role": "kv_producer",
        "kv_port": 5,
    }


def test_saying_the_same_twice_is_fine() -> None:
    assert fields("PipelineConnector", FILES, "some/folder") == FILES


def test_what_two_options_say_differently_is_refused() -> None:
    assert "kv_connector is 'PipelineConnector' here and 'Some' by --kv-connector" in refused(
        "Some", None, "d"
    )
    assert "'Other' here and 'Some' by --kv-connector" in refused(
        "Some", '{"kv_connector": "Other"}', None
    )
    message = refused(None, '{"kv_connector_extra_config": {"path": "e"}}', "d")
    assert "path is 'e' here and 'd' by --kv-dir" in message
    assert "kv_connector_module_path is 'n' here and 'm'" in refused(
        "m:C", '{"kv_connector_module_path": "n"}', None
    )


@pytest.mark.parametrize("text", ["", " ", ":", ":C", "m:", " m: "])
def test_a_connector_without_a_name_is_refused(text: str) -> None:
    assert "neither a NAME nor a MODULE:CLASS" in refused(text, None, None)


@pytest.mark.parametrize("text", ["", " "])
def test_a_folder_without_a_name_is_refused(text: str) -> None:
    assert "empty" in refused(None, None, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON object"),
        ("null", "a JSON object"),
        ("{}", "kv_connector must name"),
        ('{"kv_role": "kv_both"}', "kv_connector must name"),
        ('{"kv_connector": 5, "kv_role": "kv_both"}', "kv_connector must name"),
        ('{"kv_connector": "", "kv_role": "kv_both"}', "kv_connector must name"),
        ('{"kv_connector": "C"}', "needs a kv_role"),
        ('{"kv_connector": "C", "kv_role": "both"}', "'kv_both'"),
        ('{"kv_connector": "C", "kv_rol": "kv_both"}', "Did you mean 'kv_role'"),
        ('{"kv_connector": "C", "kv_role": "kv_both", "cls": 1}', "cls"),
        ('{"kv_connector": "C", "kv_connector_extra_config": []}', "must be a JSON object"),
        ('{"kv_connector": "C", "kv_connector_module_path": 1}', "must be a name, not 1"),
        ('{"kv_connector": "C", "kv_role": "kv_both", "self": 1}', "no field 'self'"),
        ('{"kv_connector": "C", "kv_connector_module_path": "", "kv_role": "kv_both"}', "module"),
    ],
)
def test_bad_json_is_refused_with_its_reason(text: str, why: str) -> None:
    message = refused(None, text, None)
    assert message.startswith("--kv-transfer-config: ")
    assert why in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*FILES, "kv_connector_module_path", "engine_id", "kv_port"])


@given(
    st.none() | st.text(max_size=10),
    st.none() | st.dictionaries(NAMES, JSON) | JSON,
    st.none() | st.text(max_size=10),
)
def test_whatever_is_given_is_a_configuration_or_refused(
    connector: str | None, config: object, directory: str | None
) -> None:
    text = None if config is None else json.dumps(config)
    try:
        made = kv_transfer_config(connector, text, directory)
    except typer.BadParameter:
        return
    assert (made is None) == (connector is None and text is None and directory is None)
    assert made is None or made.is_kv_transfer_instance
