"""Finds a connector's class, by registered name or in a named module, and makes its instances.

Unlike vLLM's, the registry is an object and not a class attribute, so two engines in one process
may know different connectors: write `KVConnectorFactory().register_connector(...)` and give that
object to the engine. Method names and arguments are vLLM's.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from typing import NamedTuple

from interlace.connectors.base import KVConnectorBase_V1
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

logger = logging.getLogger(__name__)


class _Home(NamedTuple):
    """Where a registered class is, imported only when it is asked for."""

    module_path: str
    class_name: str


_BUILT_IN = {
    "ExampleConnector": _Home("interlace.connectors.example_connector", "ExampleConnector"),
    "ScriptedConnector": _Home("interlace.connectors.conformance.scripted", "ScriptedConnector"),
}


class KVConnectorFactory:
    """A registry of connector classes. Any one thread at a time."""

    def __init__(self) -> None:
        """Knows the built-in connectors; none of them is imported yet."""
        self._homes = dict(_BUILT_IN)
        self._told_of_old_signature: set[type[KVConnectorBase_V1]] = set()

    @property
    def known_names(self) -> list[str]:
        """Names of all registered connectors, sorted."""
        return sorted(self._homes)

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        """Make `module_path.class_name` known as `name`; it is imported when it is used.

        Raises: `ConfigError`, a ValueError, if the name is taken.
        """
        if name in self._homes:
            home = ".".join(self._homes[name])
            raise ConfigError(
                f"a KV connector {name!r} is registered already ({home}); choose another name."
            )
        self._homes[name] = _Home(module_path, class_name)

    def create_connector(
        self,
        config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """One side of the connector that `config` names. Call it on the thread of that side.

        Raises: `ConfigError` if the class cannot be found or used, or its constructor raises;
        what the constructor raises on purpose, an `InterlaceError`, comes out as it is.
        """
        if config.kv_transfer_config is None:
            raise ConfigError("there is no KV connector to make: set kv_transfer_config.")
        cls, is_old = self._get_connector_class_with_compat(config.kv_transfer_config)
        if is_old:
            self._tell_of_old_signature(cls)
        try:
            return _construct(cls, is_old, config, role, kv_cache_config)
        except InterlaceError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the KV connector {cls.__name__} could not be made in the role {role.name}:"
                f" {type(error).__name__}: {error}"
            ) from error

    def get_connector_class(self, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """The class that the configuration names. Raises: `ConfigError`."""
        return self._get_connector_class_with_compat(kv_transfer_config)[0]

    def get_connector_class_by_name(self, name: str) -> type[KVConnectorBase_V1]:
        """The registered class of that name. Raises: `ConfigError`."""
        if name not in self._homes:
            near = difflib.get_close_matches(name, self._homes, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"there is no KV connector {name!r}.{hint} Known: {', '.join(self.known_names)}."
                " For one of your own, set kv_connector_module_path to its module."
            )
        return _load_class(*self._homes[name])

    def _get_connector_class_with_compat(
        self, kv_transfer_config: KVTransferConfig
    ) -> tuple[type[KVConnectorBase_V1], bool]:
        """The class, and whether its constructor takes two arguments only.

        A module path wins over the registry. Raises: `ConfigError`.
        """
        name = kv_transfer_config.kv_connector
        if name is None:
            raise ConfigError("kv_transfer_config names no connector: set kv_connector.")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is None:
            cls = self.get_connector_class_by_name(name)
        else:
            cls = _load_class(module_path, name)
        return cls, not _takes_kv_cache_config(cls)

    def _tell_of_old_signature(self, cls: type[KVConnectorBase_V1]) -> None:
        """Once per class, though each has two instances."""
        if cls not in self._told_of_old_signature:
            self._told_of_old_signature.add(cls)
            logger.warning(
                "%s takes (vllm_config, role) only, which is deprecated: let it take"
                " (vllm_config, role, kv_cache_config) and pass all three on.",
                cls.__name__,
            )


def _load_class(module_path: str, class_name: str) -> type[KVConnectorBase_V1]:
    """Import a class and check that it can be a connector. Raises: `ConfigError`."""
    try:
        module = importlib.import_module(module_path)
    except Exception as error:
        raise ConfigError(
            f"the module {module_path!r} of the KV connector {class_name!r} cannot be imported:"
            f" {type(error).__name__}: {error}. Check its name, and that it is installed or its"
            " folder is on PYTHONPATH."
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        candidates = [name for name, value in vars(module).items() if _is_connector(value)]
        has = f"its connectors: {', '.join(candidates)}" if candidates else "it has no connectors"
        raise ConfigError(f"the module {module_path!r} has no {class_name!r}; {has}.")
    return _checked(found, f"{module_path}.{class_name}")


def _is_connector(value: object) -> bool:
    """Whether `value` is a connector class other than the base itself."""
    return (
        isinstance(value, type)
        and issubclass(value, KVConnectorBase_V1)
        and value is not KVConnectorBase_V1
    )


def _checked(found: object, path: str) -> type[KVConnectorBase_V1]:
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        what = f"the class {found.__name__}" if isinstance(found, type) else repr(found)
        raise ConfigError(
            f"{path} is {what}, not a KV connector: name a subclass of"
            " interlace.connectors.KVConnectorBase_V1."
        )
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise ConfigError(f"the KV connector {path} lacks {', '.join(missing)}: define all of it.")
    return found


def _takes_kv_cache_config(cls: type[KVConnectorBase_V1]) -> bool:
    """Whether the constructor has a place for a third argument."""
    parameters = inspect.signature(cls).parameters
    if "kv_cache_config" in parameters:
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & set(kinds):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in positional for kind in kinds) >= 3


def _construct(
    cls: type[KVConnectorBase_V1],
    is_old: bool,
    config: EngineConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig | None,
) -> KVConnectorBase_V1:
    """Pass the third argument by name where it has that name, and else by place, as vLLM does."""
    if is_old:
        return cls(config, role)
    signature = inspect.signature(cls)
    named = signature.parameters.get("kv_cache_config")
    if named is not None and named.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return cls(config, role, kv_cache_config=kv_cache_config)
    try:
        signature.bind(config, role, kv_cache_config)
    except TypeError:  # only **kwargs can take it
        return cls(config, role, kv_cache_config=kv_cache_config)
    return cls(config, role, kv_cache_config)
