"""The children of a MultiConnector: what its configuration says of them, and how all are called.

A child is named by its key, its place and what the configuration calls it: "0:ExampleConnector", or
"1:my_package.my_module.MyConnector" for one that `kv_connector_module_path` names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child, before there is an instance of it."""

    index: int
    key: str
    config: KVTransferConfig
    cls: type[KVConnectorBase_V1]

    def engine_config(self, parent: EngineConfig) -> EngineConfig:
        """The configuration that the child is made with."""
        return parent.with_connector(self.config)


def child_specs(config: KVTransferConfig | None) -> tuple[ChildSpec, ...]:
    """The children in their order, at least one; they inherit what they do not set.

    Raises: `ConfigError`, naming the child and its fault.
    """
    extra = {} if config is None else config.kv_connector_extra_config
    unknown = sorted(extra.keys() - {"connectors"})
    if unknown:
        raise ConfigError(
            f"MultiConnector has no option {unknown[0]!r}: options of a child go into that child's"
            " kv_connector_extra_config, and 'connectors' is the only one beside."
        )
    listed = extra.get("connectors")
    if config is None or not isinstance(listed, list | tuple) or not listed:
        raise ConfigError(
            "MultiConnector needs kv_connector_extra_config={'connectors': [{'kv_connector': NAME,"
            f" ...}}, ...]}} with at least one child, not {listed!r}."
        )
    return tuple(_spec(config, index, said) for index, said in enumerate(listed))


def _spec(parent: KVTransferConfig, index: int, said: object) -> ChildSpec:
    if not isinstance(said, Mapping) or not said.get("kv_connector"):
        raise ConfigError(
            f"MultiConnector: connectors[{index}] must be a mapping with a 'kv_connector', not"
            f" {said!r}."
        )
    if "kv_load_failure_policy" in said:
        raise ConfigError(
            f"MultiConnector: connectors[{index}] sets kv_load_failure_policy, which belongs to the"
            " whole engine: set it beside MultiConnector's name."
        )
    own = {"kv_connector_module_path": None, "kv_connector_extra_config": {}, **said}
    try:
        config = dataclasses.replace(parent, **own)
        cls = KVConnectorFactory().get_connector_class(config)
    except (ConfigError, TypeError) as error:  # keys that are no words are a TypeError
        raise ConfigError(f"MultiConnector: connectors[{index}]: {error}") from error
    return ChildSpec(index, _key(index, config), config, cls)


def validate_children(config: EngineConfig) -> None:
    """Let each child's class validate its options. Raises: `ConfigError`, naming the child; what
    else a child raises on purpose comes out as it is."""
    factory = KVConnectorFactory()
    for spec in child_specs(config.kv_transfer_config):
        with _named_in_errors(spec.index):
            factory.validate_config(spec.engine_config(config))


@contextlib.contextmanager
def _named_in_errors(index: int) -> Iterator[None]:
    """Say which child a `ConfigError` is of."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"MultiConnector: connectors[{index}]: {error}") from error


def _key(index: int, config: KVTransferConfig) -> str:
    module_path = config.kv_connector_module_path
    place = "" if module_path is None else f"{module_path}."
    return f"{index}:{place}{config.kv_connector}"


def class_of_key(key: str) -> type[KVConnectorBase_V1]:
    """The class of the child with that key. Imports no module that is not one of Interlace's.

    Raises: `ConfigError`, a ValueError, if there is none.
    """
    index, _, path = key.partition(":")
    module_path, _, name = path.rpartition(".")
    if index.isdecimal() and not module_path:
        return KVConnectorFactory().get_connector_class_by_name(name)
    found = getattr(sys.modules.get(module_path), name, None)
    is_connector = isinstance(found, type) and issubclass(found, KVConnectorBase_V1)
    if not (index.isdecimal() and is_connector):
        raise ConfigError(f"MultiConnector: no child can have the key {key!r}.")
    return cast("type[KVConnectorBase_V1]", found)


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """One side of one child."""

    index: int
    key: str
    connector: KVConnectorBase_V1

    def broke(self, hook: str, rule: str) -> ConnectorError:
        """The error of a hook that did what it must not."""
        return ConnectorError(f"MultiConnector's child {self.key}: {hook} {rule}")


class Children:
    """One side of all children. Each call reaches all of them, whatever one of them raises."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)

    @classmethod
    def made(
        cls,
        parent: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None,
    ) -> Children:
        """Make one instance of each child; if one cannot be made, the others are ended.

        Raises: `ConfigError`, naming the child; what a child raises on purpose comes out as it is.
        """
        factory, specs = KVConnectorFactory(), child_specs(parent.kv_transfer_config)
        children: list[Child] = []
        try:
            for spec in specs:
                config = spec.engine_config(parent)
                with _named_in_errors(spec.index):
                    connector = factory.create_connector(config, role, kv_cache_config)
                children.append(Child(spec.index, spec.key, connector))
        except BaseException:
            _end(children)
            raise
        return cls(children)

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def __getitem__(self, index: int) -> Child:
        return self._children[index]

    def each(self, hook: str, call: Callable[[Child], T]) -> list[T]:
        """What each child answers, in order.

        Raises: `ConnectorError` after the last one was called, naming the first that raised; what
        others raised is logged.
        """
        answers, errors = self.try_each(hook, call)
        if errors:
            log_errors(errors[1:])
            raise errors[0]
        return [answer for _, answer in answers]

    def try_each(
        self, hook: str, call: Callable[[Child], T]
    ) -> tuple[list[tuple[Child, T]], list[ConnectorError]]:
        """What each child answers, and, as errors that name their child, what others raised."""
        answers: list[tuple[Child, T]] = []
        errors: list[ConnectorError] = []
        for child in self._children:
            try:
                answers.append((child, call(child)))
            except Exception as error:  # noqa: BLE001 - the caller raises or logs it
                errors.append(_named(child, hook, error))
        return answers, errors


def _named(child: Child, hook: str, error: Exception) -> ConnectorError:
    named = child.broke(hook, f"raised {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def log_errors(errors: Sequence[ConnectorError]) -> None:
    """Tell of errors that nobody will raise."""
    for error in errors:
        logger.error("%s", error, exc_info=error)


def _end(children: Sequence[Child]) -> None:
    """Shut down children of a parent that is not made."""
    _, errors = Children(children).try_each("shutdown", lambda child: child.connector.shutdown())
    log_errors(errors)


def checked_match(child: Child, answer: Any, most: int) -> tuple[int | None, bool]:
    """A child's answer to a match query for a request that lacks `most` tokens.

    Raises: `ConnectorError` if the protocol forbids it.
    """
    match answer:
        case (None, bool()):
            return None, False
        case (bool(), _):
            pass
        case (int() as num_tokens, bool() as is_async) if 0 <= num_tokens <= most:
            if num_tokens or not is_async:
                return num_tokens, is_async
    raise child.broke(
        "get_num_new_matched_tokens",
        f"answered {answer!r}, but it must be (tokens from 0 to {most}, or None; whether"
        " asynchronous, which needs a token).",
    )
