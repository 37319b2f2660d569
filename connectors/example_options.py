"""What `kv_connector_extra_config` may say to ExampleConnector."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from interlace.engine.config import KVTransferConfig
from interlace.engine.options import Options, is_path

_LONGEST_S = 86_400.0
"""What is not looked at within a day is not meant to be waited for; threads can wait no longer
than `threading.TIMEOUT_MAX`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleConnectorOptions(Options):
    """Unknown keys and bad values are refused with `ConfigError`."""

    shared_storage_path: str = ""
    """The directory; required. Several processes and models may share it."""
    load_async: bool = False
    """Load a request's KV before it joins the batch, rather than layer by layer within a step."""
    refresh_s: float = 1.0
    """Seconds between two looks for what other processes stored."""
    queue_bytes: int = 256 << 20
    """Most bytes that wait for the writer; what exceeds them is not saved. Blocks are saved in
    runs of at most a quarter of it, so the writer frees room while a long prompt comes in."""
    deadline_s: float = 5.0
    """Longest wait for the file system: for the first index, and for each file of a load."""

    def __post_init__(self) -> None:
        path = self.shared_storage_path
        self.require(
            isinstance(path, str) and is_path(path),
            "shared_storage_path must name a directory: set it in kv_connector_extra_config.",
        )
        self.require(isinstance(self.load_async, bool), "load_async must be true or false.")
        self.require_number("refresh_s", 0.01, _LONGEST_S)
        self.require_int("queue_bytes", 1)
        self.require_number("deadline_s", 0.01, _LONGEST_S)

    @classmethod
    def of(cls, config: KVTransferConfig) -> ExampleConnectorOptions:
        """Raises: `ConfigError`."""
        return cls(**{str(key): value for key, value in config.kv_connector_extra_config.items()})

    @property
    def root(self) -> Path:
        """The directory, absolute."""
        path = os.path.expanduser(self.shared_storage_path)  # noqa: PTH111 - a ~ of nobody stays
        return Path(path).absolute()
