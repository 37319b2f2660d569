"""Runs parts of `interlace bench overlap` over one loaded model, and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from interlace.bench.bars import bars_for
from interlace.bench.kv_blocks import BLOCK_SIZE, token_bytes
from interlace.bench.overlap.engines import Engines, Room, opener
from interlace.bench.overlap.names import CROWDED, Part
from interlace.bench.overlap.parts import PARTS
from interlace.bench.overlap.rig import Rig, Setting
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.report import Report
from interlace.bench.session import SEED, Prepared
from interlace.bench.workload import WorkSource
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Clock, Progress

Seen = Callable[[Report], None]
"""Gets the report of each part when it is done."""


async def run_overlap(
    prepared: Prepared,
    parts: Sequence[Part],
    sizes: Sizes,
    clock: Clock,
    progress: Progress,
    seen: Seen,
) -> None:
    """Run the parts, one after the other; engines are shared.

    Raises: what the engines raise; `InterlaceError` that names the part if one could not be
    measured. Cancelling stops after what is in progress.
    """
    check_room(prepared, parts, sizes)
    room = Room.of(
        sizes,
        has_crowd=not CROWDED.isdisjoint(parts),
        only_decodes=set(parts) <= {Part.IDLE, Part.LINK},
    )
    bars = bars_for(prepared.gpu, prepared.settings.model, prepared.dtype)
    setting = Setting(
        WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED),
        progress,
        sizes,
        bars.overlapping(sizes.prompt_tokens, sizes.num_decoders),
        token_bytes(prepared.loaded),
    )
    async with AsyncExitStack() as stack:
        engines = Engines(stack, opener(prepared, sizes, room, clock, progress))
        rig = Rig(setting, engines, prepared, clock)
        for part in parts:
            with _named(part):
                rows, checks = await PARTS[part](rig)
            facts = prepared.settings.facts() | {"dtype": prepared.dtype} | sizes.facts()
            seen(Report(f"overlap: {part}", facts, prepared.machine, rows, checks))


def check_room(prepared: Prepared, parts: Sequence[Part], sizes: Sizes) -> None:
    """Raises: `InterlaceError` for work that no request of this model can be."""
    limit = prepared.loaded.max_model_len
    lengths = [sizes.longest]
    if not CROWDED.isdisjoint(parts):
        lengths.append(sizes.decoder_prompt + sizes.decoder_tokens)
    if not {Part.SAVING, Part.IDLE}.isdisjoint(parts):
        lengths.append(sizes.decoder_prompt + sizes.pair_tokens)
    if max(lengths) >= limit:
        raise InterlaceError(
            f"requests of {max(lengths)} tokens do not fit into {limit}, which is the model's limit"
            " or --max-model-len: choose shorter --prompt-tokens or --new, other parts, or another"
            " model."
        )
    if sizes.prompt_tokens % BLOCK_SIZE:
        raise InterlaceError(
            f"{sizes.prompt_tokens} tokens are no whole number of blocks of {BLOCK_SIZE}, and only"
            " whole blocks are stored: choose such --prompt-tokens."
        )


@contextmanager
def _named(part: Part) -> Iterator[None]:
    try:
        yield
    except InterlaceError as error:
        if type(error) is not InterlaceError:  # it says itself what it is about
            raise
        raise InterlaceError(f"{part}: {error}") from error


def merged(reports: Sequence[Report]) -> Report:
    """All parts as one, at least one; each row and check says of which part it is."""
    replace, first = dataclasses.replace, reports[0]
    names = [report.benchmark.removeprefix("overlap: ") for report in reports]
    named = list(zip(names, reports, strict=True))
    return replace(
        first,
        benchmark="overlap",
        rows=tuple(replace(r, case=f"{name}: {r.case}") for name, one in named for r in one.rows),
        checks=tuple(
            replace(c, name=f"{name}: {c.name}") for name, one in named for c in one.checks
        ),
    )
