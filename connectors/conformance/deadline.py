"""Runs a call on a daemon thread of its own, for so long and no longer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


class Overrun(Exception):  # noqa: N818 - it is no error of ours
    """The call has not returned in time. Its thread is left behind."""


def call_within(call: Callable[[], None], timeout_s: float) -> None:
    """Run `call` on a thread that keeps no process alive, and wait for it.

    It computes on one core: small matrices gain nothing from more, and lose much where all cores
    are busy. Raises: what it raises; `Overrun` if it takes longer than `timeout_s`.
    """
    raised: list[BaseException] = []
    num_threads = torch.get_num_threads()

    def run() -> None:
        try:
            with _one_core():
                call()
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="interlace-check", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        torch.set_num_threads(num_threads)  # since the thread left behind will not
        raise Overrun
    if raised:
        raise raised[0]


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
