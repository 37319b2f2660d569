"""What a MultiConnector is made of: its configuration and its children."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from connected import NOTHING
from multi_kit import cache_config, multi_config, multi_side, multi_stepper, scripted
from scheduling import launched
from talker import (
    HMATalker,
    Talker,
    a_request,
    sides_of,
    talker,
    talkers,
)

from interlace.connectors.base import supports_hma
from interlace.connectors.conformance import Rule, Script, ScriptedConnector, Sync
from interlace.connectors.factory import KVConnectorFactory
from interlace.connectors.multi_connector import MultiConnector, MultiConnectorHMA
from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    KVConnectorRole,
)

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


# --- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "at least one child"),
        ({"connectors": []}, "at least one child"),
        ({"connectors": {"kv_connector": "ExampleConnector"}}, "at least one child"),
        ({"connectors": [{}], "cache": 1}, "no option 'cache'"),
        ({"connectors": ["ExampleConnector"]}, r"connectors\[0\] must be a mapping"),
        ({"connectors": [{"kv_role": "kv_both"}]}, r"connectors\[0\].*'kv_connector'"),
        (
            {"connectors": [scripted(Script()), {"kv_connector": "Nobody"}]},
            r"^MultiConnector: connectors\[1\]: there is no KV connector 'Nobody'",
        ),
        ({"connectors": [{"kv_connector": "ExampleConnector", "kv_rolle": "x"}]}, "kv_role"),
        ({"connectors": [{"kv_connector": "ExampleConnector", 3: "x"}]}, r"connectors\[0\]"),
        ({"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "boss"}]}, "kv_producer"),
        (
            {"connectors": [{**scripted(Script()), "kv_load_failure_policy": "fail"}]},
            "whole engine",
        ),
        ({"connectors": [{"kv_connector": "ExampleConnector"}]}, "shared_storage_path"),
        ({"connectors": [{"kv_connector": "X", "kv_connector_module_path": "no.such"}]}, "no.such"),
    ],
)
def test_bad_configurations_are_refused_by_name(extra: dict[Any, Any], message: str) -> None:
    config = multi_config([])
    assert config.kv_transfer_config is not None
    transfer = dataclasses.replace(config.kv_transfer_config, kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=message):
        multi_side(config.with_connector(transfer), WORKER)


def test_children_inherit_what_they_do_not_set() -> None:
    first = scripted(Script(), kv_role="kv_producer", engine_id="mine")
    second = scripted(Script())
    config = multi_config([first, second], role="kv_consumer", engine_id="theirs")
    side = multi_side(config.for_rank(1), WORKER)
    own = [child._kv_transfer_config for child in side.children]
    assert [(one.kv_role, one.engine_id) for one in own] == [
        ("kv_producer", "mine"),
        ("kv_consumer", "theirs"),
    ]
    assert [child._vllm_config.parallel_config.rank for child in side.children] == [1, 1]
    assert all(child.role is WORKER for child in side.children)
    assert all(one.kv_connector == "ScriptedConnector" for one in own)


def test_a_child_that_cannot_be_made_is_named_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Talker, "shutdown", lambda self: ended.append(self.word))
    config = multi_config([talker("a"), talker("b"), talker("c", fails="WORKER"), talker("d")])
    with pytest.raises(ConfigError, match=r"connectors\[2\].*no room"):
        multi_side(config, WORKER)
    assert ended == ["a", "b"]
    multi_side(config, SCHEDULER)


def test_layouts_must_agree() -> None:
    layout = MultiConnector.get_required_kvcache_layout
    assert layout(multi_config([talker(), talker()])) is None
    assert layout(multi_config([talker(), talker(layout="HND")])) == "HND"
    assert layout(multi_config([talker(layout="HND"), talker(layout="HND")])) == "HND"
    with pytest.raises(ValueError, match=r"0:.*Talker needs 'NHD' and 2:.*Talker needs 'HND'"):
        layout(multi_config([talker(layout="NHD"), talker(), talker(layout="HND")]))


def test_one_child_that_needs_its_layer_hooks_is_enough() -> None:
    needs = MultiConnector.requires_piecewise_for_cudagraph
    assert not needs({"connectors": [talker(), talker()]})
    assert needs({"connectors": [talker(), talker(piecewise=True)]})


def test_several_groups_only_if_all_children_know_them() -> None:
    mixed, _ = sides_of(talker(), talker(kind=HMATalker))
    assert not supports_hma(mixed)
    assert mixed.request_finished(a_request(), [3]) == (False, None)
    assert talkers(mixed)[0].heard == [("request_finished", [3])]
    assert talkers(mixed)[1].heard == [("request_finished_all_groups", ([3],))]
    both, _ = sides_of(talker(kind=HMATalker), talker(kind=HMATalker))
    assert supports_hma(both)
    assert isinstance(both, MultiConnectorHMA)
    both.request_finished_all_groups(a_request(), ([1], [2]))
    assert talkers(both)[1].heard == [("request_finished_all_groups", ([1], [2]))]


def test_the_factory_makes_one() -> None:
    config = multi_config([scripted(Script()), scripted(Script())])
    made = KVConnectorFactory().create_connector(config, SCHEDULER, cache_config(config))
    assert isinstance(made, MultiConnector)
    assert len(made.children) == 2


def test_a_multi_connector_may_be_a_child() -> None:
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": MultiConnector.__module__,
        "kv_connector_extra_config": {"connectors": [scripted(Script()), scripted(Script())]},
    }
    sides = multi_stepper(inner, Script())
    sides.stepper.add([1, 2, 3, 4, 5], max_tokens=3)
    sides.stepper.run()
    sides.assert_idle()


def test_the_check_runs_two_example_connectors(tmp_path: Path) -> None:
    setup = MultiConnector.check_setup(tmp_path)
    config = multi_config(setup.extra_config["connectors"])
    sides = [multi_side(config, WORKER), multi_side(config, SCHEDULER)]
    for side in sides:
        assert len(side.children) == 2
        side.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


# --- a role for each -----------------------------------------------------------------------------


def test_a_producer_and_a_consumer() -> None:
    """Saved by the one, loaded by the other: they share a store."""
    store = Script().store
    producer, consumer = Script(store=store), Script(store=store, default=Rule(answers=(Sync(),)))
    for _ in range(2):
        sides = multi_stepper(
            scripted(producer, kv_role="kv_producer"), scripted(consumer, kv_role="kv_consumer")
        )
        request = sides.stepper.add([1] * 9, max_tokens=1)
        sides.stepper.run()
        sides.assert_idle()
    assert request.num_external_cached_tokens == 8


def test_the_configuration_of_a_child_is_the_parents_but_for_its_own() -> None:
    config = multi_config([scripted(Script())])
    (child,) = multi_side(config, SCHEDULER).children
    assert isinstance(child, ScriptedConnector)
    assert child._vllm_config.cache_config == config.cache_config
    assert isinstance(child._vllm_config.kv_transfer_config, KVTransferConfig)
    sides = multi_stepper(Script(default=NOTHING))
    sides.stepper.add([1, 2, 3])
    launched(sides.stepper)
