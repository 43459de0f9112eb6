"""What options mean, without a checkpoint: target, statistics, and the scales of activations, message by message."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options
from halfbyte.checkpoint.plan.target import MEANING, Target, activations_of, by_statistics, input_scales, resolve_target
from halfbyte.errors import CheckpointError, HalfbyteError, InputError, UnknownNameError, UnsupportedError
from halfbyte.models.families import UNKNOWN, Family, find_family
from halfbyte.smoothing import Smoothing

DEEPSEEK_V4, GPT_OSS = find_family("deepseek_v4"), find_family("gpt_oss")
HERE = Path("stats")


def target(family: Family = UNKNOWN, **options: Any) -> Target:
    return resolve_target(Options(**options), family)


def refused(kind: type[HalfbyteError], options: Options, family: Family = UNKNOWN) -> str:
    with pytest.raises(kind) as caught:
        resolve_target(options, family)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # format, layout, contract, method, repairs
        ({}, ("nvfp4", "modelopt", "modelopt", "optimal", True)),
        ({"to": "mxfp4", "layout": "compressed-tensors"}, ("mxfp4", "compressed-tensors", "ocp", None, True)),
        ({"to": "bf16"}, (None, "modelopt", None, None, False)),
        ({"contract": "modelopt"}, ("nvfp4", "modelopt", "modelopt", None, True)),
        ({"contract": "torchao"}, ("nvfp4", "modelopt", "torchao", None, False)),
        ({"contract": "torchao", "method": "optimal"}, ("nvfp4", "modelopt", "torchao", "optimal", False)),
        ({"contract": "transformer_engine"}, ("nvfp4", "modelopt", "miles", None, False)),
        ({"method": "amax"}, ("nvfp4", "modelopt", "modelopt", "amax", True)),
        ({"method": "four_six:mse:256"}, ("nvfp4", "modelopt", "modelopt", "four_six:mse:256", True)),
        ({"method": "gptq", "statistics": HERE}, ("nvfp4", "modelopt", "modelopt", "optimal", True)),
        ({"method": hb.Gptq(), "statistics": HERE}, ("nvfp4", "modelopt", "modelopt", "optimal", True)),
        ({"solved": HERE}, ("nvfp4", "modelopt", "modelopt", "optimal", True)),
        (
            {"method": "amax", "statistics": HERE, "activations": "stats"},
            ("nvfp4", "modelopt", "modelopt", "amax", True),
        ),
        (
            {"to": "mxfp4", "layout": "compressed-tensors", "contract": "ocp"},
            ("mxfp4", "compressed-tensors", "ocp", None, True),
        ),
    ],
)
def test_targets(options: dict[str, Any], wanted: tuple[object, ...]) -> None:
    found = target(**options)
    format, contract = found.format and found.format.name, found.contract and found.contract.name
    assert (format, found.layout.name, contract, found.method, found.repairs) == wanted


def test_a_family_that_stays_fp8_has_a_layout_of_its_own() -> None:
    assert target(DEEPSEEK_V4).layout.replaces == "modelopt"
    assert target(DEEPSEEK_V4, to="bf16").layout.name == "modelopt"
    assert refused(UnsupportedError, Options(layout="compressed-tensors"), DEEPSEEK_V4) == (
        "DeepSeek-V4 stays FP8 outside its experts, which no reader of layout compressed-tensors expects; "
        "use --to nvfp4 --layout modelopt"
    )


def test_a_layout_for_one_kind_of_stack() -> None:
    for family in (GPT_OSS, UNKNOWN):
        assert target(family, to="mxfp4", layout="gpt-oss").layout.name == "gpt-oss"
    assert refused(UnsupportedError, Options(to="mxfp4", layout="gpt-oss"), find_family("mixtral")) == (
        "layout gpt-oss is read for gpt-oss models only, not for Mixtral; use --layout compressed-tensors"
    )


def test_formats_of_a_layout() -> None:
    assert refused(UnsupportedError, Options(layout="gpt-oss")) == (
        "layout gpt-oss holds mxfp4, not nvfp4; layouts: modelopt (nvfp4), compressed-tensors (nvfp4, mxfp4), "
        "gpt-oss (mxfp4)"
    )
    assert refused(UnknownNameError, Options(to="fp8")) == "unknown target format 'fp8'; known: bf16, mxfp4, nvfp4"


@pytest.mark.parametrize("options", [{"statistics": HERE}, {"solved": HERE}, {"smoothing": HERE}])
def test_what_belongs_to_fp4_alone(options: dict[str, Any]) -> None:
    wanted = "statistics, solved weights and smoothing belong to conversions to FP4, not to bf16"
    assert refused(InputError, Options(to="bf16", **options)) == wanted


@pytest.mark.parametrize(
    ("contract", "named"),
    [("qwantize", "qwantize()"), (replace(hb.contracts.modelopt(), scaling="row"), "modelopt()")],
)
def test_contracts_without_a_scale_of_the_tensor(contract: Any, named: str) -> None:
    found = refused(UnsupportedError, Options(contract=contract))
    assert found == f"contract {named} has no scale of the whole tensor to store beside the blocks"


@pytest.mark.parametrize(
    "given",
    [
        {"row_scaled_nvfp4": True},
        {"nvfp4_use_4over6": True},
        {"tile": (16, 16)},
        {"columnwise": True, "with_rht": True},
    ],
)
def test_options_of_transformer_engine_that_no_checkpoint_holds(given: dict[str, Any]) -> None:
    """They were dropped without a word, as if the plain contract had been asked for."""
    contract = hb.contracts.transformer_engine(**given)
    assert refused(UnsupportedError, Options(contract=contract)) == (
        f"contract {contract!r}: a checkpoint holds TransformerEngine's blocks as miles stores them, which has none of "
        "these options; leave them out (4over6 is a method: four_six)"
    )
    plain = target(contract=hb.contracts.transformer_engine(), method="four_six")
    assert plain.contract == hb.contracts.miles()


def test_methods_that_no_conversion_has() -> None:
    assert refused(UnknownNameError, Options(method="best")) == (
        "unknown method 'best'; known: amax, four_six, gptq, hessian, optimal, sweep"
    )
    assert refused(UnknownNameError, Options(to="mxfp4", layout="compressed-tensors", method="best:3")) == (
        "unknown method 'best:3'; known: amax, gptq, hessian, optimal"
    )
    found = refused(UnsupportedError, Options(method="hessian:descent"))
    assert re.fullmatch(r"method 'hessian:descent' needs .*; convert has amax, four_six, sweep, optimal", found)
    assert refused(UnsupportedError, Options(method="hessian")) == GPTQ.replace("gptq", "hessian")


GPTQ = "method 'gptq' needs statistics of the inputs of every layer: --stats DIR (`halfbyte calibrate` makes them)"
SOLVED = "solved weights have their codes already: leave out the method and the statistics"
SERVE = "statistics serve --method gptq and --method hessian, not {}; and --activations stats, and --smooth"
NEEDS = "--activations stats needs statistics: --stats DIR (`halfbyte calibrate` makes them)"
SMOOTH = Smoothing(())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"method": "amax"}, False),
        ({"method": "gptq", "statistics": HERE}, True),
        ({"method": "hessian", "statistics": HERE}, True),
        ({"method": hb.Gptq(), "statistics": HERE, "strict_statistics": True}, True),
        ({"method": "amax", "statistics": HERE, "activations": "stats"}, False),
        ({"statistics": HERE, "smoothing": SMOOTH}, False),
        ({"method": "gptq", "statistics": HERE, "smoothing": SMOOTH}, True),
        ({"solved": HERE}, True),
        ({"solved": HERE, "statistics": HERE, "activations": "stats"}, True),
        ({"solved": HERE, "statistics": HERE, "smoothing": SMOOTH}, True),
        ({"to": "mxfp4", "activations": "stats"}, False),
        ({"method": "hessian"}, GPTQ.replace("gptq", "hessian")),
        ({"solved": HERE, "statistics": HERE}, SOLVED),
        ({"solved": HERE, "method": "gptq"}, SOLVED),
        ({"strict_statistics": True}, "--strict-stats belongs to --stats"),
        ({"activations": "stats"}, NEEDS),
        ({"method": "gptq"}, GPTQ),
        ({"method": hb.Gptq()}, GPTQ),
        ({"method": "amax", "statistics": HERE}, SERVE.format("amax")),
        ({"statistics": HERE}, SERVE.format("the default method")),
    ],
)
def test_whether_codes_come_from_statistics(options: dict[str, Any], wanted: bool | str) -> None:
    if not isinstance(wanted, str):
        assert by_statistics(Options(**options)) is wanted
        return
    with pytest.raises(HalfbyteError) as caught:
        by_statistics(Options(**options))
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("options", "have", "wanted"),
    [
        ({}, False, ("none", "none")),
        ({}, True, ("source", "static")),
        ({"contract": "transformer_engine"}, False, ("unit", "static")),
        ({"to": "bf16"}, False, ("none", "none")),
        ({"to": "mxfp4", "layout": "compressed-tensors"}, False, ("none", "none")),
        ({"activations": "none"}, True, ("none", "none")),
        ({"activations": "unit"}, True, ("unit", "static")),
        ({"activations": "x.json"}, False, ("file", "static")),
        ({"activations": "stats", "statistics": HERE, "method": "gptq"}, False, ("stats", "static")),
        ({"activations": "unit", "to": "mxfp4", "layout": "compressed-tensors"}, False, ("dynamic", "static")),
        ({"activations": "x.json", "to": "mxfp4", "layout": "compressed-tensors"}, False, ("dynamic", "static")),
    ],
)
def test_kinds_of_activations(options: dict[str, Any], have: bool, wanted: tuple[str, str]) -> None:
    given = Options(**options)
    assert activations_of(given, resolve_target(given, UNKNOWN), have) == wanted
    assert wanted[0] in MEANING


def test_a_layout_that_cannot_do_without_input_scales() -> None:
    given = Options()
    needs = replace(target(), layout=replace(target().layout, needs_input_scales=True))
    assert activations_of(given, needs, False) == ("unit", "static")


AT = "model.layers.0.mlp.experts"
GROUPS = [(f"{AT}.0.gate_proj", f"{AT}.0.up_proj"), (f"{AT}.1.gate_proj",), ("head",)]


def scales(kind: str, amaxes: Mapping[str, float] | None = None, file: str = "", **names: Collection[str]) -> Any:
    """The scales of GROUPS, all times 2688."""
    options = Options(activations=file or kind, statistics=HERE)
    own = {module: [module] for group in GROUPS for module in group}
    found = input_scales(kind, options, GROUPS, lambda: own | names, lambda: amaxes or {})
    return {module: scale * 2688 for module, scale in found.items()}


def test_kinds_of_input_scales(tmp_path: Path) -> None:
    modules = [module for group in GROUPS for module in group]
    assert scales("none") == scales("source") == scales("dynamic") == {}
    assert scales("unit") == dict.fromkeys(modules, 2688.0)
    known = {f"{AT}.0.gate_proj": 2688.0, f"{AT}.0.up_proj": 1344.0, f"{AT}.1.gate_proj": 5376.0, "head": 672.0}
    wanted = {f"{AT}.0.gate_proj": 2688, f"{AT}.0.up_proj": 2688, f"{AT}.1.gate_proj": 5376, "head": 672}
    assert scales("stats", known) == wanted
    (tmp_path / "x.json").write_text(json.dumps(known))
    assert scales("file", file=str(tmp_path / "x.json")) == wanted
    rounded = input_scales("stats", Options(), [("a",)], dict, lambda: {"a": 0.1})
    assert rounded == {"a": float(np.float32(0.1) / np.float32(2688))}


def test_an_expert_that_saw_nothing_takes_the_largest_of_the_others() -> None:
    """Of the same projection: gate has 3 and 9, up nothing of its own but the group's."""
    known = {
        f"{AT}.2.gate_proj": 3.0 * 2688,
        f"{AT}.3.gate_proj": 9.0 * 2688,
        f"{AT}.7.up_proj": 2688.0,
        "head": 2688.0,
    }
    assert scales("stats", known) == {
        f"{AT}.0.gate_proj": 9 * 2688, f"{AT}.0.up_proj": 9 * 2688, f"{AT}.1.gate_proj": 9 * 2688, "head": 2688
    }  # fmt: skip


def test_a_module_without_an_amax() -> None:
    with pytest.raises(CheckpointError) as caught:
        scales("stats", {"head": 1.0})
    assert str(caught.value) == (
        f"--activations stats: stats: no amax for {AT}.0.gate_proj, which is quantized; --keep it, or calibrate it"
    )


SMALLEST = float(np.finfo(np.float32).tiny) * 2688
LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("amax", "good"),
    [(SMALLEST, True), (SMALLEST * (1 - 1e-9), False), (LARGEST, True), (LARGEST * (1 + 1e-9), False)],
)
def test_the_least_and_the_largest_amax(amax: float, good: bool) -> None:
    def found() -> dict[str, float]:
        return input_scales("stats", Options(statistics=HERE), [("a", "b")], dict, lambda: {"a": amax, "b": amax})

    if good:
        assert found() == dict.fromkeys("ab", float(np.float32(amax) / np.float32(2688)))
        return
    with pytest.raises(CheckpointError) as caught:
        found()
    assert str(caught.value) == (
        f"--activations stats: stats: a has the amax {amax:g}, whose scale is no normal float32"
    )


def test_names_of_run_time_in_a_file(tmp_path: Path) -> None:
    """One name may mean several modules, and several names one: the largest counts."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"all": 2688, "head": 4 * 2688, "tail": 2 * 2688, f"{AT}.1.gate_proj": 0.5 * 2688}))
    found = scales("file", file=str(path), all=[*GROUPS[0], "head"], tail=["head"])
    assert list(found.values()) == [2688, 2688, 1344, 4 * 2688]


@pytest.mark.parametrize(
    ("given", "others"),
    [({"hed": 1.0, "head": 1.0}, ""), ({"x": 1.0, "y": 1.0, "z": 1.0}, " (2 more names in it are unknown)")],
)
def test_names_that_are_unknown(tmp_path: Path, given: dict[str, float], others: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(given))
    with pytest.raises(CheckpointError) as caught:
        scales("file", file=str(path))
    nearest = str(caught.value).removeprefix(
        f"--activations {path}: unknown module '{next(iter(given))}'; nearest of 4: "
    )
    assert nearest.endswith(others)
    assert (" more" in nearest) is bool(others)


@pytest.mark.parametrize("value", ["1", None, True, 0, -1.0, float("inf"), float("nan")])
def test_values_that_are_no_amax(tmp_path: Path, value: object) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"head": value}))
    with pytest.raises(CheckpointError) as caught:
        scales("file", file=str(path))
    assert str(caught.value) == f"{path}: head has {value!r}; expected the largest magnitude, a positive number"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(CheckpointError) as caught:
        scales("file", file=str(path))
    assert str(caught.value) == f"--activations {path}: neither none, unit nor stats, nor a file that is there"
