"""A stand-in for a GPU's driver: it registers memory with nobody, and is strict about it."""

from __future__ import annotations

import mmap

import pytest

from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline_connector import PipelineConnector


class StrictMemory:
    """A `HostMemory`. What is registered twice, or let go of and was not, fails the test."""

    def __init__(self, *, code: int = 0) -> None:
        """It answers with `code`, an error unless it is 0."""
        self.registered: dict[int, int] = {}
        """Address -> bytes."""
        self.num_registered = 0
        self._code = code

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> int:
        assert read_only, "files of most file systems are refused else"
        assert address % mmap.PAGESIZE == 0
        assert num_bytes > 0
        for other, size in self.registered.items():
            assert address + num_bytes <= other or other + size <= address, "registered already"
        if self._code == 0:
            self.registered[address] = num_bytes
            self.num_registered += 1
        return self._code

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    @property
    def num_bytes(self) -> int:
        return sum(self.registered.values())


def registering_in(memory: StrictMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors that are made from now on register slabs there, as on a GPU."""

    def make_worker_side(connector: PipelineConnector) -> None:
        connector._worker_side = PipelineWorker(
            connector.options,
            connector.lanes,
            make_space=connector._make_space,
            host_memory=memory,
        )

    monkeypatch.setattr(PipelineConnector, "_make_worker_side", make_worker_side)
