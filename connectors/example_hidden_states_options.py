"""What `kv_connector_extra_config` may say to ExampleHiddenStatesConnector."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from interlace.engine.config import KVTransferConfig
from interlace.engine.options import Options, is_path

_LONGEST_S = 86_400.0
"""What a step would wait for longer than a day is not meant to be waited for; threads can wait no
longer than `threading.TIMEOUT_MAX`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStatesOptions(Options):
    """Unknown keys and bad values are refused with `ConfigError`."""

    shared_storage_path: str = ""
    """The folder; required. It is made, for its owner alone, if it is not there."""
    deadline_s: float = 5.0
    """Longest that a step waits for its files; what takes longer is not saved."""

    def __post_init__(self) -> None:
        path = self.shared_storage_path
        self.require(
            isinstance(path, str) and is_path(path),
            "shared_storage_path must name a folder: set it in kv_connector_extra_config.",
        )
        self.require_number("deadline_s", 0.01, _LONGEST_S)

    @classmethod
    def of(cls, config: KVTransferConfig) -> HiddenStatesOptions:
        """Raises: `ConfigError`; also for a consumer, which saves nothing."""
        options = {str(key): value for key, value in config.kv_connector_extra_config.items()}
        made = cls(**options)
        made.require(
            config.is_kv_producer,
            "a kv_consumer saves nothing: set kv_role to 'kv_producer' or 'kv_both'.",
        )
        return made

    @property
    def root(self) -> Path:
        """The folder, absolute."""
        path = os.path.expanduser(self.shared_storage_path)  # noqa: PTH111 - a ~ of nobody stays
        return Path(path).absolute()
