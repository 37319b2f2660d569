"""`interlace bench`: options, output and progress, without a model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from interlace.bench.report import Check, Report, Row
from interlace.bench.spread import Spread
from interlace.cli import bench, bench_output
from interlace.cli.bench_options import engine_settings, parse_contexts, parse_counts
from interlace.cli.bench_output import StillProgress, check_json_target, show
from interlace.engine.errors import ConfigError

REPORT = Report(
    "decode",
    {"model": "tiny"},
    {"cores": 2},
    (Row("ours", {"tokens/s": Spread.of([4.0])}),),
    (Check("worst event-loop lag, ms", 1.0, at_most=20.0),),
)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("1,8", (1, 8)), (" 8 , 1,8", (8, 1)), ("16", (16,))]
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts("--batch-sizes", text, 16) == counts


@pytest.mark.parametrize("text", ["", "0", "1,", "x", "17", "-1", "1;2", "1.5"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="from 1 to 16"):
        parse_counts("--batch-sizes", text, 16)


def test_prompts_have_two_tokens_at_least() -> None:
    assert parse_contexts("2,2000") == (2, 2000)
    with pytest.raises(typer.BadParameter, match="from 2 to"):
        parse_contexts("1")


def test_json_to_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(REPORT, "-")
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][0]["case"] == "ours"
    assert "tokens/s" in err


def test_json_to_a_file_beside_a_plain_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(REPORT, str(tmp_path / "r.json"))
    out, err = capsys.readouterr()
    assert "tokens/s" in out
    assert "\033" not in out
    assert err == ""
    assert json.loads((tmp_path / "r.json").read_text())["benchmark"] == "decode"


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_json_target(None)
    check_json_target("-")
    check_json_target(str(tmp_path / "new.json"))
    for target in (tmp_path, tmp_path / "missing" / "r.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_json_target(str(target))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_goes_away() -> None:
    stream = Terminal()
    with StillProgress(stream).task("decode", 4) as advance:
        advance(1)
        advance(3)
    text = stream.getvalue()
    assert "[" + "#" * bench_output.BAR_WIDTH + "] 4/4" in text
    assert text.endswith("\r\033[2K")


def test_progress_elsewhere_is_one_plain_line() -> None:
    stream = io.StringIO()
    with StillProgress(stream).task("decode", 4) as advance:
        advance(1)
    assert stream.getvalue() == "decode ...\n"


def test_the_schedule_benchmark_runs(tmp_path: Path) -> None:
    target = tmp_path / "schedule.json"
    arguments = ["schedule", "--requests", "4", "--steps", "3", "--json", str(target)]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 running requests" in result.output
    figures = json.loads(target.read_text())["rows"][0]["figures"]
    assert len(figures["schedule() ms"]["samples"]) == 3


def test_a_folder_for_kv_that_is_not_there_is_refused_before_anything_is_loaded() -> None:
    result = CliRunner().invoke(bench.app, ["kv", "--kv-dir", "no/such", "--model", "no such"])
    assert isinstance(result.exception, ConfigError)
    assert "no files can be kept in no/such (No such file or directory)" in str(result.exception)


def test_bad_options_of_a_connector_are_refused_before_anything_is_loaded() -> None:
    options = (
        '{"kv_connector": "PipelineConnector", "kv_role": "kv_both",'
        ' "kv_connector_extra_config": {"host_byte": 1}}'
    )
    arguments = ["decode", "--device", "cpu", "--model", "no such"]
    result = CliRunner().invoke(bench.app, [*arguments, "--kv-transfer-config", options])
    assert isinstance(result.exception, ConfigError)
    assert "Did you mean 'host_bytes'" in str(result.exception)


def test_an_experiment_that_does_not_exist_is_refused() -> None:
    result = CliRunner().invoke(bench.app, ["kv", "--only", "savings", "--model", "no such"])
    assert result.exit_code == 2
    assert "'savings' is none of" in result.output


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_two_engines_never_share_a_connector_s_files(command: str) -> None:
    arguments = [command, "--kv-dir", "d", "--max-inflight-steps", "1,2", "--model", "no such"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 2
    assert "give one depth" in " ".join(result.output.replace("\u2502", " ").split())


def test_options_come_to_the_engine_s() -> None:
    settings = engine_settings(
        "m",
        device="cpu",
        dtype="bfloat16",
        max_model_len=300,
        max_num_batched_tokens=64,
        cudagraph_mode=None,
        max_inflight_steps="1,2",
        request_tokens=200,
    )
    configs = [config for _, config in settings.engine_configs()]
    assert [config.max_inflight_steps for config in configs] == [1, 2]
    for config in configs:
        assert (config.model, config.device, config.dtype) == ("m", "cpu", "bfloat16")
        assert (config.max_model_len, config.max_num_batched_tokens) == (300, 64)
        assert config.skip_tokenizer_init
        assert config.gpu_memory_utilization is None


@pytest.mark.parametrize("command", ["decode", "prefill", "hit"])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--cudagraph-mode", "FULL"], "needs a CUDA device"),
        (["--cudagraph-mode", "SOME"], "cudagraph_mode"),
        (["--dtype", "int8"], "dtype"),
    ],
)
def test_what_the_engine_refuses_is_refused_before_a_model_is_looked_for(
    command: str, options: list[str], problem: str
) -> None:
    arguments = [command, "--device", "cpu", "--model", "no such", *options]
    result = CliRunner().invoke(bench.app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)


@pytest.mark.parametrize("text", ["0", "x", "16,"])
def test_bad_numbers_of_new_tokens(text: str) -> None:
    result = CliRunner().invoke(bench.app, ["hit", "--new", text, "--model", "no such"])
    assert result.exit_code == 2
    assert "--new" in result.output


@pytest.mark.parametrize("command", ["decode", "prefill", "hit", "kv", "schedule"])
def test_help(command: str) -> None:
    result = CliRunner().invoke(bench.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output
