"""An object among a connector's options, which the connector's own options do not know."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError

T = TypeVar("T")


def take_option(
    config: EngineConfig, key: str, kind: type[T], owner: type
) -> tuple[T, EngineConfig]:
    """What is in `kv_connector_extra_config[key]`, and the configuration without it.

    Raises: `ConfigError` if that is no `kind`; it names `owner`, the connector that needs it.
    """
    transfer = config.kv_transfer_config
    options = {} if transfer is None else dict(transfer.kv_connector_extra_config)
    found = options.pop(key, None)
    if transfer is None or not isinstance(found, kind):
        raise ConfigError(
            f"{owner.__name__} needs a {kind.__name__} as kv_connector_extra_config[{key!r}]: it is"
            " for `interlace bench`; use PipelineConnector elsewhere."
        )
    return found, config.with_connector(
        dataclasses.replace(transfer, kv_connector_extra_config=options)
    )
