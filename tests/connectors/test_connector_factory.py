"""The factory: registered classes, classes of one's own, and every way in which that can fail."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance import Script
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, InterlaceError, ModelError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

CACHE = KVCacheConfig(num_blocks=4, kv_cache_groups=())
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PLUGIN = """
from interlace.connectors.base import KVConnectorBase_V1
from interlace.engine.errors import ConfigError, ModelError
from interlace.engine.kv_connector import KVConnectorMetadata

class Base(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output): return KVConnectorMetadata()

class ScriptedConnector(Base):
    "Has the name of a registered one."

class Old(Base):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)

class Renamed(Base):
    def __init__(self, config, role, cache):
        super().__init__(config, role, cache)

class Star(Base):
    def __init__(self, *args):
        super().__init__(*args)

class StarStar(Base):
    def __init__(self, vllm_config, role, **kwargs):
        assert set(kwargs) == {"kv_cache_config"}
        super().__init__(vllm_config, role, **kwargs)

class KeywordOnly(Base):
    def __init__(self, vllm_config, role, *, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)

class Fourth(Base):
    def __init__(self, vllm_config, role, extra=None, kv_cache_config=None):
        assert extra is None
        super().__init__(vllm_config, role, kv_cache_config)

class Greedy(Base):
    def __init__(self, vllm_config, role, kv_cache_config, more): ...

class Raises(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        raise OSError("no such disk")

class RaisesOurs(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        raise ModelError("another model")

class Incomplete(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

class Loose(Base):
    def __init__(self, vllm_config, role, extra=None, **kwargs):
        super().__init__(vllm_config, role, **(kwargs or {"kv_cache_config": extra}))

class ByPlace(Base):
    def __init__(self, vllm_config, role, kv_cache_config, /):
        super().__init__(vllm_config, role, kv_cache_config)

class Heads(Base):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): return "NHD"

class HeadsFirst(Base):
    def __init__(self, *args): raise AssertionError("asked for before it is made")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        assert vllm_config.kv_transfer_config is not None
        return "HND"

class Sideways(Base):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): return "DHN"

class Layerwise(Base):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config): return True

class NoLayout(Base):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): raise KeyError("layout")

class Particular(Base):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): raise ConfigError("set page_kind")

class Choosy(Base):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        raise AssertionError("nothing is made")

    @classmethod
    def validate_config(cls, vllm_config):
        match vllm_config.kv_transfer_config.kv_connector_extra_config.get("mood"):
            case "bad": raise ConfigError("set a good mood")
            case "odd": raise KeyError("mood")

class Follower(Choosy): ...

class Namesake(Choosy):
    def validate_config(self): return "mine"


class Taker(Choosy):
    def __init__(self, vllm_config, role, kv_cache_config=None): ...

class Stranger: ...

number = 3
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_plugin.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "factory_broken_plugin.py").write_text("1 / 0", encoding="utf-8")
    (tmp_path / "factory_empty_plugin.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def config_of(name: str | None, module_path: str | None = "factory_plugin") -> EngineConfig:
    return EngineConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_module_path=module_path
        )
    )


def make(name: str, role: KVConnectorRole = WORKER, **kwargs: Any) -> KVConnectorBase_V1:
    return KVConnectorFactory().create_connector(config_of(name, **kwargs), role, CACHE)


def test_a_registered_class_is_imported_when_it_is_used() -> None:
    factory = KVConnectorFactory()
    factory.register_connector("Mine", "factory_plugin", "Base")
    factory.register_connector("Nowhere", "no.such.module", "Nothing")
    cls = factory.get_connector_class_by_name("Mine")
    config = config_of("Mine", None)
    assert cls.__name__ == "Base"
    assert config.kv_transfer_config is not None
    assert factory.get_connector_class(config.kv_transfer_config) is cls
    connector = factory.create_connector(config, SCHEDULER, CACHE)
    assert type(connector) is cls
    assert connector.role is SCHEDULER
    assert connector._kv_cache_config is CACHE


def test_the_built_in_connectors_are_known() -> None:
    factory = KVConnectorFactory()
    assert factory.known_names == [
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "MultiConnector",
        "PipelineConnector",
        "ScriptedConnector",
    ]
    for name in factory.known_names:
        cls = factory.get_connector_class_by_name(name)
        assert cls.__name__ == name
        assert cls.__module__.startswith("interlace.connectors.")


@pytest.mark.parametrize(
    "name",
    [
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "P2pNcclConnector",
        "SimpleCPUOffloadConnector",
    ],
)
def test_the_protocols_other_connectors_are_known_and_not_there_yet(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is one of vLLM's .* does not have yet"):
        KVConnectorFactory().create_connector(config_of(name, None), WORKER, CACHE)
    factory = KVConnectorFactory()
    factory.register_connector(name, "factory_plugin", "Base")  # somebody has brought it
    assert type(factory.create_connector(config_of(name, None), WORKER, CACHE)).__name__ == "Base"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nixlconnector", r"Did you mean 'NixlConnector'\? That is one of vLLM's .* does not have"),
        ("Mooncake", "Did you mean 'MooncakeConnector'"),
        ("EXAMPLECONNECTOR", r"Did you mean 'ExampleConnector'\? Known"),
        ("multi", r"Did you mean 'MultiConnector'\? Known"),
        ("MyConnector", r"there is no KV connector 'MyConnector'\. Known"),
    ],
)
def test_the_hint_is_of_names_that_are_near_without_the_word_all_have(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        KVConnectorFactory().get_connector_class_by_name(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_buffer_device", "cuda"),
        ("kv_buffer_size", 2e9),
        ("kv_rank", 0),
        ("kv_parallel_size", 2),
        ("kv_ip", "10.0.0.1"),
        ("kv_port", 1),
    ],
)
def test_fields_that_nothing_reads_are_refused(field: str, value: object) -> None:
    """Our own connectors read none of them; an outside one may."""
    own = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"script": Script()},
        **{field: value},  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match=f"ScriptedConnector does not read {field}; none of"):
        KVConnectorFactory().create_connector(EngineConfig(kv_transfer_config=own), WORKER, CACHE)
    outside = dataclasses.replace(own, kv_connector_module_path="factory_plugin")
    config = EngineConfig(kv_transfer_config=outside)
    connector = KVConnectorFactory().create_connector(config, WORKER, CACHE)
    assert getattr(connector._kv_transfer_config, field) == value


@pytest.mark.parametrize(
    ("name", "layout"), [("Base", "NHD"), ("Heads", "NHD"), ("HeadsFirst", "HND")]
)
def test_the_required_layout_is_asked_of_the_class(name: str, layout: str) -> None:
    assert KVConnectorFactory().required_layout(config_of(name)) == layout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Sideways", "Sideways needs the KV-cache layout 'DHN'.* may return 'NHD', 'HND' or None"),
        ("NoLayout", "NoLayout.get_required_kvcache_layout raised KeyError: 'layout'"),
        ("Particular", "^set page_kind$"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused(name: str, message: str) -> None:
    with pytest.raises(InterlaceError, match=message):
        KVConnectorFactory().required_layout(config_of(name))


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_left_out_for_a_connector_that_needs_its_layer_hooks(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    factory = KVConnectorFactory()
    layerwise, plain = (
        config_of("Layerwise").kv_transfer_config,
        config_of("Base").kv_transfer_config,
    )
    assert layerwise is not None
    assert plain is not None
    assert factory.graph_mode(plain, mode) == mode
    assert not caplog.text
    assert factory.graph_mode(layerwise, mode) == "PIECEWISE"
    assert f"Layerwise needs its layer hooks: PIECEWISE replaces {mode}" in caplog.text
    for other in (None, "NONE", "PIECEWISE"):
        assert factory.graph_mode(layerwise, other) == other


def test_a_name_is_registered_once() -> None:
    factory = KVConnectorFactory()
    with pytest.raises(ValueError, match="'ScriptedConnector' is registered already"):
        factory.register_connector("ScriptedConnector", "factory_plugin", "Base")


def test_two_factories_share_nothing() -> None:
    KVConnectorFactory().register_connector("Mine", "factory_plugin", "Base")
    assert "Mine" not in KVConnectorFactory().known_names


def test_the_module_path_wins_over_the_registry() -> None:
    assert type(make("ScriptedConnector")).__module__ == "factory_plugin"


@pytest.mark.parametrize(
    "name",
    ["Base", "Renamed", "Star", "StarStar", "KeywordOnly", "Fourth", "Loose", "ByPlace", "Heads"],
)
@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_the_third_argument_arrives(name: str, role: KVConnectorRole) -> None:
    connector = make(name, role)
    assert connector.role is role
    assert connector._kv_cache_config is CACHE


def test_a_class_with_two_arguments_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    factory = KVConnectorFactory()
    with caplog.at_level(logging.WARNING):
        for role in (SCHEDULER, WORKER):
            connector = factory.create_connector(config_of("Old"), role, CACHE)
            assert connector.role is role
            assert connector._kv_cache_config is None
    assert caplog.text.count("deprecated") == 1
    assert caplog.text.count("Old was made without a kv_cache_config") == 2


def test_compat_says_which_signature_a_class_has() -> None:
    factory = KVConnectorFactory()
    for name, is_old in (("Old", True), ("Base", False)):
        ktc = config_of(name).kv_transfer_config
        assert ktc is not None
        cls, found = factory._get_connector_class_with_compat(ktc)
        assert (cls.__name__, found) == (name, is_old)


@pytest.mark.parametrize(
    ("name", "module_path", "message"),
    [
        (
            "ExampleConector",
            None,
            "Did you mean 'ExampleConnector'.* Known: DecodeBench",
        ),
        ("Zzz", None, "no KV connector 'Zzz'. Known: .* set kv_connector_module_path"),
        ("Base", "no_such_plugin", "'no_such_plugin' .* cannot be imported: ModuleNotFoundError"),
        ("Base", "factory_broken_plugin", "cannot be imported: ZeroDivisionError"),
        ("Base", ".relative", "cannot be imported: TypeError"),
        ("Bas", "factory_plugin", "has no 'Bas'; its connectors: Base, ScriptedConnector, Old"),
        ("Base", "factory_empty_plugin", "has no 'Base'; it has no connectors"),
        ("number", "factory_plugin", "factory_plugin.number is 3, not a KV connector"),
        ("Stranger", "factory_plugin", "is the class Stranger, not a KV connector"),
        ("Incomplete", "factory_plugin", "Incomplete lacks build_connector_meta, wait_for_save:"),
        ("KVConnectorBase_V1", "factory_plugin", "KVConnectorBase_V1 lacks build_connector_meta"),
        ("Greedy", "factory_plugin", "Greedy could not be made in the role WORKER: TypeError.*mor"),
        ("Raises", "factory_plugin", "Raises could not be made in the role WORKER: OSError: no su"),
        (None, None, "set kv_connector"),
    ],
)
def test_what_cannot_be_used_is_refused(
    name: str | None, module_path: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        KVConnectorFactory().create_connector(config_of(name, module_path), WORKER, CACHE)
    assert isinstance(caught.value, ValueError)


def test_the_cause_is_chained() -> None:
    with pytest.raises(ConfigError) as caught:
        make("Raises")
    assert isinstance(caught.value.__cause__, OSError)


def test_our_own_errors_come_out_as_they_are() -> None:
    with pytest.raises(ModelError, match=r"^another model$"):
        make("RaisesOurs")


def test_without_a_transfer_config_there_is_nothing_to_make() -> None:
    with pytest.raises(ConfigError, match="set kv_transfer_config"):
        KVConnectorFactory().create_connector(EngineConfig(), WORKER, CACHE)


def choosy(mood: str, name: str = "Choosy") -> EngineConfig:
    config = config_of(name)
    assert config.kv_transfer_config is not None
    options = {"mood": mood}
    transfer = dataclasses.replace(config.kv_transfer_config, kv_connector_extra_config=options)
    return config.with_connector(transfer)


def test_a_class_validates_its_options_and_nothing_is_made() -> None:
    factory = KVConnectorFactory()
    factory.validate_config(choosy("good"))
    for name in ("Choosy", "Follower"):
        with pytest.raises(ConfigError, match=r"^set a good mood$"):
            factory.validate_config(choosy("bad", name))
    said = "Choosy could not validate its options: KeyError: 'mood'"
    with pytest.raises(ConfigError, match=said):
        factory.validate_config(choosy("odd"))


def test_a_method_of_that_name_is_something_else() -> None:
    KVConnectorFactory().validate_config(choosy("bad", "Namesake"))


def test_a_constructor_of_its_own_may_know_more_options() -> None:
    KVConnectorFactory().validate_config(choosy("bad", "Taker"))


def test_what_a_class_need_not_know_is_validated_too() -> None:
    factory = KVConnectorFactory()
    with pytest.raises(ConfigError, match="there is no KV connector 'Nobody'"):
        factory.validate_config(config_of("Nobody", None))
    with pytest.raises(ConfigError, match="set kv_transfer_config"):
        factory.validate_config(EngineConfig())
    own = KVTransferConfig(kv_connector="PipelineConnector", kv_role="kv_both", kv_ip="10.0.0.1")
    with pytest.raises(ConfigError, match="PipelineConnector does not read kv_ip"):
        factory.validate_config(EngineConfig(kv_transfer_config=own))
