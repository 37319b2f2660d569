"""ExampleHiddenStatesConnector's worker side: states from the pages to files.

Pages are read on the device thread, within the step that completes a prompt; a lane writes the
copies while the step samples, and the step ends when they are written. So whoever gets the answer,
be it one token long, finds the file. A step waits for `deadline_s` at most. What is not written
then is given up, and until that write has ended nothing else is saved, nor waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from interlace.connectors.example_hidden_states_files import StatesFile, Tensor, path_of
from interlace.connectors.example_hidden_states_messages import (
    HiddenStatesMetadata,
    HiddenStatesReport,
    SaveOrder,
)
from interlace.engine.errors import ConnectorError, InterlaceError
from interlace.engine.ports import Gate, Lane

if TYPE_CHECKING:
    import torch

_LAYER_PREFIX = "cache_only_layers."
_MOST_BYTES = 256 << 20
"""Copies that wait for the lane; one that is longer waits alone."""
_CLOSE_S = 10.0


def cache_only_layer(kv_caches: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The name of the one cache-only layer, and its pages. Raises: `ConnectorError`."""
    found = [name for name in kv_caches if name.startswith(_LAYER_PREFIX)]
    if len(found) != 1:
        raise ConnectorError(
            f"ExampleHiddenStatesConnector needs exactly one cache-only layer, but there are"
            f" {len(found)}: set EngineConfig(hidden_state_layer_ids=...) to the layers whose"
            " hidden states it is to save."
        )
    return found[0], kv_caches[found[0]]


class _Writing(NamedTuple):
    """A save on its way to its file."""

    file: StatesFile
    gate: Gate
    num_bytes: int


class HiddenStatesWorker:
    """Device thread, but for what the lane runs."""

    def __init__(
        self, root: Path, lane: Lane, *, layer_ids: Sequence[int], deadline_s: float
    ) -> None:
        """`root` is the folder of all files, `layer_ids` are noted in each of them."""
        self._root = root
        self._lane = lane
        self._notes = {"hidden_state_layer_ids": ",".join(map(str, layer_ids))}
        self._deadline_s = deadline_s
        self._layer_name = ""
        self._pages: torch.Tensor | None = None
        self._orders: tuple[SaveOrder, ...] = ()
        self._writing: dict[int, _Writing] = {}
        self._failed: dict[int, str] = {}
        self._files: dict[int, StatesFile] = {}
        """Save -> its file, until the end of the request decides whether it stays."""
        self._late: Gate | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Once. Raises: `ConnectorError`."""
        self._layer_name, self._pages = cache_only_layer(kv_caches)

    def start(self, metadata: HiddenStatesMetadata) -> None:
        """Begin a step: files of earlier saves go or stay for good."""
        for save_id in sorted(metadata.withdrawn & self._files.keys()):
            self._submit(self._files.pop(save_id).remove)
        for save_id in metadata.settled & self._files.keys():
            del self._files[save_id]
        self._orders = metadata.saves

    # ---------------------------------------------------------------- copying

    def copy(self, layer_name: str) -> None:
        """The layer was written: copy the prompts' states, and let them be written."""
        if layer_name != self._layer_name:
            return
        orders, self._orders = self._orders, ()
        for order in orders:
            if self._is_stuck or not self._make_room():
                self._failed[order.save_id] = self._why_stuck
            else:
                self._begin(order)

    @property
    def _is_stuck(self) -> bool:
        """Whether a write that was given up still goes on."""
        if self._late is not None and self._late.query():
            self._late = None
        return self._late is not None

    @property
    def _why_stuck(self) -> str:
        return f"{self._root} does not take a file within {self._deadline_s:g} s"

    def _make_room(self) -> bool:
        """Wait until the copies that wait are few; False if that takes too long."""
        if sum(one.num_bytes for one in self._writing.values()) < _MOST_BYTES:
            return True
        return self._await_writes()

    def _begin(self, order: SaveOrder) -> None:
        tensors = {
            "token_ids": _of_ids(order.token_ids),
            "hidden_states": self._states(order),
        }
        file = StatesFile(path_of(self._root, order.request_id))
        gate = self._submit(functools.partial(file.write, tensors, self._notes))
        if gate is None:
            self._failed[order.save_id] = self._why_stuck
            return
        num_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
        self._writing[order.save_id] = _Writing(file, gate, num_bytes)

    def _states(self, order: SaveOrder) -> Tensor:
        """The prompt's states in host memory, [tokens, vectors, hidden]."""
        import torch

        from interlace.layers.device_copies import to_device

        assert self._pages is not None, "registered"
        ids = to_device(order.block_ids, torch.int64, self._pages.device)
        rows = self._pages.index_select(0, ids).flatten(0, 1)[: len(order.token_ids)].cpu()
        dtype = str(rows.dtype).removeprefix("torch.")
        return Tensor(dtype, tuple(rows.shape), rows.view(torch.uint8).numpy())

    def _submit(self, work: Callable[[], None]) -> Gate | None:
        """None if the lane is full, behind a write that hangs: the work is dropped."""
        try:
            return self._lane.submit(work)
        except InterlaceError:
            return None

    # ---------------------------------------------------------------- the end of the step

    def finish_step(self) -> HiddenStatesReport | None:
        """Wait for the step's files; what became of them, or None if there was nothing to save."""
        self._await_writes()
        written = set()
        for save_id, one in self._writing.items():
            if not one.gate.query():
                self._give_up(one)
                self._failed[save_id] = self._why_stuck
            elif one.gate.error is not None:
                self._failed[save_id] = _text_of(one.gate.error)
            else:
                self._files[save_id] = one.file
                written.add(save_id)
        self._writing = {}
        failed, self._failed = self._failed, {}
        return HiddenStatesReport(frozenset(written), failed) if written or failed else None

    def _await_writes(self) -> bool:
        """Wait for all copies that wait; False if that takes too long, now or before."""
        if self._writing and not self._is_stuck:
            *_, last = self._writing.values()  # the lane keeps order
            if not last.gate.wait(self._deadline_s):
                self._late = last.gate
        return self._late is None

    def _give_up(self, one: _Writing) -> None:
        one.file.give_up()
        self._submit(one.file.remove)  # if it appears all the same

    def close(self) -> None:
        """Let what is queued end, for some seconds; may be repeated."""
        self._lane.close(_CLOSE_S)


def _of_ids(token_ids: Sequence[int]) -> Tensor:
    data = np.array(token_ids, dtype=np.int64)
    return Tensor("int64", data.shape, data.view(np.uint8))


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
