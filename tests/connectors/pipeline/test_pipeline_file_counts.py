"""What PipelineConnector counts of a store of files: reads, writes, and what became of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deep_model import deep_model
from pipeline_files_kit import (
    PROMPT,
    a_step,
    counts_of,
    engine_of,
    num_external,
    right,
    scheduler_of,
    stored,
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, ask, forget_on_device

from interlace.connectors.slab_store import slab as slabs
from interlace.connectors.slab_store import writing
from interlace.connectors.slab_store.slab_writer import SlabWriter


async def test_blocks_of_a_load_that_is_late_count_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has long ended when its reads return."""
    folder = tmp_path / "kv"
    await stored(folder)
    counts, may_go_on = counts_of(monkeypatch), threading.Event()
    async with engine_of(folder, read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 5))
        assert counts["blocks_failed_to_load"] == 0, "the load has not ended"
        may_go_on.set()
        while not counts["blocks_failed_to_load"]:
            await a_step(engine)
    assert counts["blocks_failed_to_load"] == 10
    assert counts["blocks_loaded"] == 0


async def test_what_the_disk_did_not_take_is_written_at_its_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been used twice by then, as often as the threshold says."""
    folder = tmp_path / "kv"

    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(writing, "_AGAIN_S", 0.0)
    async with engine_of(folder, store_threshold=2) as engine:
        for number in range(3):
            with monkeypatch.context() as patch:
                if number < 2:
                    patch.setattr(SlabWriter, "add", fail)
                right(deep_model(), PROMPT, await ask(engine, PROMPT, 2))
                await forget_on_device(engine)
                while not scheduler_of(engine).is_idle:
                    await a_step(engine)
    async with engine_of(folder) as engine:
        assert num_external(await ask(engine, PROMPT, 2)) == 10 * BLOCK_SIZE
