"""Connectors that raise, hang, or keep what they no longer need."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

from memory_broken import Broken
from memory_connector import MemoryConnector
from memory_messages import MemoryMetadata

from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput


class LeaksOnAbort(MemoryConnector):
    """Forgets requests that came to an end, and remembers those that were aborted for ever."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._tracked.get(request.request_id)
        answer = super().request_finished(request, block_ids)
        if request.status is RequestStatus.FINISHED_ABORTED and tracked is not None:
            self._tracked[request.request_id] = tracked
        return answer


class LeaksQueries(MemoryConnector):
    """Remembers each request that it was ever asked about."""

    def forget(self, req_id: str) -> None:
        self._tracked.pop(req_id, None)


class LeaksOnTheWorker(MemoryConnector):
    """Keeps each held request's id on the worker side."""

    def take_sent(self) -> set[str]:
        going_on = {order.req_id for saves in self._saves for order in saves.orders}
        sent = self._sending - going_on - self._told
        self._told |= sent
        return sent

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        self._told: set[str] = set()


class LeaksThreads(MemoryConnector):
    """Does not end what it has begun: its thread lives on after `shutdown`."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        wait = threading.Event().wait  # for what never comes, but not for longer than the test
        threading.Thread(target=wait, args=(60.0,), name="left-behind", daemon=True).start()


class RaisesNowAndThen(MemoryConnector):
    """Raises in every fifth call of `wait_for_save`, as a full queue does."""

    _num_calls = 0

    def wait_for_save(self) -> None:
        self._num_calls += 1
        if self._num_calls % 5 == 0:
            raise TimeoutError("the queue is full")
        super().wait_for_save()


class RaisesAtTheEnd(MemoryConnector):
    """Takes it for granted that each request that ends was admitted."""

    def forget(self, req_id: str) -> None:
        del self._tracked[req_id]
        super().forget(req_id)


class Exits(MemoryConnector):
    """Gives up for the whole process, with the exit code of success."""

    def wait_for_save(self) -> None:
        sys.exit(0)


class Hangs(MemoryConnector):
    """Waits in `wait_for_save` for an answer that never comes."""

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._step_saves is not None:
            threading.Event().wait(60.0)


class ForgetsAfterItsNews(MemoryConnector):
    """Drops what it knows of ended requests after it took the step's new ones: an id that is used
    again at once is lost, and the engine dies at its next step."""

    def forget(self, req_id: str) -> None:
        """Not yet."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            super().forget(req_id)
        return metadata


class OpensFiles(MemoryConnector):
    """Opens a file for each block that it loads, and closes none."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        self._files: list[IO[bytes]] = []

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        if len(self._files) < 50:
            self._files.append(Path(os.devnull).open("rb"))  # noqa: SIM115 - the mistake
        super().load_block(layer_name, key, block_id)

    def shutdown(self) -> None:
        super().shutdown()
        for file in getattr(self, "_files", []):
            file.close()


BROKEN = [
    Broken(LeaksOnAbort, "idle-at-the-end", seen_in="aborted-in-every-state"),
    Broken(LeaksQueries, "idle-at-the-end", seen_in="tokens-cold"),
    Broken(LeaksOnTheWorker, "idle-at-the-end", seen_in="tokens-cold"),
    Broken(LeaksThreads, "shutdown-releases", seen_in="tokens-cold"),
    Broken(RaisesNowAndThen, "hooks-do-not-raise", seen_in="tokens-cold"),
    Broken(RaisesAtTheEnd, "hooks-do-not-raise", seen_in="aborted-in-every-state"),
    Broken(Exits, "hooks-do-not-raise", seen_in="tokens-cold"),
    Broken(Hangs, "bounded-time", deadline_s=2.0, seen_in="tokens-cold"),
    Broken(ForgetsAfterItsNews, "hooks-do-not-raise", seen_in="aborted-in-every-state"),
    Broken(OpensFiles, "idle-at-the-end", seen_in="tokens-hit"),
]
