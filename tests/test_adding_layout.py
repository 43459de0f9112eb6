"""docs/adding.md, "A layout", followed with an invented one: one description, one line in the table.

Convert writes it, verify checks it, convert reads it back, online writes the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.description import Claim, Json, Layout, PartRule, Reader, Setting, Storage, texts
from halfbyte.models.partners import served_members
from halfbyte.online import Config, quantize_named
from halfbyte.testing import assert_same_bits
from halfbyte.verify import summarize, verify
from tests.checkpoint.toy import llama, read_checkpoint, write_checkpoint

# --- what docs/adding.md puts into layouts/invented.py ---

MATRIX = Storage(
    name="nvfp4 (invented)",
    layout="invented",
    format="nvfp4",
    block=16,
    parts=(
        PartRule("codes", ".nibbles", ("U8",), ("rows", "packed")),
        PartRule("scales", ".steps", ("F8_E4M3",), ("blocks", "rows")),  # transposed, which no other layout does
        PartRule("divisor", ".unit", ("F32",), (1,)),
        PartRule("input_divisor", ".input_unit", ("F32",), (1,), optional=True),
    ),
)


def write_config(setting: Setting) -> dict[str, Any]:
    return {
        "quant_method": "invented",
        "inputs": setting.activations == "static",
        "plain_modules": list(setting.excluded),
    }


def read_config(config: Json) -> Claim:
    return Claim("invented", bool(config["inputs"]), ignore=texts(config["plain_modules"]), formats=("nvfp4",))


def listed(served: str, names: Sequence[str]) -> bool:
    """This server knows full names only, and asks for all modules that it fuses."""
    return all(module in names for module in served_members(served))


INVENTED = Layout(
    name="invented",
    quant_method="invented",
    storages=(MATRIX,),
    write_config=write_config,
    read_config=read_config,
    readers=(Reader("an invented server", listed),),
)

# --- the line in layouts/__init__.py, for the length of a test ---


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "invented", INVENTED)


ONE = Resources(workers=1, max_memory=1 << 26, sync=False, chunk=3000)


def convert(source: Path, folder: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    run(make_plan(source, Options(**options)), folder, ONE)
    return read_checkpoint(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama(), shards=3)


def test_convert_writes_it(tmp_path: Path, source: Path) -> None:
    made = convert(source, tmp_path / "made", layout="invented", activations="unit")
    known = convert(source, tmp_path / "known", layout="compressed-tensors", activations="unit")
    module = "model.layers.1.mlp.down_proj"
    assert_same_bits(made[f"{module}.nibbles"], known[f"{module}.weight_packed"])
    assert_same_bits(made[f"{module}.steps"], np.ascontiguousarray(known[f"{module}.weight_scale"].T))
    assert_same_bits(made[f"{module}.unit"], known[f"{module}.weight_global_scale"])
    assert_same_bits(made[f"{module}.input_unit"], known[f"{module}.input_global_scale"])
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "invented", "inputs": True, "plain_modules": ["lm_head"]}


def test_verify_checks_it(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "made", layout="invented", activations="unit")
    report = verify(tmp_path / "made", source)
    assert report.clean, report.problems
    assert report.kinds == {"nvfp4 (invented)": 14}
    assert 0.05 < max(error.relative for error in report.errors) < 0.15
    assert summarize(tmp_path / "made").quantization.startswith("14 weights nvfp4 (invented); config: invented")


@pytest.mark.parametrize(
    ("names", "rule"), [([], "not-excluded"), (["lm_head", "model.layers.0.mlp.down_proj"], "swallowed")]
)
def test_verify_knows_its_reader(tmp_path: Path, source: Path, names: list[str], rule: str) -> None:
    convert(source, tmp_path / "made", layout="invented")
    path = tmp_path / "made" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["plain_modules"] = names
    path.write_text(json.dumps(config))
    assert [problem.rule for problem in verify(tmp_path / "made").problems if problem.level == "error"] == [rule]


def test_verify_misses_its_parts(tmp_path: Path, source: Path) -> None:
    tensors = convert(source, tmp_path / "made", layout="invented")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    module = "model.layers.0.mlp.down_proj"
    scales = tensors[f"{module}.steps"]
    del tensors[f"{module}.unit"]
    tensors["stray.steps"] = scales
    found = verify(write_checkpoint(tmp_path / "damaged", tensors, config)).problems
    assert {(problem.rule, problem.name) for problem in found} >= {
        ("missing-part", module),
        ("stray-tensor", "stray.steps"),
    }


@pytest.mark.parametrize("options", [{"to": "bf16"}, {"layout": "modelopt"}, {"layout": "compressed-tensors"}])
def test_convert_reads_it_back(tmp_path: Path, source: Path, options: dict[str, str]) -> None:
    """As from a layout that stores the same numbers."""
    convert(source, tmp_path / "made", layout="invented", activations="unit")
    convert(source, tmp_path / "known", layout="compressed-tensors", activations="unit")
    ours = convert(tmp_path / "made", tmp_path / "ours", **options)
    theirs = convert(tmp_path / "known", tmp_path / "theirs", **options)
    assert set(ours) == set(theirs)
    for name, x in theirs.items():
        assert_same_bits(ours[name], x)


def test_online_writes_the_same_bits(tmp_path: Path, source: Path) -> None:
    made = convert(source, tmp_path / "made", layout="invented")
    name = "model.layers.0.mlp.down_proj.weight"
    for part, x in quantize_named([(name, llama()[name])], Rules(), Config(Options(layout="invented"), "llama", 2)):
        assert_same_bits(np.asarray(x).view(made[part].dtype), made[part])
