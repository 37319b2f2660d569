"""Sees who writes where: compares all pages before and after every hook and every lane's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from interlace.connectors.conformance.hook_calls import HookCall
from interlace.connectors.conformance.load_ledger import Load, LoadLedger
from interlace.connectors.conformance.number_format import Bits
from interlace.connectors.conformance.pages import Pages
from interlace.connectors.conformance.watch import Detector, Watch


class _Write(NamedTuple):
    """A block that was changed."""

    rank: int
    layer: str
    block_id: int
    is_nudge: bool
    """Whether it undid what `Pages.nudge` did: the same was written again."""


class PageWatch(Detector):
    """A connector may write to target blocks of its loads, while these go on."""

    def __init__(self, watch: Watch, pages: Pages, ledger: LoadLedger) -> None:
        self._watch = watch
        self._pages = pages
        self._ledger = ledger
        self._places = [
            (rank, name, layer)
            for rank, layers in enumerate(pages.layers)
            for name, layer in layers.items()
        ]
        self._seen = self._look()
        self._writers: list[str] = []
        """Who runs, the innermost last."""

    def before(self, call: HookCall) -> None:
        """See `Detector`."""
        if not call.is_inherited:
            self._enter(f"{call.connector}.{call.hook}")

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        if not call.is_inherited:
            self._leave()

    def before_work(self, label: str) -> None:
        """See `Detector`."""
        self._enter(f"work {label}")

    def after_work(self, label: str) -> None:
        """See `Detector`."""
        self._leave()

    def _enter(self, writer: str) -> None:
        if self._writers:
            self._compare(self._writers[-1])
        else:
            self._seen = self._look()  # what the engine wrote since is its own affair
        self._writers.append(writer)

    def _leave(self) -> None:
        if self._writers:
            self._compare(self._writers.pop())

    def _look(self) -> list[bytes]:
        """All pages: copies of bytes are what can be made and compared fastest."""
        return [layer.all().tobytes() for _, _, layer in self._places]

    def _compare(self, writer: str) -> None:
        now = self._look()
        if now != self._seen:
            for write in self._writes(now):
                self._judge(write, writer)
        self._seen = now

    def _writes(self, now: list[bytes]) -> Iterator[_Write]:
        for (rank, name, layer), found, before in zip(self._places, now, self._seen, strict=True):
            if found == before:
                continue
            changes = self._by_block(found, layer.shape[0]) ^ self._by_block(before, layer.shape[0])
            for block_id in np.flatnonzero(changes.any(axis=1)).tolist():
                yield _Write(rank, name, block_id, _is_nudge(changes[block_id]))

    def _by_block(self, found: bytes, num_blocks: int) -> Bits:
        """[num_blocks, numbers of a block]."""
        return np.frombuffer(found, self._pages.number_format.bits).reshape(num_blocks, -1)

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
        elif ledger.was_loaded(write.block_id) and write.is_nudge and not self._is_beside(write):
            self._watch.findings.add(
                "plan-reset",
                f"{writer} wrote to {where}, again: its load was complete and had ended.",
            )
        else:
            self._watch.findings.add(
                "loads-write-only-their-blocks",
                f"{writer} wrote to {where}: no load into that block is under way.",
            )

    def _is_beside(self, write: _Write) -> bool:
        """Whether a load that goes on went there in place of a target: its request has the block
        already, and what was to be filled is not."""
        return any(
            write.block_id in load.cached_ids and self._lacks_any(load, write)
            for load in self._ledger.running(write.rank)
        )

    def _lacks_any(self, load: Load, write: _Write) -> bool:
        rank, layer, size = write.rank, write.layer, self._ledger.block_size
        return any(
            self._pages.is_untouched(
                rank, layer, target, slice(begin % size, begin % size + end - begin)
            )
            for target, begin, end in load.parts(size)
        )


class Painter(Detector):
    """Paints blocks that were handed on when no connector may read them any more."""

    hooks = frozenset(("handle_preemptions",))

    def __init__(self, watch: Watch, pages: Pages) -> None:
        self._watch = watch
        self._pages = pages

    def after(self, call: HookCall) -> None:
        """See `Detector`."""
        is_last = call.rank == len(self._pages.layers) - 1
        if is_last:
            self._pages.paint(self._watch.step_id)


def _is_nudge(changes: Bits) -> bool:
    """Most numbers, since the engine may have written to a few of them in between."""
    return bool(2 * np.count_nonzero(changes == 1) > np.count_nonzero(changes))
