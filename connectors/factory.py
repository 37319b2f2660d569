"""Finds a connector's class, by registered name or in a named module, and makes its instances.

Unlike vLLM's, the registry is an object and not a class attribute, so two engines in one process
may know different connectors: write `KVConnectorFactory().register_connector(...)` and give that
object to the engine. Method names and arguments are vLLM's.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from interlace.connectors.base import KVConnectorBase_V1
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.connector_errors import blaming
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

if TYPE_CHECKING:
    from interlace.layers.attention_backend import KVCacheLayout

logger = logging.getLogger(__name__)

GRAPH_MODES_WITH_FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
"""Modes in which whole steps are one device graph (vLLM's names)."""


class _Home(NamedTuple):
    """Where a registered class is, imported only when it is asked for."""

    module_path: str
    class_name: str


_BUILT_IN = {
    "DecodeBenchConnector": _Home(
        "interlace.connectors.decode_bench_connector", "DecodeBenchConnector"
    ),
    "ExampleConnector": _Home("interlace.connectors.example_connector", "ExampleConnector"),
    "ExampleHiddenStatesConnector": _Home(
        "interlace.connectors.example_hidden_states_connector", "ExampleHiddenStatesConnector"
    ),
    "MultiConnector": _Home("interlace.connectors.multi_connector", "MultiConnector"),
    "PipelineConnector": _Home("interlace.connectors.pipeline_connector", "PipelineConnector"),
    "ScriptedConnector": _Home("interlace.connectors.conformance.scripted", "ScriptedConnector"),
}
_NOT_THERE_YET = frozenset(
    {
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "P2pNcclConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""vLLM's other built-in connectors, up to 0.32."""


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
        """One side of the connector that `config` names. The engine makes both sides on the device
        thread: a constructor may wait for files.

        Raises: `ConfigError` if the class cannot be found or used, its pages would have to lie
        otherwise than they do, or its constructor raises; what the class raises on purpose, an
        `InterlaceError`, comes out as it is.
        """
        if config.kv_transfer_config is None:
            raise ConfigError("there is no KV connector to make: set kv_transfer_config.")
        cls, is_old = self._get_connector_class_with_compat(config.kv_transfer_config)
        if is_old:
            self._tell_of_old_signature(cls)
        try:
            _check_fields(cls, config.kv_transfer_config)
            return _construct(cls, config, role, kv_cache_config)
        except InterlaceError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the KV connector {cls.__name__} could not be made in the role {role.name}:"
                f" {type(error).__name__}: {error}"
            ) from error

    def validate_config(self, config: EngineConfig) -> None:
        """Refuse what can be seen to be wrong before there is a model; makes nothing. May look at
        files: device thread.

        Raises: `ConfigError` if the class cannot be found or used, for fields that it does not
        read, and if it refuses its options; what else the class raises on purpose, an
        `InterlaceError`, comes out as it is.
        """
        cls = self._class_of(config)
        assert config.kv_transfer_config is not None, "it names the class"
        _check_fields(cls, config.kv_transfer_config)
        if not _validates_own_options(cls):
            return
        try:
            cls.validate_config(config)
        except InterlaceError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the KV connector {cls.__name__} could not validate its options:"
                f" {type(error).__name__}: {error}"
            ) from error

    def required_layout(self, config: EngineConfig) -> KVCacheLayout:
        """How KV pages are to lie for the connector that `config` names.

        Raises: `ConfigError` if it needs a layout that does not exist; `ConnectorError`.
        """
        cls = self._class_of(config)
        with blaming(cls, "get_required_kvcache_layout"):
            layout = cls.get_required_kvcache_layout(config)
        match layout:
            case None:
                return "NHD"
            case "NHD" | "HND":
                return layout
        raise ConfigError(
            f"the KV connector {cls.__name__} needs the KV-cache layout {layout!r}, which does not"
            " exist here: get_required_kvcache_layout may return 'NHD', 'HND' or None, for any."
        )

    def graph_mode(self, config: KVTransferConfig, mode: str | None) -> str | None:
        """`mode`, a `cudagraph_mode`, or "PIECEWISE" if the connector needs the layer hooks that a
        full graph would leave out. Raises: `ConfigError`, `ConnectorError`."""
        cls = self.get_connector_class(config)
        if mode not in GRAPH_MODES_WITH_FULL:
            return mode
        with blaming(cls, "requires_piecewise_for_cudagraph"):
            needs_hooks = cls.requires_piecewise_for_cudagraph(
                dict(config.kv_connector_extra_config)
            )
        if not needs_hooks:
            return mode
        logger.warning("%s needs its layer hooks: PIECEWISE replaces %s", cls.__name__, mode)
        return "PIECEWISE"

    def _class_of(self, config: EngineConfig) -> type[KVConnectorBase_V1]:
        if config.kv_transfer_config is None:
            raise ConfigError("there is no KV connector to make: set kv_transfer_config.")
        return self.get_connector_class(config.kv_transfer_config)

    def get_connector_class(self, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """The class that the configuration names. Raises: `ConfigError`."""
        return self._get_connector_class_with_compat(kv_transfer_config)[0]

    def get_connector_class_by_name(self, name: str) -> type[KVConnectorBase_V1]:
        """The registered class of that name. Raises: `ConfigError`."""
        if name not in self._homes:
            raise ConfigError(
                f"{self._what_lacks(name)} Known: {', '.join(self.known_names)}. For one of your"
                " own, set kv_connector_module_path to its module."
            )
        return _load_class(*self._homes[name])

    def _what_lacks(self, name: str) -> str:
        """What is wrong with a name that is not registered, in a sentence or two."""
        not_yet = "is one of vLLM's that Interlace knows and does not have yet."
        if name in _NOT_THERE_YET:
            return f"the KV connector {name!r} {not_yet}"
        near = _nearest(name, (*_NOT_THERE_YET, *self._homes))
        if near is None:
            return f"there is no KV connector {name!r}."
        hint = f"Did you mean {near!r}?"
        if near not in self._homes:
            hint += f" That {not_yet}"
        return f"there is no KV connector {name!r}. {hint}"

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
        return cls, _way_to_pass_kv_cache_config(cls) is _Way.NONE

    def _tell_of_old_signature(self, cls: type[KVConnectorBase_V1]) -> None:
        """Once per class, though each has two instances."""
        if cls not in self._told_of_old_signature:
            self._told_of_old_signature.add(cls)
            logger.warning(
                "%s takes (vllm_config, role) only, which is deprecated: let it take"
                " (vllm_config, role, kv_cache_config) and pass all three on.",
                cls.__name__,
            )


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` may be meant for, however it is spelt.

    "Connector" is left aside: all would be near each other by it.
    """
    by_key = {_key(known): known for known in names}
    near = difflib.get_close_matches(_key(name), by_key, n=1)
    return by_key[near[0]] if near else None


def _key(name: str) -> str:
    return name.lower().replace("connector", "")


def _load_class(module_path: str, class_name: str) -> type[KVConnectorBase_V1]:
    """Import a class and check that it can be a connector. Raises: `ConfigError`."""
    try:
        module = importlib.import_module(module_path)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module {module_path!r} of the KV connector {class_name!r} cannot be imported:"
            f" {type(error).__name__}: {error}. Check its name, and that it is installed or its"
            " folder is on PYTHONPATH."
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        candidates = [name for name, value in vars(module).items() if _is_connector(value)]
        has = f"its connectors: {', '.join(candidates)}" if candidates else "it has no connectors"
        raise ConfigError(
            f"the module {module_path!r} has no {class_name!r}; {has}: name one that is there."
        )
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


def _check_fields(cls: type[KVConnectorBase_V1], config: KVTransferConfig) -> None:
    """Raises: `ConfigError` for fields that one of Interlace's own connectors does not read."""
    fields = config.fields_of_others
    if fields and cls.__module__.startswith("interlace."):
        raise ConfigError(
            f"{cls.__name__} does not read {', '.join(fields)}; none of Interlace's own connectors"
            " does. Leave that out, or configure it by kv_connector_extra_config."
        )


def _validates_own_options(cls: type[KVConnectorBase_V1]) -> bool:
    """Whether `validate_config` knows all options: not if a constructor was added below it, which
    may take some out before it passes the rest on. A method of that name is something else."""
    for one in cls.__mro__:
        if "validate_config" in vars(one):
            return isinstance(vars(one)["validate_config"], classmethod)
        if "__init__" in vars(one):
            return False
    return False


class _Way(enum.Enum):
    """How a constructor takes its third argument."""

    NAME = enum.auto()
    PLACE = enum.auto()
    NONE = enum.auto()
    """It takes two only."""


def _way_to_pass_kv_cache_config(cls: type[KVConnectorBase_V1]) -> _Way:
    """By name where it has that name or takes any, else by place where it has one, as vLLM does."""
    signature = inspect.signature(cls)
    fits_by_name = _fits(signature, None, None, kv_cache_config=None)
    if fits_by_name and "kv_cache_config" in signature.parameters:
        return _Way.NAME
    if _fits(signature, None, None, None):
        return _Way.PLACE
    return _Way.NAME if fits_by_name else _Way.NONE


def _fits(signature: inspect.Signature, *args: object, **kwargs: object) -> bool:
    """Whether the arguments have places. It need not be all: what lacks is told by the call."""
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError:
        return False
    return True


def _construct(
    cls: type[KVConnectorBase_V1],
    config: EngineConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig | None,
) -> KVConnectorBase_V1:
    match _way_to_pass_kv_cache_config(cls):
        case _Way.NAME:
            return cls(config, role, kv_cache_config=kv_cache_config)
        case _Way.PLACE:
            return cls(config, role, kv_cache_config)
        case _Way.NONE:
            return cls(config, role)
