"""Sees hooks that wait for what must not hold up a step."""

from __future__ import annotations

from interlace.connectors.conformance.load_ledger import LoadLedger
from interlace.connectors.conformance.pages import Pages
from interlace.connectors.conformance.watch import Detector, Watch
from interlace.connectors.conformance.watched_lanes import WatchedLanes

_STEP_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
)


class HoldUps(Detector):
    """With the lanes' policy "lazy", only what somebody waits for runs within a hook."""

    def __init__(self, watch: Watch, lanes: WatchedLanes, pages: Pages, ledger: LoadLedger) -> None:
        self._watch = watch
        self._lanes = lanes
        self._pages = pages
        self._ledger = ledger
        self._before: dict[int, bytes] = {}

    @property
    def _waits(self) -> bool:
        return self._lanes.policy == "lazy" and bool(self._lanes.waits and self._watch.calls)

    def before_work(self, label: str) -> None:
        """See `Detector`."""
        if not self._waits:
            return
        call = self._watch.calls[-1]
        if not call.is_on_worker and call.hook != "shutdown":
            self._watch.findings.add(
                "loads-do-not-hold-up-steps",
                f"{call.connector}.{call.hook} waited for {label} on the event loop.",
            )
        self._before = self._targets()

    def after_work(self, label: str) -> None:
        """See `Detector`."""
        if not self._waits or self._watch.calls[-1].hook not in _STEP_HOOKS:
            return
        asked = self._lanes.waits[-1]
        if asked != label and "@" not in asked:
            return  # it only stood before what was waited for
        call = self._watch.calls[-1]
        now = self._targets()
        written = [block_id for block_id in now if now[block_id] != self._before.get(block_id)]
        if written:
            self._watch.findings.add(
                "loads-do-not-hold-up-steps",
                f"{call.connector}.{call.hook} waited for {label}, which wrote to block"
                f" {written[0]}: that is loaded asynchronously.",
            )

    def _targets(self) -> dict[int, bytes]:
        """Target blocks of asynchronous loads that go on -> what they hold."""
        blocks = {
            block_id
            for load in self._ledger.loads
            if load.is_async and not load.request.is_finished
            for block_id in load.block_ids
        }
        return {
            block_id: b"".join(
                layer.block(block_id).tobytes()
                for layers in self._pages.layers
                for layer in layers.values()
            )
            for block_id in sorted(blocks)
        }
