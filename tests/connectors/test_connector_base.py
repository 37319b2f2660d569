"""The base class: defaults, constructor, metadata, and that it fits the engine's ports."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.connectors.base import (
    CheckSetup,
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import KVCacheBlocks, KVCacheConfig
from interlace.engine.ports import SchedulerConnector, WorkerConnector
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import SchedulerOutput

CACHE = KVCacheConfig(num_blocks=4, kv_cache_groups=())
CONFIG = EngineConfig(
    kv_transfer_config=KVTransferConfig(kv_connector="Plain", kv_role="kv_both"),
)


class Plain(KVConnectorBase_V1):
    """Only what is abstract."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return Metadata()


class Metadata(KVConnectorMetadata):
    pass


class Hybrid(Plain, SupportsHMA):
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def plain(role: KVConnectorRole = KVConnectorRole.WORKER) -> Plain:
    return Plain(CONFIG, role, CACHE)


def test_both_sides_fit_the_engines_ports() -> None:
    scheduler: SchedulerConnector = plain(KVConnectorRole.SCHEDULER)
    worker: WorkerConnector = plain(KVConnectorRole.WORKER)
    assert not worker.has_connector_metadata()
    scheduler.shutdown()


def test_the_abstract_methods_are_the_protocols() -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }


SIGNATURES = {
    "__init__": "vllm_config, role, kv_cache_config=None",
    "register_kv_caches": "kv_caches",
    "register_cross_layers_kv_cache": "kv_cache, attn_backend",
    "set_host_xfer_buffer_ops": "copy_operation",
    "get_handshake_metadata": "",
    "handle_preemptions": "kv_connector_metadata",
    "bind_connector_metadata": "connector_metadata",
    "clear_connector_metadata": "",
    "_get_connector_metadata": "",
    "has_connector_metadata": "",
    "start_load_kv": "forward_context, **kwargs",
    "wait_for_layer_load": "layer_name",
    "save_kv_layer": "layer_name, kv_layer, attn_metadata, **kwargs",
    "wait_for_save": "",
    "get_finished": "finished_req_ids",
    "get_block_ids_with_load_errors": "",
    "get_kv_connector_stats": "",
    "get_kv_connector_kv_cache_events": "",
    "build_connector_worker_meta": "",
    "shutdown": "",
    "get_num_new_matched_tokens": "request, num_computed_tokens",
    "update_state_after_alloc": "request, blocks, num_external_tokens",
    "build_connector_meta": "scheduler_output",
    "update_connector_output": "connector_output",
    "request_finished": "request, block_ids",
    "take_events": "",
    "get_finished_count": "",
    "set_xfer_handshake_metadata": "metadata",
    "reset_cache": "",
}
CLASS_METHODS = {
    "get_required_kvcache_layout": "vllm_config",
    "requires_piecewise_for_cudagraph": "extra_config",
    "build_kv_connector_stats": "data=None",
    "build_prom_metrics": "vllm_config, metric_types, labelnames, per_engine_labelvalues",
}


@pytest.mark.parametrize(("name", "expected"), [*SIGNATURES.items(), *CLASS_METHODS.items()])
def test_every_method_has_the_protocols_arguments(name: str, expected: str) -> None:
    parameters = list(inspect.signature(getattr(KVConnectorBase_V1, name)).parameters.values())
    if name in SIGNATURES:
        assert parameters.pop(0).name == "self"
    plainly = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]
    assert ", ".join(plainly) == expected
    assert getattr(KVConnectorBase_V1, name).__doc__ or name == "__init__", name


def test_nothing_else_is_public() -> None:
    own = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    properties = {"role", "prefer_cross_layer_blocks"}
    extensions = {"lanes", "kv_is_synthetic", "check_setup", "store_fault_kinds"}
    extensions |= {"inject_store_fault", "bind_gpu_block_pool"}
    extensions |= {"get_layer_gates", "get_compute_end", "default_load_failure_policy"}
    extensions |= {"advance_transfers", "get_late_load_errors", "validate_config"}
    extensions |= {"get_transfer_pictures", "record_transfers"}
    assert own - properties - extensions == {
        name for name in (*SIGNATURES, *CLASS_METHODS) if not name.startswith("_")
    }


def test_the_defaults_do_nothing() -> None:
    connector, request = (
        plain(),
        Request("r", [1], SamplingParams(), seed=0, arrival=0, block_size=4),
    )
    copy: CopyBlocksOp = lambda source, target, from_ids, to_ids, direction: None  # noqa: E731
    connector.register_kv_caches({})
    connector.set_host_xfer_buffer_ops(copy)
    connector.handle_preemptions(Metadata())
    connector.update_connector_output(KVConnectorOutput())
    connector.set_xfer_handshake_metadata({})
    connector.record_transfers(None)
    connector.shutdown()
    assert connector.get_finished({"a"}) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.advance_transfers() is False
    assert connector.get_late_load_errors() == set()
    assert connector.get_transfer_pictures() == ()
    assert connector.request_finished(request, [1]) == (False, None)
    assert tuple(connector.take_events()) == ()
    assert connector.prefer_cross_layer_blocks is False
    assert connector.role is KVConnectorRole.WORKER
    assert Plain.check_setup(Path()) == CheckSetup({}, {})
    assert not Plain.kv_is_synthetic
    assert Plain.store_fault_kinds == ()
    with pytest.raises(NotImplementedError, match="Plain declares no store_fault_kinds"):
        connector.inject_store_fault("missing", b"")
    assert connector.reset_cache() is None  # type: ignore[func-returns-value,unused-ignore]
    assert Plain.requires_piecewise_for_cudagraph({}) is False
    assert Plain.get_required_kvcache_layout(CONFIG) is None
    for nothing in (
        connector.get_handshake_metadata(),
        connector.get_kv_connector_stats(),
        connector.get_kv_connector_kv_cache_events(),
        connector.build_connector_worker_meta(),
        connector.get_finished_count(),
        Plain.build_kv_connector_stats(),
        Plain.validate_config(CONFIG),  # type: ignore[func-returns-value,unused-ignore]
        Plain.build_prom_metrics(CONFIG, {}, [], {}),
    ):
        assert nothing is None


def test_the_base_class_has_no_say_in_the_layout() -> None:
    with pytest.raises(TypeError, match="own class"):
        KVConnectorBase_V1.get_required_kvcache_layout(CONFIG)


def test_the_constructor_keeps_what_connectors_look_for() -> None:
    connector = plain()
    assert connector._vllm_config is CONFIG
    assert connector._kv_transfer_config is CONFIG.kv_transfer_config
    assert connector._kv_cache_config is CACHE
    assert connector._role is KVConnectorRole.WORKER
    assert connector._connector_metadata is None


def test_without_a_transfer_config_there_is_no_connector() -> None:
    with pytest.raises(ConfigError, match=r"Plain needs .* kv_transfer_config") as caught:
        Plain(EngineConfig(), KVConnectorRole.WORKER, CACHE)
    assert isinstance(caught.value, ValueError)


def test_without_a_cache_config_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plain()
        assert not caplog.records
        Plain(CONFIG, KVConnectorRole.WORKER)
    assert "Plain was made without a kv_cache_config" in caplog.text


def test_metadata_is_bound_for_one_step() -> None:
    connector, metadata = plain(), Metadata()
    assert not connector.has_connector_metadata()
    connector.bind_connector_metadata(metadata)
    assert connector.has_connector_metadata()
    assert connector._get_connector_metadata() is metadata
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()
    with pytest.raises(ConnectorError, match="Plain asked for its metadata outside of a step"):
        connector._get_connector_metadata()


def test_who_supports_several_groups() -> None:
    hybrid = Hybrid(CONFIG, KVConnectorRole.SCHEDULER, CACHE)
    assert supports_hma(Hybrid)
    assert supports_hma(hybrid)
    assert not supports_hma(Plain)
    assert not supports_hma(plain())


def test_the_protocols_names_need_no_torch() -> None:
    code = (
        "import sys, interlace.connectors as c\n"
        "c.KVConnectorBase_V1, c.KVConnectorFactory, c.KVConnectorRole, c.supports_hma\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
