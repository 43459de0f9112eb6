"""NaN and Inf: one run finds every module that has them; shards that do not change by --keep are used again."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import Array, all_bytes, llama, random, write_checkpoint

MANY_PIECES = Resources(workers=3, max_memory=1 << 28, sync=False, chunk=1500)
ONE = Resources(workers=1, max_memory=1 << 28, sync=False)

TARGETS = {
    "nvfp4": Options(method="amax"),
    "mxfp4": Options(to="mxfp4", layout="compressed-tensors"),
}


def damaged() -> dict[str, Array]:
    """Three bad modules: two in the first of four shards, of which one has a partner in the third; one in the last."""
    tensors = llama()
    tensors["model.layers.0.mlp.down_proj.weight"][5, 7] = np.nan
    tensors["model.layers.0.mlp.down_proj.weight"][40:42, 3] = np.nan
    tensors["model.layers.0.self_attn.k_proj.weight"][31, 63] = -np.inf
    tensors["model.layers.1.self_attn.o_proj.weight"][0, :2] = (np.inf, np.nan)
    return tensors


BAD = {
    "model.layers.0.mlp.down_proj": "holds NaN (3 of 6,144 values, the first at row 5, column 7)",
    "model.layers.0.self_attn.k_proj": "holds Inf (1 of 2,048 values, the first at row 31, column 63)",
    "model.layers.1.self_attn.o_proj": "holds NaN and Inf (1 + 1 of 4,096 values, the first at row 0, column 0)",
}


def refusal(source: Path, destination: Path, options: Options, resources: Resources = ONE) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(make_plan(source, options), destination, resources)
    return str(caught.value)


def finished(destination: Path) -> set[str]:
    lines = (destination / ".halfbyte" / "journal.jsonl").read_text().splitlines()
    return {json.loads(line)["name"] for line in lines[1:]}


@pytest.mark.parametrize("resources", [ONE, MANY_PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("target", TARGETS)
def test_all_bad_modules_are_named_at_once(tmp_path: Path, target: str, resources: Resources) -> None:
    source = write_checkpoint(tmp_path / "s", damaged())
    message = refusal(source, tmp_path / "d", TARGETS[target], resources)
    assert message.startswith("3 modules have no usable scale:\n")
    assert [line.strip() for line in message.splitlines()[1:4]] == [f"{module} {text}" for module, text in BAD.items()]
    assert " ".join(f"--keep {module}" for module in BAD) in message
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}


@pytest.mark.parametrize("resources", [ONE, MANY_PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("target", TARGETS)
def test_shards_that_stay_the_same_are_used_again(tmp_path: Path, target: str, resources: Resources) -> None:
    options = TARGETS[target]
    source = write_checkpoint(tmp_path / "s", damaged(), shards=6)
    destination = tmp_path / "d"
    message = refusal(source, destination, options, resources)
    good = finished(destination)
    assert 1 <= len(good) < 6
    work = {path.name for path in (destination / ".halfbyte").iterdir()}
    assert work == {"journal.jsonl", *good}  # nothing half written stays behind
    before = {name: (destination / ".halfbyte" / name).stat().st_mtime_ns for name in good}
    words = shlex.split(next(line for line in message.splitlines() if "--keep" in line))
    keep = tuple(word for last, word in itertools.pairwise(words) if last == "--keep")
    plan = make_plan(source, Options(options.to, options.layout, options.method, rules=Rules(keep=keep)))
    outcome = run(plan, destination, resources)
    assert (outcome.shards_found, outcome.shards_written) == (len(good), 6 - len(good))
    assert {name: (destination / name).stat().st_mtime_ns for name in good} == before
    run(plan, tmp_path / "fresh", resources)
    assert all_bytes(destination) == all_bytes(tmp_path / "fresh")


def test_values_of_fp8_sources(tmp_path: Path) -> None:
    weights = random(0, 64, 64, dtype=ml_dtypes.float8_e4m3fn)
    weights[3, 9] = np.nan
    scales = np.ones((1, 1), np.float32)
    name = "model.layers.0.mlp.down_proj"
    other = "model.layers.1.mlp.down_proj"
    tensors: dict[str, Array] = {
        f"{name}.weight": weights,
        f"{name}.weight_scale_inv": scales,
        f"{other}.weight": random(1, 64, 64, dtype=ml_dtypes.float8_e4m3fn),
        f"{other}.weight_scale_inv": scales * np.float32(np.inf),
    }
    message = refusal(write_checkpoint(tmp_path / "s", tensors), tmp_path / "d", Options(method="amax"))
    assert f"{name} holds NaN (1 of 4,096 values, the first at row 3, column 9)" in message
    assert f"{other} holds " in message


def test_experts_are_kept_by_the_layer(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": random(expert, 32, 32)
        for expert in range(3)
        for name in ("gate_proj", "up_proj", "down_proj")
    } | {"model.layers.1.mlp.down_proj.weight": random(7, 32, 32)}
    for expert in (1, 2):
        tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"][1, 1] = np.nan
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "qwen3_moe"})
    message = refusal(source, tmp_path / "d", Options(method="amax"))
    assert message.count("up_proj holds NaN") == 2
    assert "add to the same command: --keep 'model.layers.0.mlp.experts.*'\n" in message
    kept = Options(method="amax", rules=Rules(keep=("model.layers.0.mlp.experts.*",)))
    run(make_plan(source, kept), tmp_path / "d", ONE)


def test_the_place_in_stacked_experts(tmp_path: Path) -> None:
    stack = random(0, 4, 32, 64)
    stack[2, 5, 6] = np.inf
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": random(1, 4, 64, 64),
        "model.layers.0.mlp.experts.down_proj": stack,
    }
    config = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    message = refusal(source, tmp_path / "d", Options(method="amax"))
    assert (
        "model.layers.0.mlp.experts.down_proj holds Inf (1 of 8,192 values, the first at expert 2, row 6, column 5)"
        in message
    )
