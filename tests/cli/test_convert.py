"""`halfbyte convert`: options, plan, log, errors and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from halfbyte.checkpoint import Options, Plan, Resources, make_plan
from halfbyte.checkpoint import run as run_plan
from halfbyte.checkpoint.execute.destination import only_one
from halfbyte.checkpoint.execute.device import choice
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.cli import app
from halfbyte.cli.app import quoted
from halfbyte.cli.convert_arguments import expand, memory_size
from halfbyte.errors import InputError
from halfbyte.load_check import LoadReport
from tests.checkpoint.toy import all_bytes, llama, random, write_checkpoint

RUNNER = CliRunner()
command = sys.modules["halfbyte.cli.convert"]  # halfbyte.cli.convert is also the name of the function
SMALL = ("--max-memory", "256MB", "--workers", "2", "--device", "cpu")


def convert(*arguments: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["convert", *map(str, arguments), *SMALL])
    return result.exit_code, result.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "s", llama(), shards=2)


def test_a_conversion_and_the_same_again(tmp_path: Path, source: Path) -> None:
    code, output = convert(source, tmp_path / "d")
    assert code == 0, output
    assert "2 shards written" in output
    assert f"Next: halfbyte verify {tmp_path / 'd'}" in " ".join(output.split("\n"))
    run_plan(make_plan(source, Options()), tmp_path / "library", Resources(workers=1, sync=False))
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "library")
    code, output = convert(source, tmp_path / "d")
    assert (code, "is whole already: nothing to do" in output) == (0, True)


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, source: Path) -> None:
    code, output = convert(source, tmp_path / "d", "--dry-run", "--keep", "o_proj", "--activations", "unit")
    assert code == 0
    assert not (tmp_path / "d").exists()
    for text in (
        "quantize: float → nvfp4", "copied as they are", "--keep o_proj", "output head", "groups share a tensor scale",
        "W4A4 with input_scale 1.0", "for buffers", "will be written", "contract modelopt()",
    ):  # fmt: skip
        assert text in output, text


def test_one_shard_and_one_group(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "one", llama(), shards=1)
    code, output = convert(source, tmp_path / "d", "--include", "layers.0.mlp")
    assert (code, "1 shard written" in output, "1 group shares a tensor scale" in output) == (0, True, True)


@pytest.mark.parametrize("dry", [True, False])
def test_notes_and_what_is_not_copied_are_printed_before_the_work(tmp_path: Path, dry: bool) -> None:
    source = write_checkpoint(
        tmp_path / "s", llama(), {"model_type": "nanochat", "architectures": ["NanoChatForCausalLM"]}
    )
    (source / "2_Dense").mkdir()
    shutil.copy(source / "model.safetensors", source / "2_Dense" / "model.safetensors")
    (source / "model.onnx").write_bytes(b"x")
    layout = ("--layout", "compressed-tensors")
    code, output = convert(source, tmp_path / "d", *layout, *(["--dry-run"] if dry else []))
    assert code == 0, output
    lines = output.splitlines()
    assert any(line.startswith("note: transformers (") and "NanoChatForCausalLM" in line for line in lines)
    assert "copied: 2_Dense/model.safetensors (weights in a folder of their own)" in lines
    assert "not copied: model.onnx (the model in another form)" in lines
    _, output = convert(source, tmp_path / "d", *layout, "--dry-run", "--json-log")
    assert any("NanoChatForCausalLM" in note for note in json.loads(output.splitlines()[0])["notes"])


def test_what_is_dropped_is_printed(tmp_path: Path) -> None:
    one, scale = np.ones((32, 32), ml_dtypes.float8_e4m3fn), np.ones((), np.float32)
    tensors = {"a.o_proj.weight": one, "a.o_proj.weight_scale": scale, "a.self_attn.k_scale": scale}
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    code, output = convert(source, tmp_path / "d", "--to", "bf16", "--dry-run")
    assert (code, "dropped: a.self_attn.k_scale (belongs to a quantized cache of keys" in output) == (0, True), output


def test_the_next_command_can_be_pasted(tmp_path: Path, source: Path) -> None:
    code, output = convert(source, tmp_path / "my model")
    assert (code, f"Next: halfbyte verify '{tmp_path / 'my model'}'" in output) == (0, True)
    assert quoted(Path("-d")) == "./-d"  # "Next: halfbyte verify -d" would be an unknown option


def test_dry_run_says_what_the_destination_holds(tmp_path: Path, source: Path) -> None:
    destination = tmp_path / "d"
    assert convert(source, destination, "--dry-run")[1].endswith(f"{destination} will be written anew\n")
    convert(source, destination)
    before = all_bytes(tmp_path)
    code, output = convert(source, destination, "--dry-run")
    assert (code, output.endswith("is whole already: there is nothing to do\n")) == (0, True)
    code, output = convert(source, destination, "--dry-run", "--keep", "o_proj")
    assert code == 2
    assert "output head" in output  # the plan comes first
    assert "DST will be refused: " in output
    assert "holds a finished conversion with other options" in output
    assert convert(source, destination, "--dry-run", "--keep", "o_proj", "--overwrite")[0] == 0
    assert all_bytes(tmp_path) == before


def test_dry_run_says_that_a_conversion_goes_on(tmp_path: Path) -> None:
    tensors = llama()
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    source = write_checkpoint(tmp_path / "s", tensors, shards=5)
    convert(source, tmp_path / "d")
    before = all_bytes(tmp_path / "d")
    code, output = convert(source, tmp_path / "d", "--dry-run", "--keep", "layers.1.mlp.down_proj")
    assert (code, "holds this conversion unfinished: 4 shards are there and will be used" in output) == (0, True)
    code, output = convert(source, tmp_path / "d", "--dry-run", "--json-log")
    line = json.loads(output.splitlines()[-1])
    assert (line["event"], line["continued"], len(line["shards_found"])) == ("destination", True, 4)
    assert all_bytes(tmp_path / "d") == before


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: (path / "notes.txt").write_text("x"), "holds something else (notes.txt)"),
        (lambda path: path.rmdir() or path.write_text("x"), "is a file; give a directory"),
        (lambda path: path.rmdir() or path.symlink_to("nowhere"), "cannot be written: Not a directory"),
    ],
)
def test_dry_run_refuses_what_a_run_refuses(
    tmp_path: Path, source: Path, prepare: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "d").mkdir()
    prepare(tmp_path / "d")
    code, output = convert(source, tmp_path / "d", "--dry-run")
    assert (code, message in output) == (2, True), output
    assert convert(source, tmp_path / "d")[0] == 2


def test_dry_run_sees_a_full_disk_and_another_run(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with only_one(tmp_path / "d", Disk()):
        code, output = convert(source, tmp_path / "d", "--dry-run")
    assert (code, f"another conversion into {tmp_path / 'd'} is running" in output) == (2, True)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    code, output = convert(source, tmp_path / "new" / "d", "--dry-run")
    assert (code, "cannot be written: Permission denied" in output) == (2, True)
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, output = convert(source, tmp_path / "new" / "d", "--dry-run")
    assert (code, "has 1,000 bytes free, but the output needs" in output) == (2, True)
    assert not (tmp_path / "new").exists()


def test_options_reach_the_plan(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def planned(path: Path, options: Options) -> Plan:
        seen.append(options)
        return make_plan(path, Options())

    monkeypatch.setattr(command, "make_plan", planned)
    convert(source, tmp_path / "d", "--dry-run", "--ignore", "lm_head", "vision.*", "--ignore", "x")
    convert(source, tmp_path / "d", "--dry-run", "--modules-from-model", "--trust-remote-code")
    assert seen[0].ignore == ("lm_head", "vision.*", "x")
    assert (seen[0].modules_from_model, seen[0].trust_remote_code) == (False, False)
    assert (seen[1].modules_from_model, seen[1].trust_remote_code) == (True, True)


CLEAN = LoadReport("transformers", "5.0", tensors=47)
FAULTY = LoadReport("transformers", "5.0", tensors=47, missing=("lm_head.weight",))


@pytest.mark.parametrize(("report", "code"), [(CLEAN, 0), (FAULTY, 1)])
def test_a_client_is_asked_at_the_end(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, report: LoadReport, code: int
) -> None:
    asked: list[tuple[Path, str, bool]] = []

    def check(path: Path, client: str, *, trust_remote_code: bool) -> LoadReport:
        asked.append((path, client, trust_remote_code))
        assert (path / "halfbyte.json").exists()
        return report

    monkeypatch.setattr(command, "check_load", check)
    monkeypatch.setattr(command, "check_client", lambda name: None)  # installed or not
    ask = ("--check-load", "transformers")
    found = convert(source, tmp_path / "d", *ask, "--trust-remote-code")
    assert (found[0], report.sentences()[0] in found[1]) == (code, True)
    assert asked == [(tmp_path / "d", "transformers", True)]
    found = convert(source, tmp_path / "d", *ask, "--json-log")
    line = json.loads(found[1].splitlines()[-1])
    assert (found[0], line["event"], line["clean"]) == (code, "load", code == 0)
    found = convert(source, tmp_path / "d", *ask, "--quiet")
    assert (found[0], bool(found[1])) == (code, code == 1)
    asked.clear()
    assert convert(source, tmp_path / "e", *ask, "--dry-run")[0] == 0
    assert asked == []


def test_a_client_that_is_not_installed_is_noticed_before_the_work(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, output = convert(source, tmp_path / "d", "--check-load", "vllm")
    assert (code, "vLLM is not installed in this environment" in output) == (2, True)
    assert not (tmp_path / "d").exists()


def test_the_plan_prints_patterns_and_names_as_they_are(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.mlp[/b].weight": random(5, 16, 24), "a[/c].weight": random(6, 16, 32)}
    source = write_checkpoint(tmp_path / "s", tensors)
    code, output = convert(source, tmp_path / "d", "--keep", "*.[qkv]_proj", "--keep", "a[/]c*")
    assert code == 0, output
    assert "--keep *.[qkv]_proj" in output
    assert "mlp[/b]" in output


def test_names_of_the_miles_converter(tmp_path: Path, source: Path) -> None:
    theirs = ("--num-layers-at-start-in-bf16", 1, "--extra-high-precision-layers-hf", "o_proj", "v_proj")
    assert convert(source, tmp_path / "a", *theirs)[0] == 0
    ours = ("--keep-first", 1, "--keep", "o_proj", "--keep", "v_proj")
    assert convert(source, tmp_path / "b", *ours)[0] == 0
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert convert(source, tmp_path / "c", "--num-layers-at-end-in-bf16", 1, "--quiet") == (0, "")


def test_patterns_after_one_option() -> None:
    assert expand(["s", "d", "--keep", "a", "b", "--to", "mxfp4"]) == [
        "s",
        "d",
        "--keep",
        "a",
        "--keep",
        "b",
        "--to",
        "mxfp4",
    ]
    assert expand(["--keep", "a", "s", "d"]) == ["--keep", "a", "s", "d"]
    assert expand(["--quiet", "s", "d", "--include", "x", "y"]) == [
        "--quiet",
        "s",
        "d",
        "--include",
        "x",
        "--include",
        "y",
    ]
    assert expand(["s", "--to", "nvfp4", "d", "--keep", "x"]) == ["s", "--to", "nvfp4", "d", "--keep", "x"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("2 GiB", 2 << 30), ("512m", 512 * 10**6), ("1e9", 10**9), ("1.5k", 1500), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "0", "2XB", "1.2.3GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="is not a size; examples"):
        memory_size(text)


def test_json_log(tmp_path: Path, source: Path) -> None:
    code, output = convert(source, tmp_path / "d", "--json-log")
    lines = [json.loads(line) for line in output.splitlines()]
    kinds = [line["event"] for line in lines]
    assert (code, kinds[0], kinds[-1]) == (0, "plan", "finished")
    assert kinds.count("shard") == 2
    assert lines[0]["shards"][0]["tensors"][0]["offsets"]
    assert lines[-1]["shards_written"] == 2
    code, output = convert(source, source, "--json-log")
    assert (code, json.loads(output)["event"]) == (2, "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "int4"), "unknown target format 'int4'"),
        (("--method", "best"), "unknown method 'best'; known: amax, four_six, gptq, hessian, optimal, sweep"),
        (("--layout", "awq"), "unknown layout 'awq'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--device", "cuda:x"), "unknown device 'cuda:x'"),
        (("--max-memory", "lots"), "is not a size"),
        (("--max-memory", "1e400"), "is not a size"),
        (("--max-memory", "1kB"), "is too little"),
        (("--max-gpu-memory", "lots"), "--max-gpu-memory 'lots' is not a size"),
        (("--keep", ""), "an empty pattern fits every module"),
        (("--experts-only", "--include", "x"), "exclude each other"),
        (("--include", "nothing"), "nothing to convert"),
        (("--ignore", ""), "--ignore needs a name"),
        (("--check-load", "sglang"), "unknown client 'sglang'; known: transformers, vllm"),
        (("--trust-remote-code",), "belongs to --modules-from-model or --check-load"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, source: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "d"), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "d").exists()


def test_cuda_that_is_not_there(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "d"), "--device", "cuda"])
    assert result.exit_code == 2
    assert "device cuda: torch finds no CUDA device here; use --device cpu" in result.output


def test_auto_says_why(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "driver_present", lambda: False)
    result = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "d"), "--workers", "2", "--dry-run"])
    assert "2 workers on cpu (there is no NVIDIA driver); " in " ".join(result.output.split())
    result = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "d"), "--dry-run", "--json-log"])
    found = json.loads(result.output.splitlines()[0])
    assert (found["device"], found["device_reason"]) == ("cpu", "there is no NVIDIA driver")


def test_exit_codes_of_a_destination_in_use(tmp_path: Path) -> None:
    """A refusal is 2, even if there is an unfinished conversion; an error during the work is 1."""
    tensors = llama()
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    source = write_checkpoint(tmp_path / "s", tensors, shards=2)
    assert convert(source, tmp_path / "d")[0] == 1
    assert convert(source, tmp_path / "d", "--method", "amax")[0] == 2
    assert convert(source, tmp_path / "d")[0] == 1
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "notes.txt").write_text("x")
    assert convert(source, tmp_path / "e")[0] == 2


def test_an_error_while_working_keeps_what_is_done(tmp_path: Path) -> None:
    tensors = llama()
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    source = write_checkpoint(tmp_path / "s", tensors, shards=2)
    code, output = convert(source, tmp_path / "d", "--quiet")
    assert code == 1
    assert "model.layers.1.mlp.down_proj holds NaN" in " ".join(output.split())


SLOW_DISK = """
import signal, sys, time
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.cli import app

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs jobs in the background has it ignored
Disk.flush = lambda disk, file: time.sleep(0.1)
app()
"""


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_ctrl_c_says_how_to_continue(tmp_path: Path, inherited: signal.Handlers) -> None:
    """A real signal to a real process that has far to go, whatever its parent does about that signal."""
    source = write_checkpoint(tmp_path / "s", llama(), shards=20)
    program = [sys.executable, "-c", SLOW_DISK, "convert", str(source), str(tmp_path / "d"), "--method", "amax"]
    with subprocess.Popen(
        [*program, "--workers", "1", "--json-log"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "shard":
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, rest
    assert "the same command continues from there" in json.loads(rest.splitlines()[-1])["message"]
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
    outcome = run_plan(make_plan(source, Options(method="amax")), tmp_path / "d", Resources(workers=2, sync=False))
    assert 1 <= outcome.shards_found < 20
