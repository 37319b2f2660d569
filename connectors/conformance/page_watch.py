"""Sees who writes where: compares all pages before and after every hook and every lane's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.load_ledger import LoadLedger
from interlace.connectors.conformance.pages import Bits, Pages
from interlace.connectors.conformance.watch import Detector, Watch


class _Write(NamedTuple):
    """A block that was changed."""

    rank: int
    layer: str
    block_id: int


class PageWatch(Detector):
    """A connector may write to target blocks of its loads, while these go on."""

    def __init__(self, watch: Watch, pages: Pages, ledger: LoadLedger) -> None:
        self._watch = watch
        self._pages = pages
        self._ledger = ledger
        self._seen: list[dict[str, Bits]] = [
            {name: bits.copy() for name, bits in layers.items()} for layers in pages.layers
        ]
        self._writers: list[str] = []
        """Who runs, the innermost last."""

    def before(self, call: HookCall) -> None:
        """See `Detector`."""
        self._enter(f"{call.connector}.{call.hook}", call.hook)

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        self._leave()

    def before_work(self, label: str) -> None:
        """See `Detector`."""
        self._enter(f"work {label}", label)

    def after_work(self, label: str) -> None:
        """See `Detector`."""
        self._leave()

    def _enter(self, writer: str, hook: str) -> None:
        if self._writers:
            self._compare(self._writers[-1])
        else:
            self._take_over()
        self._writers.append(writer)

    def _leave(self) -> None:
        if self._writers:
            self._compare(self._writers.pop())

    def _take_over(self) -> None:
        """What the engine wrote since is its own affair."""
        for seen, layers in zip(self._seen, self._pages.layers, strict=True):
            for name, bits in layers.items():
                np.copyto(seen[name], bits)

    def _compare(self, writer: str) -> None:
        for write in self._writes():
            self._judge(write, writer)
        self._take_over()

    def _writes(self) -> Iterator[_Write]:
        for rank, layers in enumerate(self._pages.layers):
            for name, bits in layers.items():
                if np.array_equal(bits, self._seen[rank][name]):
                    continue
                changed = (bits != self._seen[rank][name]).reshape(len(bits), -1).any(axis=1)
                for block_id in np.flatnonzero(changed).tolist():
                    yield _Write(rank, name, block_id)

    def _is_a_repetition(self, write: _Write) -> bool:
        """Whether it wrote what was loaded there before: only the last bits were changed since."""
        now = self._pages.layers[write.rank][write.layer][write.block_id]
        changes = now ^ self._seen[write.rank][write.layer][write.block_id]
        return bool(np.isin(changes, (0, 1)).all())

    def _judge(self, write: _Write, writer: str) -> None:
        ledger = self._ledger
        self._watch.evidence["writes"] += 1
        if ledger.may_write(write.block_id, write.rank, write.layer):
            return
        where = f"block {write.block_id} of {write.layer}, {ledger.describe(write.block_id)}"
        if ledger.is_late(write.block_id, write.rank):
            self._watch.findings.add(
                "layer-loads-complete",
                f"{writer} wrote to {where}: wait_for_layer_load had returned for that layer.",
            )
        elif ledger.was_loaded(write.block_id) and self._is_a_repetition(write):
            self._watch.findings.add(
                "plan-reset",
                f"{writer} wrote to {where}, again: its load was complete and had ended.",
            )
        else:
            self._watch.findings.add(
                "loads-write-only-their-blocks",
                f"{writer} wrote to {where}: no load into that block is under way.",
            )
