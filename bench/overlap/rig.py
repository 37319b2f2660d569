"""What the parts of `interlace bench overlap` are run with."""

from __future__ import annotations

import dataclasses

from interlace.bench.apparatus import Outcome
from interlace.bench.bars import NO_OVERLAP_BARS, OverlapBars
from interlace.bench.overlap.arms import FileStore, MeteredArm, RestartedArm, WritingArm
from interlace.bench.overlap.engines import Engines, Kind
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.paired import CachingArm
from interlace.bench.report import Check
from interlace.bench.session import Prepared
from interlace.bench.workload import Work, WorkSource
from interlace.connectors.pipeline.options import StoreKind
from interlace.engine.ports import Clock, Progress

__all__ = ["Outcome", "Rig", "Setting", "judged"]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What feeds, shows and judges a part. Knows no engine."""

    source: WorkSource
    progress: Progress
    sizes: Sizes
    bars: OverlapBars = NO_OVERLAP_BARS
    token_bytes: int = 0
    """KV of one token."""
    store: StoreKind = "memory"
    """What prefixes are loaded from."""

    def work(self, prompt_tokens: int) -> Work:
        """One new prompt, of which one token is asked for."""
        return self.source.make(1, prompt_tokens, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Rig:
    """A setting, and what is measured in it."""

    setting: Setting
    engines: Engines
    prepared: Prepared
    clock: Clock

    async def hit_arm(self) -> MeteredArm:
        """The engine that loads and saves, for one request at a time."""
        opened = await self.engines.get(Kind.PIPELINE)
        files = None if self.setting.store == "memory" else FileStore(opened.arm, opened.meter)
        return MeteredArm(opened.arm, opened.meter, self.prepared.device, files)

    def restarted_arm(self) -> RestartedArm:
        """An engine that is opened when files have been written, and loads from those. It ends with
        the others."""

        async def written(prefix: Work) -> None:
            async with self.engines.fresh(Kind.PIPELINE) as opened:
                files = FileStore(opened.arm, opened.meter)
                arm = MeteredArm(opened.arm, opened.meter, self.prepared.device, files)
                await arm.keep(prefix)

        async def restarted() -> MeteredArm:
            opened = await self.engines.get(Kind.RESTARTED)
            files = FileStore(opened.arm, opened.meter)
            return MeteredArm(opened.arm, opened.meter, self.prepared.device, files)

        return RestartedArm(written, restarted)

    @property
    def is_registered(self) -> bool:
        """Whether files are copied from directly, if they are sealed when an engine opens."""
        return self.setting.store == "file" and self.prepared.settings.device == "cuda"

    async def writing_arm(self) -> WritingArm:
        """The same, where it stores what it computes in files, and knows nothing of it."""
        opened = await self.engines.get(Kind.PIPELINE)
        return WritingArm(opened.arm, FileStore(opened.arm, opened.meter))

    async def plain_arm(self) -> CachingArm:
        """The engine that loads, and saves nothing."""
        return (await self.engines.get(Kind.CONSUMER)).arm


def judged(
    name: str, value: float, *, at_least: float | None = None, at_most: float | None = None
) -> tuple[Check, ...]:
    """A check, or none where there is no bar."""
    if at_least is None and at_most is None:
        return ()
    return (Check(name, value, at_least=at_least, at_most=at_most),)
