"""The options that name a KV connector, and the `KVTransferConfig` that they come to.

`--kv-connector` and `--kv-dir` are short forms of JSON. Together with `--kv-transfer-config` they
add up; what two of them say differently is refused. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import typer

from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError

_CONNECTOR, _CONFIG, _DIR = "--kv-connector", "--kv-transfer-config", "--kv-dir"
_PANEL: Final = "KV connector: keeps the KV of prompts and answers, and brings it back"
_EXTRA: Final = "kv_connector_extra_config"
_SIZES: Final = {"host_bytes": 1 << 30, "slab_bytes": 16 << 20}
"""What suits conversations: little memory, and small files, since each process begins one."""

KVConnector: TypeAlias = Annotated[
    str | None,
    typer.Option(
        _CONNECTOR,
        metavar="NAME|MODULE:CLASS",
        help="A connector by its name, or a class of your own; saves and loads (kv_both).",
        rich_help_panel=_PANEL,
    ),
]
KVConfig: TypeAlias = Annotated[
    str | None,
    typer.Option(
        _CONFIG,
        metavar="JSON",
        help="An object with the fields of KVTransferConfig, such as kv_connector and kv_role.",
        rich_help_panel=_PANEL,
    ),
]
KVDir: TypeAlias = Annotated[
    str | None,
    typer.Option(
        _DIR,
        metavar="DIR",
        help="Keep KV as files in this folder, and load what is there already. Short for "
        '--kv-transfer-config \'{"kv_connector": "PipelineConnector", "kv_role": "kv_both", '
        '"kv_load_failure_policy": "recompute", "kv_connector_extra_config": '
        '{"store": "file", "path": "DIR", "host_bytes": 1073741824, "slab_bytes": 16777216}}\'.',
        rich_help_panel=_PANEL,
    ),
]


def kv_transfer_config(
    connector: str | None, config_json: str | None, directory: str | None
) -> KVTransferConfig | None:
    """What the three options together ask for, None if none was given.

    Raises: `typer.BadParameter` that names the option to mend.
    """
    given = (
        (_CONNECTOR, connector, _fields_of_connector),
        (_DIR, directory, _fields_of_directory),
        (_CONFIG, config_json, _fields_of_json),
    )
    stated: dict[str, Any] = {}
    by: dict[str, str] = {}
    for option, text, fields_of in given:
        if text is not None:
            _add(stated, by, fields_of(text), option)
    if all(text is None for _, text, _ in given):
        return None
    if not isinstance(stated.get("kv_connector"), str) or not stated["kv_connector"]:
        raise _refused(_CONFIG, 'kv_connector must name a connector, as in "ExampleConnector".')
    defaults = {}
    if connector is not None or directory is not None:
        defaults["kv_role"] = "kv_both"
    if directory is not None:
        defaults["kv_load_failure_policy"] = "recompute"
        stated[_EXTRA] = _SIZES | stated[_EXTRA]
    try:
        return KVTransferConfig(**(defaults | stated))
    except ConfigError as error:
        raise _refused(_CONFIG, str(error)) from error


def _fields_of_connector(text: str) -> dict[str, Any]:
    """A name alone is one of the registry's; a module of the user's own goes before a colon."""
    module, colon, name = text.strip().rpartition(":")
    if not name or (colon and not module):
        raise _refused(_CONNECTOR, f"{text!r} is neither a NAME nor a MODULE:CLASS.")
    return {"kv_connector": name} | ({"kv_connector_module_path": module} if colon else {})


def _fields_of_directory(text: str) -> dict[str, Any]:
    if not text.strip():
        raise _refused(_DIR, "the name of the folder is empty.")
    path = os.path.expanduser(text)  # noqa: PTH111 - a ~ of nobody stays as it is
    return {"kv_connector": "PipelineConnector", _EXTRA: {"store": "file", "path": path}}


def _fields_of_json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(_CONFIG, f"this is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise _refused(_CONFIG, 'give a JSON object: {"kv_connector": "...", ...}.')
    if not isinstance(fields.get(_EXTRA, {}), dict):
        raise _refused(_CONFIG, f"{_EXTRA} must be a JSON object.")
    return fields


def _add(
    stated: dict[str, Any], by: dict[str, str], fields: Mapping[str, Any], option: str
) -> None:
    """Add what one option says to `stated`; `by` knows which option said what before."""
    for name, value in fields.items():
        if name == _EXTRA:
            _add(stated.setdefault(_EXTRA, {}), by, value, option)
        elif name in stated and stated[name] != value:
            raise _refused(
                option,
                f"{name} is {value!r} here and {stated[name]!r} by {by[name]}; "
                "leave one of them out.",
            )
        else:
            stated[name] = value
            by[name] = option


def _refused(option: str, why: str) -> typer.BadParameter:
    return typer.BadParameter(why, param_hint=option)
