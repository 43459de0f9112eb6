"""Which statistics and solved codes a plan takes, from small folders: names, reasons, notes and messages, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Plan, make_plan
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.checkpoint.io.likeness import fingerprint_of
from halfbyte.checkpoint.io.solved import SolvedWeight, write_solved
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.statistics import LinearStatistics, write_header, write_statistics
from tests.checkpoint.toy import Array, random, write_checkpoint
from tests.statistics.test_imatrix import old_file

AT = "model.layers.0"
EXPERTS = f"{AT}.mlp.experts"
QWEN = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32}


def known(width: int = 32, full: bool = True, tokens: int = 10, top: float = 0.0) -> LinearStatistics:
    parts: dict[str, Any] = {"second_moment": np.eye(width, dtype=np.float32)} if full else {}
    if not full and tokens:
        parts["diagonal"] = np.ones(width, np.float32)
    if top:
        parts["channel_amax"] = np.full(width, top, np.float32)
    return LinearStatistics(tokens, width, top, **parts)


def dense(*names: str) -> dict[str, Array]:
    return {f"{AT}.{name}.weight": random(number, 32, 32) for number, name in enumerate(names)}


def plan_of(folder: Path, tensors: dict[str, Array], stats: dict[str, LinearStatistics], **options: Any) -> Plan:
    """A plan with these statistics; those of a name ending in a star are of no module."""
    source = write_checkpoint(folder / "s", tensors, options.pop("config", None))
    (folder / "stats").mkdir(exist_ok=True)
    write_statistics(folder / "stats" / "a.safetensors", stats)
    given: dict[str, Any] = {"method": "gptq", "statistics": folder / "stats"} | options
    return make_plan(source, Options(**given))


def refused(folder: Path, *arguments: Any, **options: Any) -> str:
    with pytest.raises(HalfbyteError) as caught:
        plan_of(folder, *arguments, **options)
    return str(caught.value)


def test_each_module_takes_its_own_or_says_why_not(tmp_path: Path) -> None:
    tensors = dense("mlp.fc1", "mlp.fc2", "mlp.fc3", "mlp.fc4")
    stats = {f"{AT}.mlp.fc1": known(), f"{AT}.mlp.fc3": known(full=False), f"{AT}.mlp.fc4": known(full=False, tokens=0)}
    plan = plan_of(tmp_path, tensors, stats)
    found = plan.calibrated
    assert found is not None
    moments = "its statistics have no full second moments, which gptq needs (--moments full)"
    assert (found.kind, found.method, found.path, plan.method) == ("gptq", hb.Gptq(), tmp_path / "stats", "optimal")
    assert found.names == {f"{AT}.mlp.fc1": (f"{AT}.mlp.fc1",)} | {f"{AT}.mlp.fc{i}": (None,) for i in (2, 3, 4)}
    assert found.fallback == {
        f"{AT}.mlp.fc2": "it has no statistics", f"{AT}.mlp.fc3": moments, f"{AT}.mlp.fc4": moments
    }  # fmt: skip
    assert plan.notes[-1] == (
        f"1 modules without usable statistics (it has no statistics): {AT}.mlp.fc2; 2 modules without usable "
        f"statistics ({moments}): {AT}.mlp.fc3, {AT}.mlp.fc4; they get optimal scales without statistics"
    )
    strict = refused(tmp_path, tensors, stats, strict_statistics=True)
    assert strict == f"--strict-stats: {plan.notes[-1].removesuffix('; they get optimal scales without statistics')}"
    hessian = plan_of(tmp_path, tensors, stats, method="hessian").calibrated
    assert hessian is not None
    assert (hessian.kind, hessian.fallback) == (
        "hessian", {f"{AT}.mlp.fc2": "it has no statistics", f"{AT}.mlp.fc4": "no token reached it"}
    )  # fmt: skip
    method = hb.Gptq(damping=0.5)
    given = plan_of(tmp_path, tensors, stats, method=method).calibrated
    assert given is not None
    assert given.method == method


def test_no_more_than_eight_are_listed(tmp_path: Path) -> None:
    names = [f"mlp.fc{i}" for i in range(10)]
    stats = {f"{AT}.mlp.fc0": known()}
    eight = plan_of(tmp_path, dense(*names[:9]), stats).notes[-1]
    listed = ", ".join(f"{AT}.{name}" for name in names[1:9])
    assert eight == (
        f"8 modules without usable statistics (it has no statistics): {listed}; they get optimal scales without "
        "statistics"
    )
    nine = plan_of(tmp_path, dense(*names), stats).notes[-1]
    assert nine == (
        f"9 modules without usable statistics (it has no statistics): {listed} and 1 more; they get optimal scales "
        "without statistics"
    )


def test_where_all_have_statistics_nothing_is_said(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, dense("mlp.fc1"), {f"{AT}.mlp.fc1": known()}, strict_statistics=True)
    assert not [note for note in plan.notes if "statistics" in note]


def test_statistics_of_a_run_that_was_stopped_are_told(tmp_path: Path) -> None:
    first = plan_of(tmp_path, dense("q"), {f"{AT}.q": known()})
    for complete in (False, True):
        write_header(tmp_path / "stats", {"complete": complete})
        plan = make_plan(first.source, Options(method="gptq", statistics=tmp_path / "stats"))
        said = [note for note in plan.notes if "was stopped" in note]
        told = f"{tmp_path / 'stats'}: its calibration was stopped; the same `halfbyte calibrate` continues it"
        assert said == ([] if complete else [told])


def test_statistics_of_nothing(tmp_path: Path) -> None:
    tensors = dense("mlp.fc1", "mlp.fc2")
    assert refused(tmp_path, tensors, {"other": known()}) == (
        f"--stats {tmp_path}/stats serves none of the 2 modules; {AT}.mlp.fc1: it has no statistics"
    )
    (tmp_path / "stats" / "a.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        make_plan(tmp_path / "s", Options(method="gptq", statistics=tmp_path / "stats"))
    assert str(caught.value) == f"--stats: {tmp_path}/stats holds no statistics: no safetensors file is in it"


def stacked() -> dict[str, Array]:
    return {f"{EXPERTS}.gate_up_proj": random(0, 2, 64, 32), f"{EXPERTS}.down_proj": random(1, 2, 32, 32)}


def test_experts_of_a_stack_take_those_of_any_projection_or_of_the_stack(tmp_path: Path) -> None:
    """Model-Optimizer's layout keeps the stacks of Llama-4; calibrate names modules as they run."""
    config = {"model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 32}
    at = f"{AT}.feed_forward.experts"
    tensors = {f"{at}.gate_up_proj": random(0, 2, 32, 64), f"{at}.down_proj": random(1, 2, 32, 32)}
    stats = {f"{at}.0.up_proj": known(), f"{at}.gate_up_proj": known(), f"{at}.1.down_proj": known()}
    found = plan_of(tmp_path, tensors, stats, config=config).calibrated
    assert found is not None
    assert found.names == {
        f"{at}.gate_up_proj": (f"{at}.0.up_proj", f"{at}.gate_up_proj"),
        f"{at}.down_proj": (None, f"{at}.1.down_proj"),
    }
    assert found.fallback == {f"{at}.down_proj": "it has no statistics"}


def test_names_of_run_time_and_those_on_disk(tmp_path: Path) -> None:
    """A statistic under a module's name at run time is that of the module; the first of several names counts."""
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    tensors = {f"language_model.{name}": x for name, x in dense("mlp.down_proj").items()}
    at = "model.language_model.layers.0.mlp.down_proj"
    found = plan_of(tmp_path, tensors, {at: known()}, config=config).calibrated
    assert found is not None
    assert found.names == {f"language_model.{AT}.mlp.down_proj": (at,)}


def test_what_is_fp4_already_is_counted(tmp_path: Path) -> None:
    at = f"{AT}.mlp.fc2"
    packed = {f"{at}.weight_packed": np.zeros((32, 16), np.uint8), f"{at}.weight_scale": np.zeros((32, 1), np.uint8)}
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    plan = plan_of(tmp_path, dense("mlp.fc1") | packed, {"other": known()}, config=config)
    assert plan.calibrated is not None
    assert (plan.calibrated.names, plan.calibrated.fallback) == ({}, {})
    assert plan.notes[-1] == "1 weights are FP4 in the source: their codes are cast or kept, without statistics"


def test_the_digest_is_that_of_headers_and_names(tmp_path: Path) -> None:
    tensors, stats = dense("mlp.fc1"), {f"{AT}.mlp.fc1": known()}

    def told() -> tuple[str, int]:
        found = make_plan(tmp_path / "s", Options(method="gptq", statistics=tmp_path / "stats")).calibrated
        assert found is not None
        return found.digest, found.modified

    plan_of(tmp_path, tensors, stats)
    path = tmp_path / "stats" / "a.safetensors"
    first = told()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\x01")
    os.utime(path, ns=(1, first[1] + 1))
    assert told() == (first[0], first[1] + 1), "what the arrays hold is told by when the file was changed"
    path.rename(path.with_name("b.safetensors"))
    assert told()[0] != first[0]
    path.with_name("b.safetensors").rename(path)
    write_statistics(tmp_path / "stats" / "c.safetensors", {"other": known()})
    os.utime(tmp_path / "stats" / "c.safetensors", ns=(1, 1))
    second = told()
    assert second[0] != first[0]
    assert second[1] == first[1] + 1, "the newest counts"
    one = make_plan(tmp_path / "s", Options(method="gptq", statistics=path)).calibrated
    assert one is not None
    assert one.digest == first[0]


def solved(folder: Path, names: dict[str, tuple[int, int]]) -> Path:
    contract = hb.contracts.modelopt()
    weights = {
        name: SolvedWeight(
            np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 16), np.uint8), np.float32(1)
        )
        for name, (rows, columns) in names.items()
    }
    write_solved(folder / "x.safetensors", weights, hb.get_format("nvfp4"), contract, "gptq")
    return folder


def test_solved_weights_are_found_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", dense("mlp.fc1", "mlp.fc2"))
    one, two = f"{AT}.mlp.fc1.weight", f"{AT}.mlp.fc2.weight"
    plan = make_plan(source, Options(solved=solved(tmp_path / "a", {one: (32, 32), two: (32, 32)})))
    assert plan.solved is not None
    assert (plan.calibrated, plan.solved.path, plan.solved.method) == (None, tmp_path / "a", "gptq")
    assert plan.solved.names == {f"{AT}.mlp.fc1": (one,), f"{AT}.mlp.fc2": (two,)}
    for shapes, message in (
        ({one: (32, 32)}, f"{tmp_path}/b has no codes of {two}, which is quantized; --keep it, or solve it"),
        (
            {one: (32, 32), two: (32, 64)},
            f"{tmp_path}/b: {two}.codes is U8 of shape (32, 32); a weight of shape (32, 32) needs U8 of shape (32, 16)",
        ),
    ):
        with pytest.raises(CheckpointError) as caught:
            make_plan(source, Options(solved=solved(tmp_path / "b", shapes)))
        assert str(caught.value) == message


def test_solved_experts_of_a_stack_are_numbered(tmp_path: Path) -> None:
    config = {"model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 32}
    at = f"{AT}.feed_forward.experts.down_proj"
    source = write_checkpoint(tmp_path / "s", {at: random(1, 2, 32, 32)}, config)
    folder = solved(tmp_path / "a", {f"{at}.0": (32, 32), f"{at}.1": (32, 32)})
    found = make_plan(source, Options(solved=folder)).solved
    assert found is not None
    assert found.names == {at: (f"{at}.0", f"{at}.1")}


def scales_of(plan: Plan) -> dict[str, float | None]:
    """Input scales times 2688."""
    return {unit.module: unit.input_scale and round(unit.input_scale * 2688, 3) for unit in plan.units}


def test_input_scales_from_statistics(tmp_path: Path) -> None:
    """All routed experts of a layer have one per projection; a module has the largest of its own."""
    tensors = dense("mlp.shared_expert.down_proj") | {
        f"{EXPERTS}.{e}.{name}_proj.weight": random(e, 32, 32) for e in range(3) for name in ("gate", "up", "down")
    }
    stats = {f"{EXPERTS}.{e}.{name}_proj": known(top=1.0 + e) for e in (0, 1) for name in ("gate", "up", "down")}
    stats |= {f"{AT}.mlp.shared_expert.down_proj": known(top=7), f"{EXPERTS}.2.down_proj": known(tokens=0, top=50)}
    plan = plan_of(tmp_path, tensors, stats, config=QWEN, method="amax", activations="stats")
    assert plan.activations == "W4A4 with input scales from statistics: activations become FP4 too"
    assert plan.calibrated is None
    shared, *experts = (name.removesuffix(".weight") for name in tensors)
    assert scales_of(plan) == {shared: 7.0, **dict.fromkeys(experts, 2.0)}


def test_inputs_of_any_magnitude_have_a_scale(tmp_path: Path) -> None:
    tensors = dense("mlp.fc1", "mlp.fc2", "mlp.fc3")
    tops = {f"{AT}.mlp.fc1": 0.25, f"{AT}.mlp.fc2": 1.0, f"{AT}.mlp.fc3": 300.0}
    stats = {module: known(top=top) for module, top in tops.items()}
    assert scales_of(plan_of(tmp_path, tensors, stats, method="amax", activations="stats")) == tops


def test_statistics_without_magnitudes_give_no_input_scale(tmp_path: Path) -> None:
    wanted = f"--activations stats: {tmp_path}/stats: no amax for {AT}.mlp.fc1, which is quantized; --keep it, or "
    tensors = dense("mlp.fc1")
    for stats in (known(), known(tokens=0, top=3)):
        found = refused(tmp_path, tensors, {f"{AT}.mlp.fc1": stats}, method="amax", activations="stats")
        assert found == wanted + "calibrate it"
    other = refused(tmp_path, tensors, {f"{AT}.mlp.fc1": known(64, top=3)}, method="amax", activations="stats")
    assert other.startswith("--activations stats: ")
    assert "64" in other


def test_statistics_of_another_training_are_told(tmp_path: Path) -> None:
    """By what the header says of the model's values; a folder that says nothing is taken as it is."""
    first = plan_of(tmp_path, dense("q"), {f"{AT}.q": known()})
    own = fingerprint_of(open_checkpoint(first.source))
    told = (
        f"{tmp_path / 'stats'} is not of these files: of another training or of the same model in another dtype, as "
        "its names and widths fit. If it is of another training, calibrate this one"
    )
    for header, said in (({"model": {"fingerprint": "x"}}, [told]), ({"model": {"fingerprint": own}}, []), ({}, [])):
        write_header(tmp_path / "stats", header)
        plan = make_plan(first.source, Options(method="gptq", statistics=tmp_path / "stats"))
        assert [note for note in plan.notes if "not of these files" in note] == said


@pytest.mark.parametrize(("at", "counts"), [(40, True), ((1 << 20) + 7, True), ((1 << 20) + 8, False)])
def test_the_digest_of_a_file_without_a_header(tmp_path: Path, at: int, counts: bool) -> None:
    """An imatrix: a megabyte behind its first numbers, its size and its names."""
    source = write_checkpoint(tmp_path / "s", dense("mlp.down_proj"))
    means = np.ones(32, np.float32)
    path = tmp_path / "m.dat"
    names = {"blk.0.ffn_down.weight": means, "blk.9.ffn_down.weight": np.ones(300_000, np.float32)}

    def digest() -> str:
        found = make_plan(source, Options(method="hessian", statistics=path)).calibrated
        assert found is not None
        return found.digest

    old_file(path, names, 1)
    first, raw = digest(), bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert (digest() != first) is counts


def test_some_experts_of_the_only_stack_are_enough(tmp_path: Path) -> None:
    """A stack of which one expert has no statistics falls back for that one; of which none has, serves nothing."""
    config = {"model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 32}
    at = f"{AT}.feed_forward.experts.down_proj"
    tensors = {at: random(1, 2, 32, 32)}
    one = f"{AT}.feed_forward.experts.1.down_proj"
    plan = plan_of(tmp_path, tensors, {one: known()}, config=config)
    assert plan.calibrated is not None
    assert plan.calibrated.names == {at: (None, one)}
    assert plan.calibrated.fallback == {at: "it has no statistics"}
    assert refused(tmp_path, tensors, {"other": known()}, config=config).endswith(
        f"serves none of the 1 modules; {at}: it has no statistics"
    )


@pytest.mark.parametrize(("cross", "asymmetry", "kind", "crossed"), [
    (True, 1.0, "gptq", True), (True, 0.0, "gptq", False), (False, 1.0, "gptq", False), (True, 1.0, "hessian", False),
])  # fmt: skip
def test_whether_cross_moments_count(tmp_path: Path, cross: bool, asymmetry: float, kind: str, crossed: bool) -> None:
    """They take memory, so nothing is planned for those that nobody uses."""
    moment = np.eye(32, dtype=np.float32)
    one = LinearStatistics(10, 32, 0.0, second_moment=moment, cross_moment=moment if cross else None)
    method = hb.Gptq(asymmetry=asymmetry) if kind == "gptq" else kind
    found = plan_of(tmp_path, dense("mlp.fc1"), {f"{AT}.mlp.fc1": one}, method=method).calibrated
    assert found is not None
    assert found.crossed is crossed


def test_how_an_objective_chooses_codes(tmp_path: Path) -> None:
    for method, codes in (("hessian", "nearest"), ("hessian:descent", "descent"), ("hessian:nearest", "nearest")):
        found = plan_of(tmp_path, dense("mlp.fc1"), {f"{AT}.mlp.fc1": known()}, method=method).calibrated
        assert found is not None
        assert found.codes == codes
