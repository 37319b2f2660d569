"""When the first token of a prompt comes whose KV lies on the device, in host memory, in files, or
nowhere.

    cached      on the device: only the new tokens are computed
    memory      in host memory, and comes as the connector chooses
    files       in files, host memory empty; comes as the connector chooses
    registered  in files that a GPU copies from directly, likewise: on a GPU alone
    computed    all tokens are computed

In turns, as a caller sees it. All but one on one engine; "registered" on an engine that was opened
when the files were written and sealed, as after a restart. Files were written before, so they are
in the page cache: `cold.py` is about those that are not. "Tokens from files" says how much was
read: less than the prompt where the connector found computing sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.bench.overlap.arms import Hit, TieredArm, require
from interlace.bench.overlap.rig import Outcome, Setting, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.store.rig import StoreBars, StoreRig
from interlace.bench.workload import Work


class Round(NamedTuple):
    """One of each, with one number of new tokens."""

    cached: Hit
    memory: Hit
    files: Hit
    computed: Hit
    registered: Hit | None = None

    @property
    def computed_by_files(self) -> float:
        """How many times sooner the first token comes from files."""
        return seen_s(self.computed) / seen_s(self.files)

    @property
    def files_by_memory(self) -> float:
        """How many times longer it takes than from host memory."""
        return seen_s(self.files) / seen_s(self.memory)


def seen_s(hit: Hit) -> float:
    """To the first token, as the caller sees it."""
    return hit.sample.first_token_s


async def first_token(store: StoreRig) -> Outcome:
    """Measure each number of new tokens, in turns.

    Raises: `InterlaceError` if the prompt was not found on the device, or not in files. Cancelling
    stops after the request in progress.
    """
    restarted = store.rig.restarted_arm() if store.rig.is_registered else None
    return await measure(await store.rig.hit_arm(), store.rig.setting, store.bars, restarted)


async def measure(
    arm: TieredArm, setting: Setting, bars: StoreBars, restarted: TieredArm | None = None
) -> Outcome:
    """`first_token` on an arm whose connector keeps KV in files, and on one that is to open when
    they are written."""
    sizes = setting.sizes
    prefix = setting.work(sizes.prompt_tokens)
    if restarted is not None:
        await restarted.keep(prefix)
    await arm.keep(prefix)
    rounds: dict[int, list[Round]] = {count: [] for count in sizes.new}
    with setting.progress.task("first token", len(rounds) * (sizes.repeats + 1)) as advance:
        for number in range(sizes.repeats + 1):
            for count, taken in rounds.items():
                one = await _round(arm, setting, prefix, count)
                if restarted is not None:
                    restarted.forget()
                    work = setting.source.behind(prefix, count)
                    one = one._replace(registered=await restarted.run(work))
                if number:  # the first round warms up, and lets the connector learn the rates
                    taken.append(one)
                advance(1)
    rows = [_row(sizes.prompt_tokens, count, taken) for count, taken in rounds.items()]
    checks = [check for count, taken in rounds.items() for check in _checks(bars, count, taken)]
    return tuple(rows), tuple(checks)


async def _round(arm: TieredArm, setting: Setting, prefix: Work, count: int) -> Round:
    source = setting.source
    arm.forget()
    files = await arm.run(source.behind(prefix, count))
    arm.forget()
    await arm.run(source.behind(prefix, count), "bulk")  # into host memory, whatever was chosen
    arm.forget_on_device()
    memory = await arm.run(source.behind(prefix, count))
    cached = await arm.run(source.behind(prefix, count))
    require(cached.sample.cached_tokens, prefix.prompt_tokens, "cached on the device")
    arm.forget_on_device()
    computed = await arm.run(source.behind(prefix, count), "recompute")
    return Round(cached, memory, files, computed)


def _row(prompt_tokens: int, count: int, taken: Sequence[Round]) -> Row:
    figures = {
        f"{name} ms": Spread.of(seen_s(hit) * 1e3 for hit in hits)
        for name, hits in (
            ("cached", [one.cached for one in taken]),
            ("memory", [one.memory for one in taken]),
            ("files", [one.files for one in taken]),
            ("registered", [one.registered for one in taken if one.registered is not None]),
            ("computed", [one.computed for one in taken]),
        )
        if hits
    }
    figures["times sooner"] = Spread.of(one.computed_by_files for one in taken)
    figures["files / memory"] = Spread.of(one.files_by_memory for one in taken)
    if (by_memory := _registered_by_memory(taken)) is not None:
        figures["registered / memory"] = by_memory
        figures["tokens registered"] = Spread.of(
            one.registered.sample.loaded_tokens for one in taken if one.registered is not None
        )
    figures["tokens from memory"] = Spread.of(one.memory.sample.loaded_tokens for one in taken)
    figures["tokens from files"] = Spread.of(one.files.sample.loaded_tokens for one in taken)
    return Row(f"{prompt_tokens} + {count} new", figures)


def _registered_by_memory(taken: Sequence[Round]) -> Spread | None:
    """How many times longer it takes from registered files than from memory."""
    pairs = [(one.registered, one.memory) for one in taken]
    ratios = [seen_s(hit) / seen_s(memory) for hit, memory in pairs if hit is not None]
    return Spread.of(ratios) if ratios else None


def _checks(bars: StoreBars, count: int, taken: Sequence[Round]) -> tuple[Check, ...]:
    sooner = Spread.of(one.computed_by_files for one in taken).median
    registered = _registered_by_memory(taken)
    is_same = count <= BLOCK_SIZE  # of a prompt that was sent before the last block may be left
    return (
        *judged(
            f"computed / files, {count} new",
            sooner,
            at_least=bars.computed_by_files if is_same else None,
        ),
        *(
            ()
            if registered is None
            else judged(
                f"registered / memory, {count} new",
                registered.median,
                at_most=bars.registered_by_memory,
            )
        ),
    )
