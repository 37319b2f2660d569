"""Reports of several workers as one: counting by rank, across steps."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.engine import kv_output_aggregator
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorOutput, KVConnectorWorkerMetadata
from interlace.engine.kv_connector_stats import CountingStats
from interlace.engine.kv_events import BlockRemoved, CountedKVEvents
from interlace.engine.kv_output_aggregator import MAX_OPEN_SENDS, KVOutputAggregator
from interlace.engine.scheduler_output import CachedRequestData, SchedulerOutput


class Counts(CountingStats):
    """Numbers of these tests."""


class OtherCounts(Counts):
    """Of another kind."""


@dataclasses.dataclass(frozen=True)
class Said(KVConnectorWorkerMetadata):
    words: tuple[str, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Said:
        assert isinstance(other, Said)
        return Said(self.words + other.words)


def step(
    loading: Iterable[str] = (), finished: Iterable[str] = (), preempted: Iterable[str] = ()
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=1,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        finished_req_ids=frozenset(finished),
        preempted_req_ids=frozenset(preempted),
        sampling_req_ids=frozenset(),
        async_loading_req_ids=frozenset(loading),
    )


def received(*ids: str, **fields: Any) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(ids), **fields)


def sent(*ids: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_sending=set(ids))


def test_an_id_counts_when_all_ranks_have_reported_it() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a", "b"}))
    assert aggregator.aggregate([received("a"), None]) is None
    assert aggregator.aggregate([None, None]) is None
    output = aggregator.aggregate([received("b"), received("a", "b")])
    assert output == received("a", "b")
    assert aggregator.take_num_strays() == 0


def test_sends_are_counted_apart_from_loads() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}, finished={"a"}))
    assert aggregator.aggregate([received("a"), sent("a")]) is None
    assert aggregator.aggregate([sent("a"), None]) == sent("a")
    assert aggregator.aggregate([None, received("a")]) == received("a")


def test_a_rank_that_repeats_itself_counts_once() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}, finished={"z"}))
    assert aggregator.aggregate([received("a"), None]) is None
    assert aggregator.aggregate([received("a"), None]) is None
    assert aggregator.aggregate([sent("z"), None]) is None
    assert aggregator.aggregate([sent("z"), None]) is None
    assert aggregator.take_num_strays() == 2
    assert aggregator.take_num_strays() == 0
    assert aggregator.aggregate([None, received("a")]) == received("a")


def test_left_over_reports_do_not_count_for_a_later_load() -> None:
    """Rank 0 repeats the end of the first load while the second one begins."""
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}))
    assert aggregator.aggregate([received("a"), received("a")]) == received("a")
    assert aggregator.aggregate([received("a"), None]) is None
    assert aggregator.take_num_strays() == 1
    aggregator.begin_step(step(loading={"a"}))
    assert aggregator.aggregate([None, received("a")]) is None
    assert aggregator.aggregate([received("a"), None]) == received("a")


def test_a_preemption_ends_the_load_whoever_has_reported_it() -> None:
    """Rank 0 was done with a load from the back; a request of that id loads anew."""
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}))
    assert aggregator.aggregate([received("a"), None]) is None
    aggregator.begin_step(step(preempted={"a"}))
    assert aggregator.aggregate([None, received("a")]) is None
    assert aggregator.take_num_strays() == 1
    aggregator.begin_step(step(loading={"a"}))
    assert aggregator.aggregate([None, received("a")]) is None
    assert aggregator.aggregate([received("a"), None]) == received("a")
    assert aggregator.take_num_strays() == 0


def test_left_over_sends_do_not_count_for_a_later_request_of_the_same_id() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(finished={"a"}))
    assert aggregator.aggregate([sent("a"), sent("a")]) == sent("a")
    assert aggregator.aggregate([sent("a"), None]) is None
    aggregator.begin_step(step(finished={"a"}))
    assert aggregator.aggregate([None, sent("a")]) is None


def test_what_nobody_waits_for_does_not_fill_the_memory() -> None:
    aggregator = KVOutputAggregator(2)
    for number in range(MAX_OPEN_SENDS + 5):
        aggregator.aggregate([sent(f"stray {number}"), None])
    assert len(aggregator._unasked) == MAX_OPEN_SENDS
    assert aggregator.take_num_strays() == 5


def test_ended_requests_that_nobody_reports_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_output_aggregator, "MAX_SILENT_ENDS", 3)
    aggregator = KVOutputAggregator(2)
    for name in "abcde":
        aggregator.begin_step(step(finished={name}))
    assert list(aggregator._silent) == ["c", "d", "e"]
    assert aggregator.aggregate([sent("a"), None]) is None
    assert aggregator.aggregate([None, sent("a")]) == sent("a"), "forgotten, and yet it counts"


def test_workers_that_never_agree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_output_aggregator, "MAX_UNEVEN_SENDS", 2)
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(finished={"a", "b", "c"}))
    assert aggregator.aggregate([sent("a", "b"), None]) is None
    with pytest.raises(ConnectorError, match="by some workers and not by others"):
        aggregator.aggregate([sent("c"), None])


def test_either_report_of_a_request_that_ended_while_it_loaded_ends_both_counts() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a", "b"}))
    aggregator.begin_step(step(finished={"a", "b"}))
    assert aggregator.aggregate([sent("a"), sent("b")]) is None
    assert aggregator.aggregate([received("b"), sent("a")]) == sent("a")
    assert aggregator.aggregate([None, received("b")]) == received("b")
    assert [aggregator._loading, aggregator._sending, aggregator._silent] == [{}, {}, {}]


def test_a_load_still_counts_after_a_send_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine holds the blocks for the load alone, if the connector did not ask to keep them."""
    monkeypatch.setattr(kv_output_aggregator, "MAX_OPEN_SENDS", 2)
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a", "b", "c"}))
    aggregator.begin_step(step(finished={"a", "b", "c"}))
    assert aggregator.aggregate([received("a"), None]) is None
    assert aggregator.aggregate([sent("a"), sent("a")]) == sent("a")
    assert aggregator.aggregate([None, received("a")]) == received("a")
    for name in "bc":
        assert aggregator.aggregate([sent(name), sent(name)]) == sent(name)
    aggregator.begin_step(step(loading={"d"}))
    aggregator.begin_step(step(finished={"d"}))
    assert aggregator.aggregate([sent("d"), sent("d")]) == sent("d")
    assert list(aggregator._let_go) == ["c", "d"]


def test_the_load_of_the_next_request_of_that_id_is_not_ended_by_a_send() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}, finished={"a"}))
    assert aggregator.aggregate([sent("a"), sent("a")]) == sent("a")
    assert aggregator.aggregate([received("a"), received("a")]) == received("a")


def test_a_changed_count_is_for_ids_that_come_later() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.begin_step(step(loading={"a"}))
    assert aggregator.aggregate([received(expected_finished_count=1), None]) is None
    aggregator.begin_step(step(loading={"b"}))
    assert aggregator.aggregate([received("a", "b"), None]) == received(
        "b", expected_finished_count=0
    )


def test_one_worker_may_report_for_all() -> None:
    aggregator = KVOutputAggregator(1)
    aggregator.begin_step(step(loading={"a"}, finished={"z"}))
    assert aggregator.aggregate([received("a"), sent("z")]) == KVConnectorOutput(
        finished_recving={"a"}, finished_sending={"z"}
    )


def test_the_rest_is_merged_step_by_step() -> None:
    aggregator = KVOutputAggregator(2)
    removed = BlockRemoved([b"x"])
    one = KVConnectorOutput(
        invalid_block_ids={1, 2},
        kv_connector_stats=Counts({"loads": 1}),
        kv_cache_events=CountedKVEvents([removed]),
        kv_connector_worker_meta=Said(("one",)),
    )
    two = KVConnectorOutput(
        invalid_block_ids={2, 3},
        kv_connector_stats=Counts({"loads": 2, "saves": 1}),
        kv_cache_events=CountedKVEvents([removed, BlockRemoved([b"y"])]),
        kv_connector_worker_meta=Said(("two",)),
    )
    output = aggregator.aggregate([one, two])
    assert output is not None
    assert output.invalid_block_ids == {1, 2, 3}
    assert output.kv_connector_stats == Counts({"loads": 3, "saves": 1})
    assert output.kv_connector_worker_meta == Said(("one", "two"))
    events = output.kv_cache_events
    assert events is not None
    assert events.get_number_of_workers() == 2
    assert events.get_all_events() == [removed, BlockRemoved([b"y"])]
    assert events.aggregate().get_all_events() == [removed]


def test_what_does_not_fit_together_is_an_error() -> None:
    aggregator = KVOutputAggregator(2)
    with pytest.raises(ConnectorError, match="unequal finished counts, \\[1, 2\\]"):
        aggregator.aggregate(
            [received(expected_finished_count=1), received(expected_finished_count=2)]
        )
    one, two = (KVConnectorOutput(kv_connector_stats=c({"n": 1})) for c in (Counts, OtherCounts))
    with pytest.raises(ConnectorError, match=r"different kinds .* Counts and OtherCounts"):
        aggregator.aggregate([one, two])


@given(st.data())
def test_every_load_ends_exactly_once_and_with_the_last_rank(data: st.DataObject) -> None:
    """Ranks report in any order and now and then repeat themselves."""
    num_ranks = data.draw(st.integers(2, 3))
    aggregator = KVOutputAggregator(num_ranks)
    missing: dict[str, set[int]] = {}
    ended: defaultdict[str, int] = defaultdict(int)
    for number in range(data.draw(st.integers(1, 12))):
        begun = {i for i in "abc" if i not in missing and data.draw(st.booleans())}
        aggregator.begin_step(step(loading=begun))
        missing |= {request_id: set(range(num_ranks)) for request_id in begun}
        reports: list[KVConnectorOutput | None] = []
        for rank in range(num_ranks):
            ids = data.draw(st.sets(st.sampled_from("abc")), label=f"step {number} rank {rank}")
            reports.append(received(*ids) if ids else None)
        expected = set()
        for rank, report in enumerate(reports):
            for request_id in (report and report.finished_recving) or ():
                missing.get(request_id, set()).discard(rank)
        expected = {i for i, ranks in missing.items() if not ranks}
        for request_id in expected:
            del missing[request_id]
            ended[request_id] += 1
        output = aggregator.aggregate(reports)
        assert (set() if output is None else output.finished_recving or set()) == expected
