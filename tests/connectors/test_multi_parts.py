"""What each child of a MultiConnector is told and asked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from talker import (
    Said,
    a_request,
    a_step,
    sides_of,
    talker,
    talkers,
)

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.multi_connector import MultiConnector
from interlace.connectors.multi_messages import (
    Hold,
    MultiKVEvents,
    MultiMetadata,
    MultiWorkerMetadata,
)
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.kv_events import AllBlocksCleared, BlockRemoved, CountedKVEvents
from interlace.engine.ports import LateLayerGates
from interlace.engine.step_timings import TransferTiming
from interlace.layers.attention_backend import TritonAttentionBackend

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


# --- every hook reaches every child --------------------------------------------------------------


def test_every_public_method_of_the_base_is_overridden() -> None:
    sane = {
        "role",
        "lanes",  # each child asks for its own
        "default_load_failure_policy",  # the engine has one, whatever its children are
    }
    names = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    inherited = {
        name
        for name in names
        if inspect.getattr_static(MultiConnector, name)
        is inspect.getattr_static(KVConnectorBase_V1, name)
    }
    assert inherited == sane


class Gates:
    """Of one child."""

    def __init__(self, *armed: int) -> None:
        self.armed = armed
        self.waited: list[int] = []

    def wait_here(self, layer: int) -> None:
        self.waited.append(layer)

    def are_armed(self, step_id: int) -> bool:
        return step_id in self.armed


def _same(gates: Gates) -> Gates:
    return gates


def test_gates_of_all_children_are_waited_for_and_have_to_be_armed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, worker = sides_of(talker(), talker(), talker())
    assert worker.get_layer_gates() is None
    first, second = Gates(3, 4), Gates(4, 5)
    for child, gates in zip(worker._children, (first, second), strict=False):
        monkeypatch.setattr(child.connector, "get_layer_gates", functools.partial(_same, gates))
    both = worker.get_layer_gates()
    assert both is not None
    both.wait_here(1)
    assert first.waited == second.waited == [1]
    assert [both.are_armed(step) for step in (3, 4, 5)] == [False, True, False]


class LateGates(Gates):
    """Of a child that arms some gates later."""

    def __init__(self, num_first_layers: int) -> None:
        super().__init__()
        self.num_first_layers = num_first_layers
        self.first_armed: set[int] = set()

    def are_first_armed(self, step_id: int) -> bool:
        return step_id in self.first_armed

    def arm_rest(self, step_id: int) -> None:
        self.armed = (step_id,)


def test_gates_of_children_that_are_armed_late_are_cut_at_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, worker = sides_of(talker(), talker(), talker())
    at_once, early, late = Gates(4), LateGates(2), LateGates(3)
    for child, gates in zip(worker._children, (at_once, early, late), strict=True):
        monkeypatch.setattr(child.connector, "get_layer_gates", functools.partial(_same, gates))
    both = worker.get_layer_gates()
    assert isinstance(both, LateLayerGates)
    assert both.num_first_layers == 2
    early.first_armed = {3, 4}
    late.first_armed = {4}
    assert [both.are_first_armed(step) for step in (3, 4)] == [False, True]
    assert not both.are_armed(4)
    both.arm_rest(4)
    assert both.are_armed(4)
    at_once.armed = ()
    assert not both.are_first_armed(4)


@pytest.mark.parametrize("more", [(), (0,), (1,), (0, 1)])
def test_all_children_may_move_their_transfers_on(
    more: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = sides_of(talker(), talker())
    asked: list[int] = []

    def advance(index: int) -> bool:
        asked.append(index)
        return index in more

    for child in worker._children:
        own = functools.partial(advance, child.index)
        monkeypatch.setattr(child.connector, "advance_transfers", own)
    assert worker.advance_transfers() is bool(more)
    assert asked == [0, 1]


class Recorder:
    """A `TransferRecorder` that tells at once."""

    def __init__(self) -> None:
        self.told: list[TransferTiming] = []

    def mark(self) -> float:
        return 1.0

    def add(self, begin: Any, end: Any, tell: Callable[[float, float], TransferTiming]) -> None:
        self.told.append(tell(begin, end))


def test_all_children_tell_of_their_copies_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = sides_of(talker(), talker())
    given: list[Any] = []
    for child in worker._children:
        monkeypatch.setattr(child.connector, "record_transfers", given.append)
    recorder = Recorder()
    worker.record_transfers(recorder)
    for own in given:
        own.add(
            own.mark(),
            own.mark(),
            lambda begin, end: TransferTiming("load", "load", (), 0, 1, 1, 8, "", begin, end),
        )
    keys = [child.key for child in worker._children]
    assert [one.lane for one in recorder.told] == [f"{key} load" for key in keys]
    worker.record_transfers(None)
    assert given[2:] == [None, None]


def test_who_told_already_is_silenced_when_another_child_will_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, worker = sides_of(talker(), talker())
    willing, unwilling = (child.connector for child in worker._children)
    given: list[Any] = []

    def refuse(recorder: Any) -> None:
        raise RuntimeError("not me")

    monkeypatch.setattr(willing, "record_transfers", given.append)
    monkeypatch.setattr(unwilling, "record_transfers", refuse)
    with pytest.raises(ConnectorError, match="not me"):
        worker.record_transfers(Recorder())
    assert len(given) == 2
    assert given[1] is None, "nobody will ever look, nor say that it is over"


def test_late_load_errors_are_those_of_all_children(monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = sides_of(talker(), talker())
    for child in worker._children:
        late = {1 + child.index, 7}
        monkeypatch.setattr(child.connector, "get_late_load_errors", functools.partial(set, late))
    assert worker.get_late_load_errors() == {1, 2, 7}


def test_what_is_registered_reaches_all_children() -> None:
    scheduler, worker = sides_of(talker(), talker())
    pages = {"layer": object()}
    worker.register_kv_caches(pages)  # type: ignore[arg-type]
    worker.register_cross_layers_kv_cache(pages["layer"], TritonAttentionBackend)  # type: ignore[arg-type]
    worker.set_host_xfer_buffer_ops(lambda *_: None)
    scheduler.bind_gpu_block_pool("the pool")  # type: ignore[arg-type]
    for child in talkers(worker):
        assert [hook for hook, _ in child.heard] == [
            "register_kv_caches",
            "register_cross_layers_kv_cache",
            "set_host_xfer_buffer_ops",
        ]
        assert child.heard[0][1] == pages
    assert [child.heard for child in talkers(scheduler)] == [
        [("bind_gpu_block_pool", "the pool")]
    ] * 2


def test_cross_layer_blocks_need_all_children() -> None:
    _, worker = sides_of(talker(), talker())
    for child, wants in zip(talkers(worker), (False, True), strict=True):
        assert not worker.prefer_cross_layer_blocks
        child.answers["prefer_cross_layer_blocks"] = True
        assert worker.prefer_cross_layer_blocks is wants


def test_each_child_has_a_slot_in_metadata_and_handshake() -> None:
    scheduler, worker = sides_of(talker("a"), talker(), talker("c"))
    step = a_step()
    metadata = scheduler.build_connector_meta(step)
    assert metadata == MultiMetadata((Said(("a",)), Said(("",)), Said(("c",))), {}, {})
    assert all(child.heard[-1][1] is step for child in talkers(scheduler))
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    assert worker.has_connector_metadata()
    worker.start_load_kv(None)  # type: ignore[arg-type]
    for index, child in enumerate(talkers(worker)):
        part = metadata.parts[index]
        assert child.heard == [("handle_preemptions", part), ("start_load_kv", part)]
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    assert not any(child.has_connector_metadata() for child in worker.children)
    handshake = worker.get_handshake_metadata()
    assert handshake is not None
    scheduler.set_xfer_handshake_metadata({0: handshake, 1: handshake})
    assert [child.heard[-1][1] for child in talkers(scheduler)] == [
        {0: Said(("a",)), 1: Said(("a",))},
        {},
        {0: Said(("c",)), 1: Said(("c",))},
    ]
    silent, _ = sides_of(talker(), talker())
    assert silent.get_handshake_metadata() is None


def test_layer_hooks_reach_only_children_that_have_work() -> None:
    scheduler, worker = sides_of(talker(), talker())
    idle, busy = talkers(worker)
    idle.has_connector_metadata = lambda: False  # type: ignore[method-assign]
    worker.bind_connector_metadata(scheduler.build_connector_meta(a_step()))
    assert worker.has_connector_metadata()
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", None, None)  # type: ignore[arg-type]
    worker.wait_for_save()
    assert [hook for hook, _ in busy.heard] == [
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
    ]
    assert [hook for hook, _ in idle.heard] == ["wait_for_save"]
    busy.has_connector_metadata = lambda: False  # type: ignore[method-assign]
    assert not worker.has_connector_metadata()


class Resting(Said):
    """Of a child with nothing to do."""

    is_idle = True


def test_a_child_that_is_idle_is_left_alone_and_keeps_its_slots() -> None:
    _, worker = sides_of(talker("a"), talker("b"))
    resting, busy = talkers(worker)
    metadata = MultiMetadata((Resting(("a",)), Said(("b",))), {}, {})
    assert not metadata.is_idle
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)  # type: ignore[arg-type]
    worker.wait_for_layer_load("layer")
    worker.wait_for_save()
    worker.get_finished({"r"})
    worker.get_block_ids_with_load_errors()
    stats, events = worker.get_kv_connector_stats(), worker.get_kv_connector_kv_cache_events()
    assert worker.build_connector_worker_meta() == MultiWorkerMetadata((None, Said(("b",))))
    worker.clear_connector_metadata()
    assert resting.heard == []
    assert busy.heard[0] == ("handle_preemptions", Said(("b",)))
    assert stats is not None
    assert len(stats.data) == 1
    assert events is not None
    both = MultiMetadata((Said(("a",)), Resting(("b",))), {}, {})
    worker.bind_connector_metadata(both)
    worker.wait_for_save()
    assert resting.heard == [("wait_for_save", None)], "it has something to do again"


def test_it_is_idle_if_all_children_are_and_nothing_is_owed() -> None:
    resting = (Resting(("a",)), Resting(("b",)))
    assert MultiMetadata(resting, {}, {}).is_idle
    assert not MultiMetadata(resting, {"r": 0}, {}).is_idle
    assert not MultiMetadata(resting, {}, {"r": Hold(frozenset(), None)}).is_idle


def test_worker_metadata_statistics_and_events_go_to_their_child() -> None:
    scheduler, first = sides_of(talker("a"), talker(), talker("ccc"))
    _, second = sides_of(talker("b"), talker(), talker("ccc"))
    parts = [
        KVConnectorOutput(
            kv_connector_stats=side.get_kv_connector_stats(),
            kv_cache_events=side.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=side.build_connector_worker_meta(),
        )
        for side in (first, second)
    ]
    merged = KVConnectorOutput.merge(*parts)
    assert merged.kv_connector_worker_meta == MultiWorkerMetadata(
        (Said(("a", "b")), None, Said(("ccc", "ccc")))
    )
    before = dataclasses.replace(merged)
    scheduler.update_connector_output(merged)
    assert merged == before, "the engine's object stays as it is"
    a, silent, c = talkers(scheduler)
    assert silent.heard == [], "nothing was reported for it"
    for child, words, count, removed, workers in (
        (a, ("a", "b"), 2, [b"a", b"b"], 2),
        (c, ("ccc", "ccc"), 6, [b"ccc"], 2),
    ):
        (hook, output), *_ = child.heard
        assert hook == "update_connector_output"
        assert output.kv_connector_worker_meta == Said(words)
        assert output.kv_connector_stats.data == {"words": count}
        events = output.kv_cache_events
        assert events.get_all_events() == [BlockRemoved([name]) for name in removed]
        assert events.get_number_of_workers() == workers


def test_bad_blocks_concern_all_children_and_each_gets_a_set_of_its_own() -> None:
    scheduler, worker = sides_of(talker(), talker())
    output = KVConnectorOutput(invalid_block_ids={3})
    scheduler.update_connector_output(output)
    shown = [child.heard[0][1].invalid_block_ids for child in talkers(scheduler)]
    assert shown == [{3}, {3}]
    shown[0].clear()
    assert output.invalid_block_ids == shown[1] == {3}
    first, second = talkers(worker)
    first.get_block_ids_with_load_errors = lambda: {1}  # type: ignore[method-assign]
    second.get_block_ids_with_load_errors = lambda: {2}  # type: ignore[method-assign]
    assert worker.get_block_ids_with_load_errors() == {1, 2}


def test_silent_children_make_a_silent_parent() -> None:
    _, worker = sides_of(talker(), talker())
    assert worker.get_kv_connector_stats() is None
    assert worker.get_kv_connector_kv_cache_events() is None
    assert worker.build_connector_worker_meta() is None


def test_events_are_chained_and_aggregated_by_child() -> None:
    scheduler, worker = sides_of(talker("a"), talker("b"))
    assert list(scheduler.take_events()) == [BlockRemoved([b"a"]), BlockRemoved([b"b"])]
    events = worker.get_kv_connector_kv_cache_events()
    assert isinstance(events, MultiKVEvents)
    events.merge(MultiKVEvents([None, CountedKVEvents([AllBlocksCleared()])]))
    assert events.get_number_of_workers() == 2
    assert len(events.get_all_events()) == 3
    events.aggregate()
    assert events.get_all_events() == [BlockRemoved([b"a"])], "the only one that all have told"
    events.increment_workers(2)
    assert events.get_number_of_workers() == 3
    events.add_events([])
    with pytest.raises(ConnectorError, match="merge"):
        events.add_events([AllBlocksCleared()])
    events.clear_events()
    assert events.get_all_events() == []


@pytest.mark.parametrize(
    ("answers", "right"), [((None, None), True), ((True, None), True), ((False, True), False)]
)
def test_a_reset_asks_all_children(answers: tuple[bool | None, ...], right: bool) -> None:
    scheduler, _ = sides_of(talker(), talker())
    for child, answer in zip(talkers(scheduler), answers, strict=True):
        child.answers["reset_cache"] = answer
    assert scheduler.reset_cache() is right
    assert all(child.heard for child in talkers(scheduler))


# --- how many workers report ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "workers", "expected"),
    [
        ((None, None), 2, None),
        ((2, None), 2, 2),
        ((1, None), 1, 1),
        ((1,), 2, 1),
        ((None,), 2, None),
    ],
)
def test_counts_that_fit(
    counts: tuple[int | None, ...], workers: int, expected: int | None
) -> None:
    scheduler, _ = sides_of(*[talker() for _ in counts], workers=workers)
    for child, count in zip(talkers(scheduler), counts, strict=True):
        child.answers["get_finished_count"] = count
    assert scheduler.get_finished_count() == expected


@pytest.mark.parametrize("counts", [(None, 1), (1, 1), (2, 1)])
def test_a_child_that_only_some_workers_report_for_is_refused(
    counts: tuple[int | None, ...],
) -> None:
    scheduler, _ = sides_of(talker(), talker(), workers=2)
    for child, count in zip(talkers(scheduler), counts, strict=True):
        child.answers["get_finished_count"] = count
    with pytest.raises(ConfigError, match="answers 1 of 2 workers"):
        scheduler.get_finished_count()


# --- the end of a request ------------------------------------------------------------------------


def finished(*answers: Any, raises: Mapping[int, Exception] | None = None) -> Any:
    """What a parent answers whose children answer these."""
    scheduler, _ = sides_of(*[talker() for _ in answers])
    for child, answer in zip(talkers(scheduler), answers, strict=True):
        child.answers["request_finished"] = answer
    for index, error in (raises or {}).items():
        talkers(scheduler)[index].raises["request_finished"] = error
    answer = scheduler.request_finished(a_request(), [1, 2])
    assert all(child.heard == [("request_finished", [1, 2])] for child in talkers(scheduler))
    return answer


def test_parameters_of_several_children_are_one_dict() -> None:
    assert finished((False, None), (False, None)) == (False, None)
    assert finished((False, {}), (False, None)) == (False, {})
    assert finished((True, {"a": 1}), (False, {"b": 2})) == (True, {"a": 1, "b": 2})


def test_a_parameter_of_two_children_is_an_error_that_names_both() -> None:
    with pytest.raises(ConnectorError, match=r"0:\S+Talker and 1:\S+Talker both.*'a'"):
        finished((False, {"a": 1}), (False, {"a": 1}))


def test_an_error_frees_no_blocks_that_another_child_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert finished((True, {"a": 1}), (False, {"a": 2, "b": 3})) == (True, {"a": 1, "b": 3})
    assert "both answer" in caplog.text
    caplog.clear()
    held = finished((True, None), (False, None), raises={1: RuntimeError("boom")})
    assert held == (True, None)
    assert "Talker: request_finished raised RuntimeError: boom" in caplog.text
    with pytest.raises(ConnectorError, match=r"child 0:.*boom"):
        finished((False, None), (False, None), raises={0: RuntimeError("boom")})


@pytest.mark.parametrize("answer", [None, True, (1, None), (False, [])])
def test_a_child_that_answers_otherwise_is_named(answer: Any) -> None:
    with pytest.raises(ConnectorError, match=r"child 1:\S+Talker: request_finished answered"):
        finished((False, None), answer)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(True, False), (-1, False), (0, True), (10, False), (3, 1), 3])
def test_a_match_that_the_protocol_forbids_names_its_child(answer: Any) -> None:
    scheduler, _ = sides_of(talker(), talker())
    talkers(scheduler)[1].answers["get_num_new_matched_tokens"] = answer
    with pytest.raises(ConnectorError, match=r"child 1:\S+Talker: get_num_new_matched_tokens"):
        scheduler.get_num_new_matched_tokens(a_request(), 0)


def test_a_load_that_the_last_query_did_not_find_is_refused() -> None:
    scheduler, _ = sides_of(talker(), talker())
    request, blocks = a_request(), KVCacheBlocks(((),))
    with pytest.raises(ConnectorError, match="found none"):
        scheduler.update_state_after_alloc(request, blocks, 3)
    for answer in ((3, False), (0, False)):
        talkers(scheduler)[1].answers["get_num_new_matched_tokens"] = answer
        assert scheduler.get_num_new_matched_tokens(request, 0) == answer
    with pytest.raises(ConnectorError, match="found none"):
        scheduler.update_state_after_alloc(request, blocks, 3)
    assert scheduler.is_idle


def calls_of(worker: MultiConnector, scheduler: MultiConnector) -> dict[str, Callable[[], object]]:
    return {
        "register_kv_caches": lambda: worker.register_kv_caches({}),
        "start_load_kv": lambda: worker.start_load_kv(None),  # type: ignore[arg-type]
        "wait_for_layer_load": lambda: worker.wait_for_layer_load("layer"),
        "wait_for_save": worker.wait_for_save,
        "get_finished": lambda: worker.get_finished(set()),
        "build_connector_meta": lambda: scheduler.build_connector_meta(a_step()),
        "get_num_new_matched_tokens": lambda: scheduler.get_num_new_matched_tokens(a_request(), 0),
        "update_connector_output": lambda: scheduler.update_connector_output(
            KVConnectorOutput(invalid_block_ids={1})
        ),
        "reset_cache": scheduler.reset_cache,
        "shutdown": scheduler.shutdown,
    }


@pytest.mark.parametrize(
    "hook",
    [
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "wait_for_save",
        "get_finished",
        "build_connector_meta",
        "get_num_new_matched_tokens",
        "update_connector_output",
        "reset_cache",
        "shutdown",
    ],
)
def test_all_are_called_and_the_first_that_raises_is_named(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, worker = sides_of(talker(), talker(), talker())
    worker.bind_connector_metadata(scheduler.build_connector_meta(a_step()))
    for side in (scheduler, worker):
        for child in talkers(side):
            child.heard.clear()
        for number in (0, 1):
            talkers(side)[number].raises[hook] = RuntimeError(f"boom {number}")
    message = rf"child 0:\S+Talker: {hook} raised.*boom 0"
    with pytest.raises(ConnectorError, match=message) as caught:
        calls_of(worker, scheduler)[hook]()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "boom 1" in caplog.text
    heard = [child.heard for side in (scheduler, worker) for child in talkers(side)]
    assert [[name for name, _ in calls] for calls in heard if calls] == [[hook]] * 3


def test_a_child_that_forgets_its_metadata_is_named() -> None:
    scheduler, worker = sides_of(talker(), talker())
    forgetful: Any = talkers(scheduler)[1]
    forgetful.build_connector_meta = lambda _: None
    with pytest.raises(ConnectorError, match=r"child 1:\S+Talker: build_connector_meta returned"):
        scheduler.build_connector_meta(a_step())
    worker.bind_connector_metadata(MultiMetadata((Said(()), Said(())), {}, {}))
    talkers(worker)[1].answers["get_finished"] = {"r"}
    with pytest.raises(ConnectorError, match=r"child 1:\S+Talker: get_finished answered"):
        worker.get_finished(set())
