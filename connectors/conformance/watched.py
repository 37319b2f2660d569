"""A connector's instance with every call of its hooks seen by a `Watch`, and a factory of such.

The engine gets the stand-in. It looks like an instance of the connector's class, so messages name
that class.
"""

from __future__ import annotations

import types
from typing import Any

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.hook_calls import (
    BOTH_HOOKS,
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    HookCall,
)
from interlace.connectors.conformance.watch import Watch
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

_HOOKS = {
    KVConnectorRole.SCHEDULER: SCHEDULER_HOOKS | BOTH_HOOKS,
    KVConnectorRole.WORKER: WORKER_HOOKS | BOTH_HOOKS,
}


class _Watched:
    """Stands for one instance."""

    def __init__(self, real: KVConnectorBase_V1, rank: int, watch: Watch) -> None:
        self._real = real
        self._rank = rank
        self._watch = watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        role = self._real._role
        if name not in _HOOKS[role] or not callable(found):
            return found
        watch, rank, connector = self._watch, self._rank, type(self._real).__name__
        own = getattr(found, "__func__", None)
        is_inherited = own is getattr(KVConnectorBase_V1, name, found)

        def called(self: object, *args: Any, **kwargs: Any) -> Any:
            call = HookCall(role, rank, connector, name, args, kwargs, is_inherited=is_inherited)
            return watch.call(call, found)

        called.__name__ = name  # what it is asked for: a class may say `one = another`
        hook = types.MethodType(called, self)
        self.__dict__[name] = hook
        return hook


def watched(real: KVConnectorBase_V1, rank: int, watch: Watch) -> KVConnectorBase_V1:
    """A stand-in for `real`."""
    # `type(stand_in).__name__` is what the engine's messages say.
    stand_in: Any = type(type(real).__name__, (_Watched,), {})(real, rank, watch)
    return stand_in  # type: ignore[no-any-return]


class WatchingFactory(KVConnectorFactory):
    """Makes stand-ins for instances of one class, and keeps the instances."""

    def __init__(self, cls: type[KVConnectorBase_V1], watch: Watch) -> None:
        super().__init__()
        self._cls = cls
        self._watch = watch
        self._made: list[KVConnectorBase_V1] = []

    def made_in(self, role: KVConnectorRole) -> list[KVConnectorBase_V1]:
        """The instances in that role, in the order in which they were made."""
        return [one for one in self._made if one.role is role]

    def _get_connector_class_with_compat(
        self, kv_transfer_config: KVTransferConfig
    ) -> tuple[type[KVConnectorBase_V1], bool]:
        return self._cls, False

    def create_connector(
        self,
        config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """A stand-in. Raises as the base class does; `ConfigError` if the constructor exits."""
        try:
            real = super().create_connector(config, role, kv_cache_config)
        except SystemExit as error:
            name = self._cls.__name__
            raise ConfigError(f"{name}'s constructor raised SystemExit: {error}") from error
        self._made.append(real)
        return watched(real, config.rank, self._watch)
