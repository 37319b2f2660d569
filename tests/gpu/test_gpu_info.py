"""`interlace info` on a real GPU: every fact is found, and none of the GPU's settings changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.hardware.cuda import external_events, registration
from interlace.layers.hardware.nvidia import Nvidia, nvidia
from interlace.layers.hardware.survey import TMPFS, survey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def settings() -> list[tuple[object, object]]:
    found = nvidia()
    assert isinstance(found, Nvidia)
    assert isinstance(found.gpus, tuple)
    return [(gpu.persistence_mode, gpu.mig_mode) for gpu in found.gpus]


def test_a_survey_finds_the_gpu_and_changes_nothing() -> None:
    before = settings()
    found = survey(Silent())
    assert settings() == before
    assert found.torch.device == torch.cuda.get_device_name(0)
    assert isinstance(found.nvidia, Nvidia)
    assert isinstance(found.nvidia.driver, str)
    assert isinstance(found.nvidia.gpus, tuple)
    major, minor = torch.cuda.get_device_capability(0)
    assert f"{major}.{minor}" in {gpu.compute_capability for gpu in found.nvidia.gpus}
    for gpu in found.nvidia.gpus:
        assert isinstance(gpu.sm_clock.max_mhz, int)
        assert isinstance(gpu.pcie.max_generation, int)


def test_copies_are_as_fast_as_any_pcie_gpu_has_them() -> None:
    speeds = survey(Silent()).copies
    for speed in (speeds.host_to_device, speeds.device_to_host, speeds.host_to_host):
        assert isinstance(speed, float)
        assert 5e8 < speed < 1e12
    assert isinstance(speeds.device_to_device, float)
    assert 2e10 < speeds.device_to_device < 2e13


def test_a_graph_waits_for_an_event_from_outside() -> None:
    assert external_events() is True
    assert external_events() is True, "the first attempt left something behind"


def test_a_file_in_memory_can_be_registered(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    assert registration(TMPFS).flags == "default"
    registration(tmp_path)  # the file system decides; a refusal must not break what follows
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_the_command_ends_well() -> None:
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["external_events"] is True
    assert facts["copies"]["host_to_device"] > 0
