"""PipelineConnector, and a tape on which a connector derived from this one notes what it does."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from interlace.bench.connector_option import take_option
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole
from interlace.engine.ports import Clock

TAPE = "tape"
"""Key of the tape among the options of the connectors that write on one."""


class Tape(Protocol):
    """What all tapes are told. Device thread."""

    def end_forward(self) -> None:
        """The last layer was computed."""
        ...

    def end(self) -> None:
        """The step has sampled, or there was nothing to compute in it."""
        ...


AnyTape = TypeVar("AnyTape", bound=Tape)


def now_ns(clock: Clock) -> int:
    """The clock in whole nanoseconds. Any thread."""
    return round(clock.monotonic() * 1e9)


class TapedConnector(PipelineConnector, Generic[AnyTape]):
    """Takes the tape out of its options, and notes the ends of forwards and steps."""

    tape_kind: type[AnyTape]
    """Of what a class derived from this one writes on."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError` without a tape, and what the base class raises."""
        self._tape, config = take_option(vllm_config, TAPE, self.tape_kind, type(self))
        super().__init__(config, role, kv_cache_config)

    def wait_for_save(self) -> None:
        """Note the end of the forward."""
        self._tape.end_forward()
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Note the end of the step: it has sampled by now."""
        self._tape.end()
        return super().get_finished(finished_req_ids)
