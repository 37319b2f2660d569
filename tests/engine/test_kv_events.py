"""Events of several workers as one: what all have told, in an order that fits each."""

from __future__ import annotations

from collections import Counter
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.engine.kv_events import (
    BlockRemoved,
    CountedKVEvents,
    KVCacheEvent,
    KVEventAggregator,
)

A, B, C = (BlockRemoved([name]) for name in (b"a", b"b", b"c"))
told = st.lists(st.sampled_from([A, B, C]), max_size=4)


def merged(*workers: list[KVCacheEvent]) -> CountedKVEvents:
    return reduce(CountedKVEvents.merge, [CountedKVEvents(events) for events in workers])


@pytest.mark.parametrize(
    ("workers", "all_of_them", "common"),
    [
        ([[A, B], [C, B]], [A, C, B], [B]),
        ([[A, B, A], [A, B, A]], [A, B, A], [A, B, A]),
        ([[A], [A, B, A]], [A, B, A], [A]),
        ([[A, A], []], [A, A], []),
        ([[], [A]], [A], []),
    ],
)
def test_the_order_of_each_worker_is_kept(
    workers: list[list[KVCacheEvent]],
    all_of_them: list[KVCacheEvent],
    common: list[KVCacheEvent],
) -> None:
    events = merged(*workers)
    assert events.get_all_events() == all_of_them
    assert events.aggregate().get_all_events() == common
    assert events.get_number_of_workers() == 1


def test_what_is_added_twice_for_one_worker_is_no_other_workers() -> None:
    one = CountedKVEvents([A])
    one.add_events([A])
    assert one.merge(CountedKVEvents([])).aggregate().get_all_events() == []


def test_counting_by_hand() -> None:
    """As connectors do that were written for vLLM."""
    counts = KVEventAggregator(1)
    counts.add_events([A, B])
    counts.increment_workers()
    counts.add_events([B])
    assert counts.get_common_events() == [B]
    counts.clear_events()
    assert counts.get_all_events() == []
    assert counts.get_number_of_workers() == 2


@given(st.lists(told, min_size=2, max_size=5), st.data())
def test_it_is_the_same_however_they_are_merged(
    workers: list[list[KVCacheEvent]], data: st.DataObject
) -> None:
    """What is common is what each has told as often, whatever is merged first."""
    parts = [CountedKVEvents(events) for events in workers]
    while len(parts) > 1:
        index = data.draw(st.integers(0, len(parts) - 2))
        parts[index : index + 2] = [parts[index].merge(parts[index + 1])]
    (events,) = parts
    assert events.get_number_of_workers() == len(workers)
    most: Counter[KVCacheEvent] = reduce(lambda x, y: x | y, [Counter(w) for w in workers])
    least: Counter[KVCacheEvent] = reduce(lambda x, y: x & y, [Counter(w) for w in workers])
    assert Counter(events.get_all_events()) == most
    assert Counter(events.aggregate().get_all_events()) == least


@given(told)
def test_workers_that_tell_the_same_are_as_one(events: list[KVCacheEvent]) -> None:
    assert merged(events, events, events).aggregate().get_all_events() == events
