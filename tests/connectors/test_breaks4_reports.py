"""What workers report, as one: counts that are not forgotten, not dropped and not taken for others;
events of many workers; and errors that say whose they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from interlace.connectors.conformance import Script, ScriptedConnector
from interlace.connectors.conformance.tiny_model import tiny_model
from interlace.connectors.factory import KVConnectorFactory
from interlace.connectors.multi_ledger import ReportLedger
from interlace.connectors.multi_messages import Hold
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError, EngineDeadError
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.kv_events import BlockRemoved, BlockStored, CountedKVEvents
from interlace.engine.kv_output_aggregator import MAX_OPEN_SENDS, KVOutputAggregator
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, SchedulerOutput
from interlace.front_door import AsyncEngine

STORED = BlockStored([b"a"], None, [], 0, medium="CPU")
REMOVED = BlockRemoved([b"a"], "CPU")


def step(*, loading: set[str] | None = None, finished: set[str] | None = None) -> SchedulerOutput:
    nothing = frozenset[str]()
    return SchedulerOutput(
        1,
        [],
        CachedRequestData(),
        {},
        0,
        frozenset(finished or ()),
        nothing,
        nothing,
        async_loading_req_ids=frozenset(loading or ()),
    )


def sent(*ids: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_sending=set(ids))


# -------------------------------------------------------------------- counting


def test_a_load_whose_request_was_let_go_as_sent_is_forgotten() -> None:
    """Aborted while it loaded, held, and reported as sent by both ranks, once, as the protocol has
    it: either report frees."""
    aggregator = KVOutputAggregator(2)
    for number in range(100):
        name = f"r{number}"
        aggregator.begin_step(step(loading={name}))
        aggregator.begin_step(step(finished={name}))
        assert aggregator.aggregate([sent(name), sent(name)]) == sent(name)
    assert not aggregator._loading


def test_a_slow_rank_loses_no_report_of_a_held_request() -> None:
    """Many held requests: rank 0 is done with all of them before rank 1 says anything."""
    aggregator = KVOutputAggregator(2)
    ids = [f"r{number}" for number in range(MAX_OPEN_SENDS + 100)]
    aggregator.begin_step(step(finished=set(ids)))
    for name in ids:
        aggregator.aggregate([sent(name), None])
    assert aggregator.aggregate([None, sent(*ids)]) == sent(*ids)


def test_a_childs_late_report_does_not_let_the_next_request_of_that_id_go() -> None:
    ledger = ReportLedger()
    ledger.begin_step({"r": 0}, {})
    ledger.receive(0, ["r"])
    assert ledger.take() == (set(), {"r"})
    # It was aborted meanwhile; child 1 asked to hold it, and will say so late.
    ledger.begin_step({}, {"r": Hold(frozenset({1}), 0)})
    ledger.begin_step({}, {"r": Hold(frozenset({1}), None)})  # the next one of that id
    ledger.send(1, ["r"])
    assert ledger.take() == (set(), set()), "that was about the first one"
    ledger.send(1, ["r"])
    assert ledger.take() == ({"r"}, set())


# -------------------------------------------------------------------- events


def test_merged_events_can_be_merged_again() -> None:
    first, second, third, fourth = (CountedKVEvents([STORED]) for _ in range(4))
    merged = first.merge(second).merge(third.merge(fourth))
    assert merged.get_number_of_workers() == 4
    assert merged.aggregate().get_all_events() == [STORED]


def test_an_event_that_one_worker_tells_twice_is_not_common() -> None:
    merged = CountedKVEvents([STORED, STORED]).merge(CountedKVEvents([]))
    assert merged.aggregate().get_all_events() == []


def test_the_last_word_on_a_block_is_kept() -> None:
    """Stored, evicted and stored again in one step: it is there."""
    assert CountedKVEvents([STORED, REMOVED, STORED]).get_all_events()[-1] == STORED


# -------------------------------------------------------------------- whose error it is


class ClosesItsPool(ScriptedConnector):
    """Pins memory when pages are registered, and gives it back at the end."""

    pool: Any

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        raise MemoryError("cannot pin 64 GiB")

    def shutdown(self) -> None:
        self.pool.close()


class ClosesTooMuch(ScriptedConnector):
    """Its scheduler side cannot be closed."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        raise ValueError("no such pool")

    def shutdown(self) -> None:
        if self.role.name == "SCHEDULER":
            raise OSError("cannot close")


def _timed(hook: Any) -> Any:
    def wrapper(self: Any, *args: Any) -> Any:
        return hook(self, *args)

    return wrapper


class Wrapped(ScriptedConnector):
    """A decorator of its own around a hook, as many have for tracing."""

    @_timed
    def wait_for_save(self) -> None:
        raise ValueError("lost")


class Exits(ScriptedConnector):
    """A library in it gives up."""

    def wait_for_save(self) -> None:
        raise SystemExit(3)


class Mumbles(ScriptedConnector):
    """Answers with something else than handshake metadata."""

    def get_handshake_metadata(self) -> Any:
        return {"port": 5}


async def run_one(cls: type[ScriptedConnector]) -> None:
    factory = KVConnectorFactory()
    factory.register_connector("Mine", __name__, cls.__name__)
    config = EngineConfig(
        device="cpu",
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="Mine",
            kv_role="kv_both",
            kv_connector_extra_config={"script": Script()},
        ),
    )
    opened = AsyncEngine.from_loaded(config, tiny_model(0, num_kv_heads=2), connectors=factory)
    async with asyncio.timeout(20), opened as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ClosesItsPool, "ClosesItsPool.register_kv_caches raised MemoryError: cannot pin"),
        (ClosesTooMuch, "ClosesTooMuch.bind_gpu_block_pool raised ValueError: no such pool"),
    ],
)
async def test_a_shutdown_that_raises_does_not_hide_the_cause(
    cls: type[ScriptedConnector], message: str
) -> None:
    with pytest.raises(ConnectorError, match=message):
        await run_one(cls)


async def test_a_decorated_hook_is_named_by_its_own_name() -> None:
    with pytest.raises(EngineDeadError, match=r"Wrapped\.wait_for_save raised ValueError: lost"):
        await run_one(Wrapped)


async def test_handshake_metadata_is_of_its_kind() -> None:
    message = (
        r"Mumbles\.get_handshake_metadata answered \{'port': 5\}, but it must be a"
        " KVConnectorHandshakeMetadata or None"
    )
    with pytest.raises(ConnectorError, match=message):
        await run_one(Mumbles)


async def test_a_hook_that_exits_is_named() -> None:
    with pytest.raises(EngineDeadError, match=r"Exits\.wait_for_save"):
        await run_one(Exits)


# -------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_port": "x"},
        {"kv_port": -1},
        {"kv_buffer_size": "big"},
        {"kv_rank": -5},
        {"kv_parallel_size": 0},
        {"engine_id": None},
        {"kv_ip": 5},
        {"kv_buffer_device": ""},
    ],
    ids=str,
)
def test_a_bad_value_is_refused_where_it_is_given(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        KVTransferConfig(kv_connector="Mine", kv_role="kv_both", **fields)


@pytest.mark.parametrize(
    "name", ["nixlconnector", "NixlPullConnector", "MooncakeStoreConnector", "LMCacheConnector"]
)
def test_a_name_near_one_that_is_not_there_yet_gets_no_wrong_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVConnectorFactory().get_connector_class_by_name(name)
    said = str(caught.value).partition("Known")[0]
    assert not any(wrong in said for wrong in ("Example", "Multi", "Scripted"))
