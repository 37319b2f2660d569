"""What is checked: a connector's class and the configuration that it gets."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig
from interlace.engine.errors import ConfigError

Device = Literal["cpu", "cuda"]
"""Where the engines of a check compute."""
DType = Literal["float64", "float32"]
"""Of their numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """One connector to check, and what its engines run on. Raises: `ConfigError`."""

    cls: type[KVConnectorBase_V1]
    extra_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    role: KVRole = "kv_both"
    workers: int = 1
    seed: int = 0
    device: Device = "cpu"
    dtype: DType | None = None
    """None: float64 on a CPU; float32 on a GPU, which has no other here."""

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            raise ConfigError(f"device must be 'cpu' or 'cuda', not {self.device!r}.")
        if self.dtype not in (None, *get_args(DType)):
            raise ConfigError(f"dtype must be 'float64', 'float32' or None, not {self.dtype!r}.")
        if self.device == "cpu":
            return
        if self.workers > 1:
            raise ConfigError(
                f"workers={self.workers} share KV heads on a CPU only: use device='cpu', or leave"
                " workers out."
            )
        if self.dtype == "float64":
            raise ConfigError("a GPU's kernels do not compute in float64: leave dtype out.")

    @property
    def number_type(self) -> DType:
        """Of the pages' numbers."""
        return self.dtype or ("float64" if self.device == "cpu" else "float32")

    @property
    def name(self) -> str:
        """The class's."""
        return self.cls.__name__

    @property
    def given_objects(self) -> list[object]:
        """What its configuration holds, at any depth: stores and such, which are the caller's."""
        found: list[object] = [self.extra_config]
        for each in found:  # grows meanwhile
            if isinstance(each, dict):
                found += each.values()
            elif isinstance(each, list | tuple):
                found += each
        return found

    def transfer_config(self, failure_policy: str) -> KVTransferConfig:
        """What its constructor finds as `kv_transfer_config`."""
        return KVTransferConfig(
            kv_connector=self.name,
            kv_connector_module_path=self.cls.__module__,
            kv_role=self.role,
            kv_load_failure_policy=failure_policy,  # type: ignore[arg-type]
            kv_connector_extra_config=self.extra_config,
        )


def connector_class(connector: str | type[KVConnectorBase_V1]) -> type[KVConnectorBase_V1]:
    """A class by its registered name, by "module:Class", or itself.

    Raises: `ConfigError` if there is none, or it is no connector.
    """
    factory = KVConnectorFactory()
    if isinstance(connector, str):
        module, colon, name = connector.strip().rpartition(":")
        if not name or (colon and not module):
            raise ConfigError(f"{connector!r} is neither a NAME nor a MODULE:CLASS.")
        config = KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_module_path=module or None
        )
        try:
            return factory.get_connector_class(config)
        except SystemExit as error:
            raise ConfigError(
                f"the module of {connector} ended with SystemExit ({error}) when it was imported:"
                " let it do nothing on import but define its class."
            ) from error
    return _checked(connector)


def _checked(cls: object) -> type[KVConnectorBase_V1]:
    if not (isinstance(cls, type) and issubclass(cls, KVConnectorBase_V1)):
        raise ConfigError(
            f"{cls!r} is not a KV connector: give a subclass of"
            " interlace.connectors.KVConnectorBase_V1, its registered name, or MODULE:CLASS."
        )
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise ConfigError(
            f"the KV connector {cls.__name__} lacks {', '.join(missing)}: define all of it."
        )
    return cls


def engine_config(subject: Subject, options: dict[str, Any], failure_policy: str) -> EngineConfig:
    """The engine's configuration; the subject's own options win. On a GPU no step is a graph
    unless they, or `options`, say so. Raises: `ConfigError`."""
    wanted = {
        "model": "tiny",
        "dtype": subject.number_type,
        "device": subject.device,
        "cudagraph_mode": None if subject.device == "cpu" else "NONE",
        "skip_tokenizer_init": True,
        "seed": subject.seed,
        "tensor_parallel_size": subject.workers,
        "kv_transfer_config": subject.transfer_config(failure_policy),
        **options,
        **subject.engine_options,
    }
    return EngineConfig(**wanted)
