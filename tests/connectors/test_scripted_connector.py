"""The scripted connector, driven by hand as an engine would: right KV unless the script says no."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from interlace.connectors import KVConnectorFactory
from interlace.connectors.conformance import Answer, Async, Rule, Script, ScriptedConnector, Sync
from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.layers.forward_context import ForwardContext

BLOCK = 4
NUM_BLOCKS = 20
LAYERS = ("layer0", "layer1")
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def request_of(tokens: Sequence[int], request_id: str = "r") -> Request:
    params = SamplingParams()
    return Request(request_id, tokens, params, seed=0, arrival=0, block_size=BLOCK)


def right_kv(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """What a layer's KV of these tokens is, one number each."""
    return torch.tensor(tokens, dtype=torch.float32) + layer / 2


def no_metadata() -> Any:
    """Of attention: the connector does not look at it."""
    return None


@dataclasses.dataclass
class Row:
    """One request's share of a step."""

    request: Request
    blocks: list[int]
    """All that it holds."""
    start: int
    num_tokens: int
    resumed: bool = False


class Engine:
    """Both sides of a connector, pages of two layers, and the seam between them."""

    def __init__(
        self, script: Script, role: KVRole = "kv_both", dtype: Any = torch.float32
    ) -> None:
        config = EngineConfig(
            block_size=BLOCK,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ScriptedConnector",
                kv_role=role,
                kv_connector_extra_config={"script": script},
            ),
        )
        self.script = script
        factory, cache = KVConnectorFactory(), KVCacheConfig(NUM_BLOCKS, ())
        scheduler = factory.create_connector(config, SCHEDULER, cache)
        worker = factory.create_connector(config, WORKER, cache)
        assert isinstance(scheduler, ScriptedConnector)
        assert isinstance(worker, ScriptedConnector)
        self.scheduler, self.worker = scheduler, worker
        self.pages: dict[str, Any] = {}
        for name in LAYERS:
            if dtype is np.int64:
                self.pages[name] = np.full((NUM_BLOCKS, BLOCK), -7)
            else:
                self.pages[name] = torch.full((NUM_BLOCKS, 2, BLOCK, 1, 1), -7, dtype=dtype)
        self.worker.register_kv_caches(self.pages)
        self.tables: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.step_id = 0

    def match(self, request: Request, num_computed: int = 0) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed)

    def allocate(self, request: Request, blocks: list[int], num_external: int) -> None:
        held = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in blocks],))
        self.scheduler.update_state_after_alloc(request, held, num_external)

    def end(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.ended.add(request.request_id)
        blocks = self.tables.pop(request.request_id, [])
        return self.scheduler.request_finished(request, blocks)

    def plan(self, *rows: Row) -> SchedulerOutput:
        self.step_id += 1
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        for row in rows:
            req_id, known = row.request.request_id, self.tables.get(row.request.request_id)
            if known is None:
                prompt, params = row.request.prompt_token_ids, row.request.sampling_params
                new.append(NewRequestData(req_id, prompt, params, 0, (row.blocks,), row.start))
            else:
                cached.req_ids.append(req_id)
                added = row.blocks if row.resumed else row.blocks[len(known) :]
                cached.new_block_ids.append((added,) if added else None)
                cached.num_computed_tokens.append(row.start)
                if row.resumed:
                    cached.resumed_req_ids.add(req_id)
            self.tables[req_id] = list(row.blocks)
        output = SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={row.request.request_id: row.num_tokens for row in rows},
            total_num_scheduled_tokens=sum(row.num_tokens for row in rows),
            finished_req_ids=frozenset(self.ended),
            preempted_req_ids=frozenset(),
            sampling_req_ids=frozenset(),
        )
        self.ended = set()
        metadata = self.scheduler.build_connector_meta(output)
        return dataclasses.replace(output, kv_connector_metadata=metadata)

    def execute(self, output: SchedulerOutput, *rows: Row) -> KVConnectorOutput:
        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(ForwardContext({}, no_metadata if rows else None))
        for layer, name in enumerate(LAYERS if rows else ()):
            worker.wait_for_layer_load(name)
            for row in rows:
                self._compute(row, layer, name)
            worker.save_kv_layer(name, self.pages[name], None)
        if rows:
            worker.wait_for_save()
        sent, received = worker.get_finished(set(output.finished_req_ids))
        invalid = worker.get_block_ids_with_load_errors()
        meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return KVConnectorOutput(
            sent, received, invalid_block_ids=invalid, kv_connector_worker_meta=meta
        )

    def _compute(self, row: Row, layer: int, name: str) -> None:
        tokens = row.request.all_token_ids
        for position in range(row.start, min(row.start + row.num_tokens, len(tokens))):
            block, offset = divmod(position, BLOCK)
            value = right_kv(tokens[position : position + 1], layer).item()
            if isinstance(self.pages[name], torch.Tensor):
                self.pages[name][row.blocks[block], :, offset] = value
            else:
                self.pages[name][row.blocks[block], offset] = value

    def step(self, *rows: Row) -> KVConnectorOutput:
        """Plan, execute and apply one step."""
        output = self.execute(self.plan(*rows), *rows)
        if not output.is_empty():
            self.scheduler.update_connector_output(output)
        return output

    def kv(self, layer: int, block: int) -> list[float]:
        """One layer's numbers in a block."""
        page = self.pages[LAYERS[layer]][block]
        return [float(value) for value in (page[0] if page.ndim > 1 else page).reshape(-1)]

    def holds(self, request: Request, blocks: list[int], positions: Sequence[int]) -> bool:
        """Whether these of the request's blocks are right in every layer."""
        return all(
            self.kv(layer, blocks[i])
            == right_kv(request.all_token_ids[i * BLOCK : (i + 1) * BLOCK], layer).tolist()
            for layer in range(len(LAYERS))
            for i in positions
        )

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self.worker.is_idle


def saved(script: Script, tokens: Sequence[int], dtype: Any = torch.float32) -> None:
    """Fill the script's store with these tokens' full blocks, by an engine that computes them."""
    writing = Script(store=script.store)
    engine, request = Engine(writing, "kv_producer", dtype), request_of(tokens, "writer")
    blocks = list(range(1, 1 - (-len(tokens) // BLOCK)))
    engine.match(request)
    engine.allocate(request, blocks, 0)
    engine.step(Row(request, blocks, 0, len(tokens)))
    engine.end(request)
    engine.step()
    assert engine.is_idle


PROMPT = list(range(10, 24))  # three full blocks and a half
TABLE = [11, 12, 13, 14]


def load(engine: Engine, request: Request, blocks: list[int], computed: int = 0) -> int:
    """Ask, allocate, and return how much is to be loaded."""
    amount, _ = engine.match(request, computed)
    assert amount is not None
    engine.allocate(request, blocks, amount)
    return amount


# -------------------------------------------------------------------- saving


def test_full_blocks_are_stored_when_their_step_was_applied() -> None:
    engine, request = Engine(Script()), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    row = Row(request, TABLE, 0, len(PROMPT))
    output = engine.execute(engine.plan(row), row)
    assert not engine.script.store
    engine.scheduler.update_connector_output(output)
    assert list(engine.script.store) == request.block_hashes[:3]
    pages = engine.script.store[request.block_hashes[1]]
    assert [page.reshape(-1).tolist()[:BLOCK] for page in pages] == [
        right_kv(PROMPT[4:8], layer).tolist() for layer in (0, 1)
    ]


def test_chunks_and_answers_are_stored_as_their_blocks_fill() -> None:
    engine, request = Engine(Script()), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    engine.step(Row(request, TABLE[:2], 0, 6))
    assert len(engine.script.store) == 1
    engine.step(Row(request, TABLE, 6, 8))
    assert len(engine.script.store) == 3
    for token in (50, 51):
        request.append_output(token)
        engine.step(Row(request, TABLE, request.num_tokens - 1, 1))
    assert list(engine.script.store) == request.block_hashes
    assert len(request.block_hashes) == 4
    engine.end(request)
    engine.step()
    assert engine.is_idle


def test_with_a_second_step_in_flight_a_block_is_copied_once_and_when_its_hash_is_known() -> None:
    engine, request = Engine(Script()), request_of(PROMPT[:11])
    engine.allocate(request, TABLE, 0)
    rows = (
        Row(request, TABLE[:3], 0, 11),
        Row(request, TABLE[:3], 11, 1),
        Row(request, TABLE, 12, 1),
    )
    plans = [engine.plan(rows[0]), engine.plan(rows[1])]  # token 11 is not known yet
    assert [len(plan.kv_connector_metadata.saves) for plan in plans] == [2, 0]
    engine.scheduler.update_connector_output(engine.execute(plans[0], rows[0]))
    request.append_output(21)
    plans.append(engine.plan(rows[2]))
    assert plans[2].kv_connector_metadata.saves == {request.block_hashes[2]: TABLE[2]}
    for plan, row in zip(plans[1:], rows[1:], strict=True):
        engine.scheduler.update_connector_output(engine.execute(plan, row))
    assert list(engine.script.store) == request.block_hashes


def test_a_resumed_request_is_saved_from_its_new_blocks() -> None:
    engine, request = Engine(Script()), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    engine.step(Row(request, TABLE[:1], 0, 3))
    assert not engine.script.store
    engine.pages["layer0"][TABLE] = -9
    other = [5, 6, 7, 8]
    engine.allocate(request, other, 0)
    engine.step(Row(request, other, 0, len(PROMPT), resumed=True))
    assert len(engine.script.store) == 3
    assert engine.script.store[request.block_hashes[0]][0].reshape(-1)[0] == PROMPT[0]


@pytest.mark.parametrize(
    ("rule", "role"), [(Rule(save=False), "kv_both"), (Rule(), "kv_consumer")], ids=["off", "role"]
)
def test_saving_can_be_off(rule: Rule, role: KVRole) -> None:
    engine, request = Engine(Script(default=rule), role), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    assert engine.step(Row(request, TABLE, 0, len(PROMPT))).is_empty()
    assert not engine.script.store


def test_what_stands_on_a_bad_block_is_not_stored() -> None:
    script = Script()
    saved(script, PROMPT[:8])
    script.rules["r"] = Rule(fail=frozenset({1}))
    engine, request = Engine(script), request_of(PROMPT)
    assert load(engine, request, TABLE) == 8
    # A sharer holds an own, good copy of block 1 and shares block 2 all the same.
    sharer = request_of([*PROMPT[:12], *range(70, 75)], "sharer")
    shared = [TABLE[0], 9, TABLE[2], 10, 15]
    engine.allocate(sharer, shared, 0)
    rows = Row(request, TABLE, 8, 6), Row(sharer, shared, 12, 5)
    assert engine.step(*rows).invalid_block_ids == {TABLE[1]}
    assert set(script.store) == set(request.block_hashes[:2])
    engine.step(Row(request, TABLE, 4, 10))
    assert set(script.store) == set(request.block_hashes[:3])


def test_a_step_in_flight_when_a_bad_block_is_reported_stores_nothing_on_it() -> None:
    script = Script()
    saved(script, PROMPT[:4])
    script.default = Rule(fail=frozenset({0}))
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    first, second = Row(request, TABLE, 4, 4), Row(request, TABLE, 8, 4)
    plans = engine.plan(first), engine.plan(second)
    outputs = engine.execute(plans[0], first), engine.execute(plans[1], second)
    for output in outputs:
        engine.scheduler.update_connector_output(output)
    assert list(script.store) == request.block_hashes[:1]


# -------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, np.int64], ids=str)
def test_a_synchronous_load_fills_layer_by_layer(dtype: Any) -> None:
    script = Script()
    saved(script, PROMPT, dtype)
    engine, request = Engine(script, dtype=dtype), request_of(PROMPT)
    assert engine.match(request) == (12, False)
    engine.allocate(request, TABLE, 12)
    row = Row(request, TABLE, 12, 2)
    plan = engine.plan(row)
    engine.worker.bind_connector_metadata(plan.kv_connector_metadata)
    engine.worker.start_load_kv(ForwardContext({}, no_metadata))
    assert engine.kv(0, TABLE[0]) == [-7] * BLOCK
    engine.worker.wait_for_layer_load("layer0")
    assert engine.kv(0, TABLE[0]) == PROMPT[:4]
    assert engine.kv(1, TABLE[0]) == [-7] * BLOCK
    engine.worker.wait_for_layer_load("layer1")
    if dtype is not np.int64:
        assert engine.holds(request, TABLE, range(3))
    assert engine.worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize("num_told", [12, 11])
def test_all_of_a_prompt_may_be_loaded(num_told: int) -> None:
    """The engine may leave the last token out when it tells the connector."""
    script = Script()
    saved(script, PROMPT[:12])
    engine, request = Engine(script), request_of(PROMPT[:12])
    assert engine.match(request) == (12, False)
    engine.allocate(request, TABLE[:3], num_told)
    assert engine.step(Row(request, TABLE[:3], 11, 1)).invalid_block_ids == set()
    assert engine.holds(request, TABLE, range(3))


def test_a_load_begins_after_what_is_computed() -> None:
    script = Script()
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    assert load(engine, request, TABLE, computed=4) == 8
    engine.step(Row(request, TABLE, 12, 2))
    assert engine.kv(0, TABLE[0]) == [-7] * BLOCK
    assert engine.holds(request, TABLE, (1, 2))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_asynchronous_load_is_done_when_it_is_reported(delay: int) -> None:
    script = Script(default=Rule(answers=(Async(),), load_delay=delay))
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    assert engine.match(request) == (12, True)
    engine.allocate(request, TABLE, 12)
    for _ in range(delay):
        assert engine.step().is_empty()
        assert engine.kv(0, TABLE[0]) == [-7] * BLOCK
    assert not engine.scheduler.is_idle
    assert engine.step().finished_recving == {"r"}
    assert engine.holds(request, TABLE, range(3))
    engine.allocate(request, TABLE, 0)
    assert engine.step(Row(request, TABLE, 12, 2)).is_empty()
    engine.end(request)
    engine.step()
    assert engine.is_idle
    assert "wait_for_save" in script.hooks(WORKER)


def test_a_load_may_never_be_reported() -> None:
    script = Script(default=Rule(answers=(Async(8),), load_delay=None))
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    assert all(engine.step().is_empty() for _ in range(20))


@pytest.mark.parametrize("answer", [Sync(), Async()], ids=["sync", "async"])
@pytest.mark.parametrize("paint", [math.nan, 77.0])
def test_scripted_blocks_fail(answer: Answer, paint: float) -> None:
    script = Script(default=Rule(answers=(answer,), fail=frozenset({1})), paint=paint)
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    rows = [Row(request, TABLE, 12, 2)] if answer == Sync() else []
    output = engine.step(*rows)
    assert output.invalid_block_ids == {TABLE[1]}
    assert output.finished_recving == (None if rows else {"r"})
    assert engine.holds(request, TABLE, (0, 2))
    assert str(engine.kv(1, TABLE[1])) == str([paint] * BLOCK)
    assert engine.step().is_empty()


def test_paint_fits_pages_of_whole_numbers() -> None:
    script = Script(default=Rule(answers=(Sync(4),)))
    engine, request = Engine(script, dtype=torch.int32), request_of(PROMPT)
    load(engine, request, TABLE)
    engine.step(Row(request, TABLE, 12, 2))
    assert engine.kv(0, TABLE[0]) == [-1] * BLOCK


def test_what_is_promised_and_not_there_fails() -> None:
    script = Script(default=Rule(answers=(Sync(10),)))
    saved(script, PROMPT[:4])
    engine, request = Engine(script), request_of(PROMPT)
    assert load(engine, request, TABLE) == 10
    assert engine.step(Row(request, TABLE, 10, 4)).invalid_block_ids == set(TABLE[1:3])


def test_only_the_first_loads_may_fail() -> None:
    script = Script(default=Rule(fail=frozenset({0}), num_failing_loads=1))
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    reported = []
    for _ in range(2):
        load(engine, request, TABLE)
        reported.append(engine.step(Row(request, TABLE, 12, 2)).invalid_block_ids)
    assert reported == [{TABLE[0]}, set()]


def test_bad_blocks_may_be_reported_in_pieces_before_the_end() -> None:
    rule = Rule(answers=(Async(),), fail=frozenset({0, 1, 2}), load_delay=2, report_early=True)
    script = Script(default=rule)
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    outputs = [engine.step() for _ in range(4)]
    assert [o.invalid_block_ids for o in outputs] == [{11}, {12}, {13}, set()]
    assert [o.finished_recving for o in outputs] == [None, None, {"r"}, None]


def test_reports_may_be_repeated() -> None:
    rule = Rule(answers=(Async(),), fail=frozenset({0}), repeat_recving=2, repeat_invalid=1)
    script = Script(default=rule)
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    outputs = [engine.step() for _ in range(4)]
    assert [o.finished_recving for o in outputs] == [{"r"}, {"r"}, {"r"}, None]
    assert [o.invalid_block_ids for o in outputs] == [{11}, {11}, set(), set()]


def test_a_repeated_report_does_not_end_the_next_load() -> None:
    rule = Rule(answers=(Async(),), load_delay=1, repeat_recving=5)
    script = Script(default=rule)
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    assert [engine.step().finished_recving for _ in range(3)] == [None, {"r"}, {"r"}]
    load(engine, request, TABLE)
    assert [engine.step().finished_recving for _ in range(3)] == [None, {"r"}, {"r"}]


# -------------------------------------------------------------------- answers


def test_answers_come_in_order_and_the_last_one_stays() -> None:
    violation = (-1, False)
    script = Script(default=Rule(answers=(None, Sync(4), Async(8), (0, True), violation)))
    engine, request = Engine(script), request_of(PROMPT)
    assert [engine.match(request) for _ in range(6)] == [
        (None, False),
        (4, False),
        (8, True),
        (0, True),
        violation,
        violation,
    ]


@pytest.mark.parametrize(
    ("answer", "computed", "told"),
    [
        (Sync(), 0, (8, False)),
        (Sync(), 4, (4, False)),
        (Sync(), 5, (3, False)),
        (Sync(), 8, (0, False)),
        (Async(), 8, (0, False)),
        (Sync(50), 4, (10, False)),
        (Async(50), 14, (0, False)),
        ((99, True), 0, (99, True)),
    ],
)
def test_amounts(answer: Answer, computed: int, told: tuple[int, bool]) -> None:
    script = Script(rules={"r": Rule(answers=(answer,))})
    saved(script, PROMPT[:8])
    assert Engine(script).match(request_of(PROMPT), computed) == told


def test_a_producer_loads_nothing() -> None:
    script = Script(default=Rule(answers=(Sync(8),)))
    assert Engine(script, "kv_producer").match(request_of(PROMPT)) == (0, False)


def test_a_rule_has_an_answer() -> None:
    with pytest.raises(ConfigError, match="at least one answer"):
        Rule(answers=())
    with pytest.raises(ConfigError, match="at least one answer"):
        Rule(compute_ends=())


# -------------------------------------------------------------------- ends


@pytest.mark.parametrize("delay", [0, 2])
def test_a_held_request_is_reported_once_sent(delay: int) -> None:
    script = Script(default=Rule(hold=True, send_delay=delay, repeat_sending=1))
    engine, request = Engine(script), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    engine.step(Row(request, TABLE, 0, 14))
    assert engine.end(request) == (True, None)
    sent = [engine.step().finished_sending for _ in range(delay + 3)]
    assert sent == [None] * delay + [{"r"}, {"r"}, None]
    assert engine.is_idle


def test_a_held_request_is_not_reported_as_received() -> None:
    rule = Rule(answers=(Async(),), hold=True, send_delay=1, repeat_recving=5)
    script = Script(default=rule)
    saved(script, PROMPT)
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    assert engine.step().finished_recving == {"r"}
    assert engine.step(Row(request, TABLE, 12, 2)).finished_recving == {"r"}
    assert engine.end(request)[0]
    outputs = [engine.step() for _ in range(3)]
    assert [o.finished_recving for o in outputs] == [None] * 3
    assert [o.finished_sending for o in outputs] == [None, {"r"}, None]


def test_a_held_request_may_never_be_reported() -> None:
    script = Script(default=Rule(hold=True, send_delay=None))
    engine, request = Engine(script), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    engine.step(Row(request, TABLE, 0, 14))
    assert engine.end(request)[0]
    assert all(engine.step().finished_sending is None for _ in range(5))


def test_an_aborted_load_is_reported_as_received_and_not_as_sent() -> None:
    script = Script(default=Rule(answers=(Async(8),), hold=True, load_delay=2))
    engine, request = Engine(script), request_of(PROMPT)
    load(engine, request, TABLE)
    engine.step()
    engine.tables["r"] = TABLE
    assert engine.end(request) == (False, None)
    outputs = [engine.step() for _ in range(3)]
    assert [o.finished_recving for o in outputs] == [None, {"r"}, None]
    assert [o.finished_sending for o in outputs] == [None] * 3
    assert engine.is_idle


def test_a_request_without_blocks_is_not_held_and_may_have_parameters() -> None:
    script = Script(default=Rule(hold=True, response_params={"where": 3}))
    assert Engine(script).end(request_of(PROMPT)) == (False, {"where": 3})


# -------------------------------------------------------------------- the log


def test_every_call_is_logged_in_order() -> None:
    engine, request = Engine(Script()), request_of(PROMPT)
    load(engine, request, TABLE)
    engine.step(Row(request, TABLE, 0, 14))
    engine.scheduler.take_events()
    engine.worker.shutdown()
    layer = ["wait_for_layer_load", "save_kv_layer"]
    assert engine.script.hooks() == [
        "register_kv_caches",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        *layer,
        *layer,
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "update_connector_output",
        "take_events",
        "shutdown",
    ]
    assert engine.script.hooks(SCHEDULER)[0] == "get_num_new_matched_tokens"
    assert engine.script.count("save_kv_layer") == 2
    assert engine.script.calls[1].summary == "r computed=0 -> (0, False)"


def test_the_log_is_bounded() -> None:
    engine = Engine(Script(max_calls=3))
    engine.step()
    assert engine.script.hooks(SCHEDULER) == []
    assert len(engine.script.calls) == 3
    assert engine.script.count("build_connector_meta") == 1


def test_a_hook_raises_when_the_script_says_so() -> None:
    engine = Engine(Script(raises={"get_num_new_matched_tokens": (2, OSError("gone"))}))
    request = request_of(PROMPT)
    engine.match(request)
    with pytest.raises(OSError, match="gone"):
        engine.match(request)
    engine.match(request)


def test_all_hooks_that_have_nothing_to_do_are_logged() -> None:
    engine = Engine(Script())
    engine.worker.set_host_xfer_buffer_ops(lambda *_: None)
    assert engine.worker.get_handshake_metadata() is None
    assert engine.worker.get_kv_connector_stats() is None
    assert engine.worker.get_kv_connector_kv_cache_events() is None
    assert engine.scheduler.get_finished_count() is None
    engine.scheduler.set_xfer_handshake_metadata({})
    assert engine.scheduler.reset_cache() is True
    assert len(engine.script.calls) == 8
    with pytest.raises(ConnectorError, match="one tensor per layer"):
        engine.worker.register_cross_layers_kv_cache(torch.zeros(1), int)


def test_a_hook_on_the_wrong_side_is_refused() -> None:
    engine = Engine(Script())
    with pytest.raises(ConnectorError, match="worker's instance"):
        engine.worker.update_connector_output(KVConnectorOutput())
    with pytest.raises(ConnectorError, match="scheduler's instance"):
        engine.scheduler.get_block_ids_with_load_errors()


def test_without_a_script_there_is_no_connector() -> None:
    config = EngineConfig(
        kv_transfer_config=KVTransferConfig(kv_connector="ScriptedConnector", kv_role="kv_both")
    )
    with pytest.raises(ConfigError, match="pass a Script object"):
        KVConnectorFactory().create_connector(config, WORKER, KVCacheConfig(NUM_BLOCKS, ()))


def test_what_two_ranks_copied_is_one() -> None:
    engine, request = Engine(Script()), request_of(PROMPT)
    engine.allocate(request, TABLE, 0)
    row = Row(request, TABLE, 0, 14)
    meta = engine.execute(engine.plan(row), row).kv_connector_worker_meta
    assert isinstance(meta, KVConnectorWorkerMetadata)
    engine.scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=meta.aggregate(meta))
    )
    assert len(engine.script.store) == 3
