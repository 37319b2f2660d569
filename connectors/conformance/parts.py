"""The one place where a harness is wired: model, pages, runner, both sides, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance.engine_shape import EngineShape
from interlace.connectors.conformance.subject import Subject, engine_config
from interlace.connectors.conformance.watch import Watch
from interlace.connectors.conformance.watched import WatchingFactory
from interlace.connectors.conformance.watched_lanes import WatchedLanes
from interlace.engine.clock import MonotonicClock
from interlace.engine.events import EventBus
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.ports import StepRunner
from interlace.engine.scheduler import Scheduler
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.checkpoint.loading import Silent


class Parts(NamedTuple):
    """An engine without its loop."""

    scheduler: Scheduler
    runner: StepRunner
    stand_in: KVConnectorBase_V1
    """For the scheduler side: calls of it are watched."""
    scheduler_side: KVConnectorBase_V1
    worker_sides: list[KVConnectorBase_V1]
    """By rank."""
    pages: list[Mapping[str, torch.Tensor]]
    """Per rank: layer name -> pages."""

    def close(self) -> None:
        """End both sides of the connector, as the engine does."""
        self.scheduler.close()
        self.runner.close()


def open_parts(
    subject: Subject, shape: EngineShape, model: LoadedModel, watch: Watch, lanes: WatchedLanes
) -> Parts:
    """Everything made as the engine makes it, in its order. Raises: `ConfigError`,
    `ConnectorError`; nothing is left open then."""
    from interlace.front_door import make_parts

    config = engine_config(subject, shape.options(), shape.failure_policy)
    factory = WatchingFactory(subject.cls, watch)
    made = make_parts(config, model, Silent(), factory, lanes)
    try:
        scheduler = Scheduler(
            made.config.scheduler_config,
            made.config.cache_config,
            made.model_config.eos_token_ids,
            MonotonicClock(),
            EventBus(),
            made.connector,
            shape.failure_policy,
        )
        scheduler.connect(made.runner)
    except BaseException:
        made.close()
        raise
    assert made.connector is not None
    return Parts(
        scheduler,
        made.runner,
        made.connector,
        factory.made_in(KVConnectorRole.SCHEDULER)[0],
        factory.made_in(KVConnectorRole.WORKER),
        [pages.by_name() for pages in made.pages],
    )
