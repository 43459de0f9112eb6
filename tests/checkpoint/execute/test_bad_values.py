"""NaN and Inf: one run finds every module that has them; shards that do not change by --keep are used again."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute.bad_values import Bad, BadModules, keep_pattern, refuse
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


@pytest.mark.parametrize(("count", "place"), [(1, "row 1, "), (2, "expert 1, row 1, "), (3, "expert 2, row 1, ")])
def test_the_matrix_of_several_is_named(count: int, place: str) -> None:
    """Values and scales; a single matrix has no number."""
    unit: Any = SimpleNamespace(module="m", sources=[SimpleNamespace(rows=2, columns=4)] * count)
    for text in ("values", "scales"):
        found = BadModules()
        if text == "values":
            values = np.zeros((2, 4), np.float32)
            values[1, 3] = np.nan
            found.add_values(unit, count - 1, 0, values)
        else:
            found.add_scales(unit, count - 1, 0, np.array([[1, 2], [3, 255]], np.uint8))
        said = str(found.modules["m"])
        last = f"holds NaN (1 of {8 * count} values, the first at {place}column 3)"
        other = f"has E8M0 scales of 255, which is NaN (1 of {4 * count}, the first at {place}block 1)"
        assert said == (last if text == "values" else other)


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


def test_what_is_said_of_one_module() -> None:
    plain = Bad(1200, False, (0, 3, 4))
    assert str(replace(plain, nan=1)) == "holds NaN (1 of 1,200 values, the first at row 3, column 4)"
    assert str(replace(plain, inf=1000)) == "holds Inf (1,000 of 1,200 values, the first at row 3, column 4)"
    assert str(replace(plain, nan=2, inf=1000)) == (
        "holds NaN and Inf (2 + 1,000 of 1,200 values, the first at row 3, column 4)"
    )
    stacked = Bad(2400, True, (5, 3, 4))
    assert str(replace(stacked, nan=7)) == "holds NaN (7 of 2,400 values, the first at expert 5, row 3, column 4)"
    assert str(replace(stacked, scales=1001)) == (
        "has E8M0 scales of 255, which is NaN (1,001 of 2,400, the first at expert 5, row 3, block 4)"
    )


def unit(module: str, *sizes: tuple[int, int]) -> Any:
    return SimpleNamespace(module=module, sources=[SimpleNamespace(rows=r, columns=c) for r, c in sizes])


def test_pieces_in_any_order_and_twice() -> None:
    """The first place is that of the smallest source, row and column; a piece that comes again counts once."""
    found = BadModules()
    found.refuse()
    one, stack = unit("b.one", (10, 4)), unit("a.stack", (6, 4), (6, 4))
    values = np.zeros((3, 4), np.float32)
    values[1, 2], values[2, 0], values[2, 3] = np.nan, np.inf, -np.inf
    found.add_values(one, 0, 6, values)
    found.add_values(one, 0, 3, values)
    found.add_values(one, 0, 6, values)
    scales = np.zeros((2, 3), np.uint8)
    scales[1, 1:] = 255
    found.add_scales(stack, 1, 4, scales)
    found.add_scales(stack, 0, 4, scales)
    assert found.modules == {
        "a.stack": Bad(36, True, (0, 5, 1), scales=4),
        "b.one": Bad(40, False, (0, 4, 2), nan=2, inf=4),
    }
    assert list(found.modules) == ["a.stack", "b.one"]
    with pytest.raises(CheckpointError) as caught:
        found.refuse()
    assert str(caught.value) == (
        "2 modules have no usable scale:\n"
        "  a.stack has E8M0 scales of 255, which is NaN (4 of 36, the first at expert 0, row 5, block 1)\n"
        "  b.one holds NaN and Inf (2 + 4 of 40 values, the first at row 4, column 2)\n"
        "Repair the source, or add to the same command: --keep a.stack --keep b.one\n"
        "Shards that do not change by this are finished and will be used again."
    )


def test_one_module_and_experts_by_their_layer() -> None:
    bad = Bad(4, False, (0, 0, 0), nan=1)
    with pytest.raises(CheckpointError) as caught:
        refuse({"a b": bad})
    assert str(caught.value).splitlines()[::2] == [
        "1 module has no usable scale:",
        "Repair the source, or add to the same command: --keep 'a b'",
    ]
    with pytest.raises(CheckpointError, match=r"command: --keep 'm\.0\.experts\.\*' --keep m\.0\.up\n"):
        refuse({f"m.0.{name}": bad for name in ("up", "experts.3.up_proj", "experts.4.up_proj")})
    assert keep_pattern("m.0.mlp.experts.3.up_proj") == "m.0.mlp.experts.*"
    refuse({})
