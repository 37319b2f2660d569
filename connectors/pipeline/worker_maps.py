"""Slabs that the device copies from directly: they are mapped, and registered with it.

What was used last is registered when the engine opens, as long as it lies in the page cache and
fits `registered_bytes`. Later a thread looks once a second what should come and what should go; the
device thread does that between two steps, since registering holds up whoever launches.

A slab that is to go is *closing* first: the worker side says so, the scheduler side orders no more
loads from it and says that, and when none is under way any more it is unregistered. One whose file
others have removed keeps its room on the disk until then; so where no step comes by for a second
the thread lets go of it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from interlace.connectors.pipeline.messages import Load, MappedRecords, PipelineMetadata
from interlace.connectors.slab_store.mapping import MappedSlab, Outlook, Scout
from interlace.layers.cuda_host_memory import HostMemory
from interlace.layers.record_space import RecordSpace

logger = logging.getLogger(__name__)

LOOK_S = 1.0
_QUIET_S = 1.0
"""Without a visit of the device thread for so long nobody computes."""
_BUSY_PAUSE_S = 10.0
"""Between two slabs that are registered, or unregistered, while requests compute: they wait for 10
to 15 ms for 256 MiB (an NVIDIA H200)."""
_OPENING_S = 5.0


@dataclasses.dataclass(slots=True)
class _Held:
    """A registered slab."""

    slab: MappedSlab
    first: int
    """The number of its first record."""
    is_closing: bool = False
    is_told: bool = False
    """Whether the scheduler side orders no more loads from it."""
    loads: set[int] = dataclasses.field(default_factory=set)
    """Under way."""


class RegisteredSlabs:
    """See the module's docstring. Device thread, but for what says otherwise."""

    def __init__(
        self,
        space: RecordSpace,
        scout: Scout,
        memory: HostMemory,
        *,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers nothing yet, and never more than `most_bytes`. `clock`: seconds."""
        self._most_bytes = most_bytes
        self._space = space
        self._scout = scout
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._fresh: list[MappedSlab] = []
        self._registering: str | None = None
        """On its way from the fresh ones to those that are held."""
        self._going: frozenset[str] = frozenset()
        """Of those that are held, what is to be closed."""
        self._refused: set[str] = set()
        self._visited_s = self._changed_s = clock()
        self._news: list[MappedRecords] = []
        self._closing: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- at the beginning and the end

    def open_recent(self) -> None:
        """Register what was used last, for some seconds at most, before the first step."""
        until_s = self._clock() + _OPENING_S
        self.look()
        while self._clock() < until_s and (slab := self._next_fresh()) is not None:
            self._register(slab)

    def _start(self) -> None:
        """Look once a second from now on, on a thread of its own: not before the first step, since
        nothing may be unregistered while graphs are captured."""
        self._thread = threading.Thread(target=self._look_on, name="interlace-maps", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Let go of all, when the lanes have ended; False if a look takes longer than `timeout_s`:
        then what it has mapped goes with the process. May be repeated."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)
        with self._lock:
            held = list(self._held.values())
            for one in held:
                self._take_out(one)
        for one in held:
            self._let_go(one)
        self._drop_fresh()
        return thread is None or not thread.is_alive()

    # ---------------------------------------------------------------- loads

    @property
    def num_bytes(self) -> int:
        """Registered now. Any thread."""
        with self._lock:
            return self._num_held_bytes

    def begin_step(self, metadata: PipelineMetadata) -> None:
        """What is loaded from here stays until `end_load`; of what was closing nothing more is."""
        if self._thread is None and not self._end.is_set():
            self._start()
        for load in metadata.loads:
            if load.checksums:
                self._begin_load(load)
        if metadata.closed:
            with self._lock:
                for name in metadata.closed & self._held.keys():
                    self._held[name].is_told = True

    def _begin_load(self, load: Load) -> None:
        with self._lock:
            for one in self._held.values():
                numbers = range(one.first, one.first + len(one.slab.rows))
                if any(run.record in numbers for run in load.runs):
                    one.loads.add(load.load_id)

    def end_load(self, load_id: int) -> None:
        """It reads no record any more."""
        with self._lock:
            for one in self._held.values():
                one.loads.discard(load_id)

    # ---------------------------------------------------------------- between two steps

    def visit(self, *, is_computing: bool) -> None:
        """Register a slab that should be, or let go of one. Rarely while requests compute. On a GPU
        whose device is idle it takes some milliseconds."""
        now_s = self._clock()
        self._visited_s = now_s
        with self._lock:
            self._begin_closing()
            gone = [one for one in self._held.values() if one.is_told and not one.loads]
        if is_computing and now_s - self._changed_s < _BUSY_PAUSE_S:
            return
        if gone:
            self._changed_s = now_s
            self._remove(gone[0])
        elif (slab := self._next_fresh()) is not None:
            self._changed_s = now_s
            self._register(slab)

    def _next_fresh(self) -> MappedSlab | None:
        """What is to be registered next, if there is room for it."""
        with self._lock:
            if self._fresh and self._num_held_bytes + self._fresh[0].num_bytes <= self._most_bytes:
                slab = self._fresh.pop(0)
                self._registering = slab.name
                return slab
        return None

    @property
    def _num_held_bytes(self) -> int:
        """Under the lock."""
        return sum(one.slab.num_bytes for one in self._held.values())

    def _begin_closing(self) -> None:
        """Under the lock."""
        for name in self._going:
            one = self._held.get(name)
            if one is not None and not one.is_closing:
                one.is_closing = True
                self._closing.add(name)
        self._going = frozenset()

    def take_news(self) -> tuple[tuple[MappedRecords, ...], frozenset[str]]:
        """(what was registered, what is closing) since the last call: for the scheduler side."""
        news, self._news = self._news, []
        with self._lock:
            closing, self._closing = self._closing, set()
        return tuple(news), frozenset(closing)

    @property
    def has_news(self) -> bool:
        """Whether there is something for `take_news`."""
        return bool(self._news or self._closing)

    # ---------------------------------------------------------------- the thread's

    def look(self) -> None:
        """See what should be registered. On the thread, or before it was started."""
        with self._lock:
            known = self._known
        try:
            outlook = self._scout.look(known)
        except OSError as error:
            logger.warning("slabs cannot be looked at, so none is registered: %s", error)
            return
        self._note(outlook)
        if self._clock() - self._visited_s >= _QUIET_S:
            self._let_go_of_removed()

    @property
    def _known(self) -> set[str]:
        """What need not be mapped. Under the lock."""
        known = {*self._held, *self._refused, *(slab.name for slab in self._fresh)}
        return known if self._registering is None else known | {self._registering}

    def _note(self, outlook: Outlook) -> None:
        with self._lock:
            known = self._known  # by now: one may have been registered during the look
            again = [slab for slab in outlook.fresh if slab.name in known]
            unwanted = [
                slab for slab in self._fresh if slab.is_removed or slab.name in outlook.stale
            ]
            self._fresh = [slab for slab in self._fresh if slab not in unwanted]
            self._fresh += [slab for slab in outlook.fresh if slab.name not in known]
            removed = {name for name, one in self._held.items() if one.slab.is_removed}
            self._going = frozenset(removed | outlook.stale if self._fresh else removed)
        for slab in (*again, *unwanted):
            slab.close()

    def _let_go_of_removed(self) -> None:
        """Nobody comes by. Who promised something of these finds it gone, as with files."""
        with self._lock:
            removed = [one for one in self._held.values() if one.slab.is_removed and not one.loads]
            self._closing.update(one.slab.name for one in removed)
            # The scheduler side does not know yet: another one by such a name would be taken for
            # closed.
            self._refused.update(one.slab.name for one in removed)
            for one in removed:
                self._take_out(one)
        for one in removed:
            self._let_go(one)

    def _look_on(self) -> None:
        while not self._end.wait(LOOK_S):
            self.look()

    # ---------------------------------------------------------------- parts

    def _register(self, slab: MappedSlab) -> None:
        """The one that `_next_fresh` gave."""
        code = self._memory.register(slab.address, slab.num_bytes, read_only=True)
        if code != 0:
            logger.warning(
                "CUDA did not register %s (error %d): what lies there is read in place of that",
                slab.name,
                code,
            )
            with self._lock:
                self._registering = None
                self._refused.add(slab.name)
            slab.close()
            return
        rows = slab.rows.reshape(len(slab.rows), *self._space.host.shape[1:])
        with self._lock:
            first = self._space.map(rows)  # here, since the thread may unmap others
            self._registering = None
            self._held[slab.name] = _Held(slab, first)
        self._news.append(MappedRecords(slab.name, first, len(slab.rows)))

    def _remove(self, one: _Held) -> None:
        """Unless the thread has, meanwhile."""
        with self._lock:
            if self._held.get(one.slab.name) is not one:
                return
            self._take_out(one)
        self._let_go(one)

    def _take_out(self, one: _Held) -> None:
        """Nothing finds it any more. Under the lock."""
        del self._held[one.slab.name]
        self._space.unmap(one.first)

    def _let_go(self, one: _Held) -> None:
        code = self._memory.unregister(one.slab.address)
        if code != 0:
            logger.warning("CUDA did not unregister %s: error %d", one.slab.name, code)
        one.slab.close()

    def _drop_fresh(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        for slab in fresh:
            slab.close()


class NothingRegistered:
    """In place of `RegisteredSlabs`, where nothing can be registered, or should be."""

    has_news = False

    def open_recent(self) -> None:
        """Nothing."""

    def begin_step(self, metadata: PipelineMetadata) -> None:
        """Nothing."""

    def end_load(self, load_id: int) -> None:
        """Nothing."""

    def visit(self, *, is_computing: bool) -> None:
        """Nothing."""

    def take_news(self) -> tuple[tuple[MappedRecords, ...], frozenset[str]]:
        """Never any."""
        return (), frozenset()

    def close(self, timeout_s: float) -> bool:
        """At once."""
        return True


NOTHING_REGISTERED = NothingRegistered()
