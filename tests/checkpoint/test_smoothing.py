"""Conversions with factors folded in, and with input scales from statistics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Rules, make_plan, run
from halfbyte.errors import CheckpointError, InputError
from halfbyte.models.folding import folds
from halfbyte.smoothing import FILE, Link, Smoothing, read_smoothing, scaled, write_smoothing
from halfbyte.statistics import LinearStatistics, write_statistics
from halfbyte.testing import assert_same_bits
from halfbyte.verify import verify
from tests.checkpoint.test_calibrated import ONE, SMALL, linear
from tests.checkpoint.test_convert import amax, groups
from tests.checkpoint.toy import all_bytes, llama, random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def tensors_of(dtype: npt.DTypeLike = ml_dtypes.bfloat16) -> dict[str, Array]:
    """A tiny Llama with all its norms, and a bias where one must be divided."""
    tensors = llama(dtype=dtype)
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        tensors[f"{at}.post_attention_layernorm.weight"] = random(300 + layer, 64, dtype=dtype)
        tensors[f"{at}.self_attn.v_proj.bias"] = random(400 + layer, 32, dtype=dtype)
    return tensors


def smoothing_of(tensors: dict[str, Array], seed: int = 0) -> Smoothing:
    """Random factors wherever factors can go."""
    rng = np.random.default_rng(seed)
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    links = []
    for fold in folds({"model_type": "llama", **CONFIG}, modules):
        count = tensors[f"{fold.into[0]}.weight"].shape[1] // fold.repeats
        exponents = rng.integers(-4, 5, count).astype(np.int8)
        links.append(Link(fold.origin, fold.into, fold.is_norm, exponents, fold.repeats, fold.head))
    return Smoothing(tuple(links))


def folded(tensors: dict[str, Array], smoothing: Smoothing) -> dict[str, Array]:
    """The tensors with the factors folded in, by the definition."""
    found = dict(tensors)
    for link in smoothing.links:
        for module in link.into:
            x = found[f"{module}.weight"].astype(np.float32) * 2.0 ** link.columns.astype(np.float32)
            found[f"{module}.weight"] = x.astype(tensors[f"{module}.weight"].dtype)
        for name in (f"{link.origin}.weight", f"{link.origin}.bias"):
            if name in found:
                by = 2.0 ** link.exponents.astype(np.float32)
                x = found[name].astype(np.float32) / (by[:, None] if found[name].ndim == 2 else by)
                found[name] = x.astype(tensors[name].dtype)
    return found


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("format", "layout"),
    [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")],
)
def test_the_same_bytes_as_from_a_folded_source(tmp_path: Path, format: str, layout: str, dtype: npt.DTypeLike) -> None:
    tensors = tensors_of(dtype)
    smoothing = smoothing_of(tensors)
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG, shards=3)
    other = write_checkpoint(tmp_path / "folded", folded(tensors, smoothing), CONFIG, shards=3)
    run(make_plan(source, Options(to=format, layout=layout, smoothing=smoothing)), tmp_path / "a", SMALL)
    run(make_plan(other, Options(to=format, layout=layout)), tmp_path / "b", SMALL)
    made, wanted = read_checkpoint(tmp_path / "a"), read_checkpoint(tmp_path / "b")
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(made[name], tensor)
    assert read_smoothing(tmp_path / "a" / FILE).digest == smoothing.digest
    assert verify(tmp_path / "a", source).count("error") == 0
    assert verify(tmp_path / "b", source).count("error") > 0


@pytest.mark.parametrize("method", ["optimal", "gptq", "hessian"])
def test_workers_and_pieces_change_no_byte_and_runs_continue(tmp_path: Path, method: str) -> None:
    tensors = tensors_of()
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG, shards=2)
    statistics(tmp_path / "stats", tensors)
    options = Options(
        method=method, activations="stats", statistics=tmp_path / "stats", smoothing=smoothing_of(tensors)
    )
    plan = make_plan(source, options)
    run(plan, tmp_path / "a", SMALL)
    run(plan, tmp_path / "b", ONE)
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert run(plan, tmp_path / "a", SMALL).finished_before
    others = [
        dataclasses.replace(options, smoothing=smoothing_of(tensors, 1)),
        dataclasses.replace(options, smoothing=None),
    ]
    assert len({plan.fingerprint, *(make_plan(source, other).fingerprint for other in others)}) == 3
    if method == "optimal":
        assert verify(tmp_path / "a", source).count("error") == 0


def statistics(folder: Path, tensors: dict[str, Array], without: str = "-") -> dict[str, LinearStatistics]:
    """Statistics of every linear layer with the largest magnitude of each input; q, k and v have their own."""
    rng = np.random.default_rng(5)
    found = {}
    for number, (name, x) in enumerate(tensors.items()):
        if name.endswith("_proj.weight") and without not in name:
            own = linear(number, x.shape[1])
            largest = (np.abs(rng.standard_normal(x.shape[1])) * 9).astype(np.float32)
            module = name.removesuffix(".weight")
            found[module] = dataclasses.replace(own, channel_amax=largest, input_amax=float(largest.max()))
    write_statistics(folder / "all.safetensors", found)
    return found


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(
    ("layout", "suffix"), [("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")]
)
def test_input_scales_are_those_of_the_statistics(tmp_path: Path, layout: str, suffix: str, smooth: bool) -> None:
    tensors = tensors_of()
    known = statistics(tmp_path / "stats", tensors)
    smoothing = smoothing_of(tensors) if smooth else None
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    plan = make_plan(
        source, Options(layout=layout, activations="stats", statistics=tmp_path / "stats", smoothing=smoothing)
    )
    assert plan.activations.startswith("W4A4 with input scales from statistics")
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for group in groups():
        largest = []
        for module in group:
            each = known[module].channel_amax
            assert each is not None
            largest.append((each if smoothing is None else each / 2.0 ** smoothing.columns[module]).max())
        scale = np.float32(max(largest)) / np.float32(2688)
        for module in group:
            wanted = np.array(scale if layout == "modelopt" else 1 / scale, np.float32)
            assert_same_bits(made[f"{module}.{suffix}"].reshape(()), wanted)
    config = json.loads((tmp_path / "d" / "config.json").read_text())["quantization_config"]
    if layout == "modelopt":
        assert config["quant_algo"] == "NVFP4"
    else:
        assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    assert verify(tmp_path / "d", source).count("error") == 0


def test_gptq_takes_the_statistics_of_the_smoothed_inputs(tmp_path: Path) -> None:
    tensors = tensors_of()
    known = statistics(tmp_path / "stats", tensors)
    smoothing = smoothing_of(tensors)
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    options = Options(method="gptq", statistics=tmp_path / "stats", smoothing=smoothing)
    run(make_plan(source, options), tmp_path / "d", SMALL)
    made, weights = read_checkpoint(tmp_path / "d"), folded(tensors, smoothing)
    module = "model.layers.1.mlp.down_proj"
    moments = known[module].second_moment
    assert moments is not None
    by = 2.0 ** smoothing.columns[module].astype(np.float64)
    weight = weights[f"{module}.weight"]
    q = hb.gptq(weight, (moments / by / by[:, None]).astype(np.float32), "nvfp4", "modelopt", global_amax=amax(weight))
    assert_same_bits(made[f"{module}.weight"], q.codes)
    assert_same_bits(made[f"{module}.weight_scale"], q.scales)


def test_experts_of_a_layer_share_their_input_scales(tmp_path: Path) -> None:
    from tests.tiny_models import qwen3_moe
    from tests.tiny_models import write_checkpoint as write

    tensors, config = qwen3_moe()
    source = write(tmp_path / "s", tensors, config)
    known = statistics(tmp_path / "stats", tensors, without="layers.0.mlp.experts.2.")
    run(make_plan(source, Options(activations="stats", statistics=tmp_path / "stats")), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for layer in (0, 1):
        at = f"model.layers.{layer}.mlp.experts"
        for parts in (("gate_proj", "up_proj"), ("down_proj",)):
            found = {float(made[f"{at}.{e}.{part}.input_scale"].item()) for e in range(4) for part in parts}
            wanted = max(one.input_amax for name, one in known.items() if name.startswith(at) and name.endswith(parts))
            assert found == {float(np.float32(wanted) / np.float32(2688))}


def test_missing_and_unusable_statistics(tmp_path: Path) -> None:
    tensors = tensors_of()
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    with pytest.raises(InputError, match="--activations stats needs statistics"):
        make_plan(source, Options(activations="stats"))
    statistics(tmp_path / "part", tensors, without="layers.1.mlp.down_proj")
    with pytest.raises(CheckpointError, match=r"no amax for model.layers.1.mlp.down_proj, which is quantized; --keep"):
        make_plan(source, Options(activations="stats", statistics=tmp_path / "part"))
    kept = Rules(keep=("*.1.mlp.down_proj",))
    assert make_plan(source, Options(activations="stats", statistics=tmp_path / "part", rules=kept))
    old = statistics(tmp_path / "old", tensors)
    without = {name: dataclasses.replace(one, channel_amax=None) for name, one in old.items()}
    write_statistics(tmp_path / "old" / "all.safetensors", without)
    assert make_plan(source, Options(activations="stats", statistics=tmp_path / "old"))
    with pytest.raises(CheckpointError, match=r"lacks the largest magnitude of each input .* calibrate again"):
        make_plan(
            source,
            Options(activations="stats", statistics=tmp_path / "old", smoothing=smoothing_of(tensors)),
        )
    narrow = {name: linear(0, 32) for name in old}
    write_statistics(tmp_path / "narrow" / "all.safetensors", narrow)
    with pytest.raises(CheckpointError, match="statistics are those of 32 inputs, but its weight has 64"):
        make_plan(source, Options(activations="stats", statistics=tmp_path / "narrow"))


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of()
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    smoothing = smoothing_of(tensors)
    with pytest.raises(CheckpointError, match=r"down_proj, which is not quantized from values; fit them anew"):
        make_plan(source, Options(smoothing=smoothing, rules=Rules(keep=("*.down_proj",))))
    with pytest.raises(InputError, match="belong to conversions to FP4"):
        make_plan(source, Options("bf16", smoothing=smoothing))
    short = dataclasses.replace(smoothing.links[0], exponents=np.zeros(5, np.int8))
    with pytest.raises(CheckpointError, match="is no norm of 5 channels"):
        make_plan(source, Options(smoothing=Smoothing((short,))))
    (tmp_path / "not.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no file of smoothing factors"):
        make_plan(source, Options(smoothing=tmp_path / "not.json"))


def test_values_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(np.float16)
    tensors["model.layers.0.input_layernorm.weight"] = np.full(64, 3 * 2.0**-24, np.float16)
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    plan = make_plan(source, Options(smoothing=smoothing_of(tensors)))
    with pytest.raises(CheckpointError, match="float16 cannot hold its values divided by the factors"):
        run(plan, tmp_path / "d", SMALL)


def test_verify_finds_factors_that_nothing_undoes(tmp_path: Path) -> None:
    tensors = tensors_of()
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG)
    run(make_plan(source, Options(smoothing=smoothing_of(tensors))), tmp_path / "d", SMALL)
    found = read_smoothing(tmp_path / "d" / FILE)
    wrong = dataclasses.replace(found.links[0], into=found.links[0].into[:2])
    write_smoothing(tmp_path / "d" / FILE, Smoothing((wrong, *found.links[1:])))
    report = verify(tmp_path / "d", source)
    assert any(problem.rule == "smoothing" for problem in report.problems)
    assert any(problem.name.endswith("v_proj") for problem in report.problems if problem.rule == "values")


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    smoothing = smoothing_of(tensors_of())
    write_smoothing(tmp_path / "a.json", smoothing)
    found = read_smoothing(tmp_path / "a.json")
    assert found.digest == smoothing.digest
    write_smoothing(tmp_path / "b.json", found)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    large = Link("model.norm", (), True, np.full(3, 9, np.int8))
    write_smoothing(tmp_path / "c.json", Smoothing((large,)))
    with pytest.raises(InputError, match="beyond ±8"):
        read_smoothing(tmp_path / "c.json")


def test_statistics_of_divided_inputs() -> None:
    """The same as the statistics of x / 2^k."""
    rng = np.random.default_rng(0)
    x, k = rng.standard_normal((50, 32)).astype(np.float32), rng.integers(-3, 4, 32).astype(np.int8)

    def of(values: Array) -> LinearStatistics:
        h = (values.T @ values / len(values)).astype(np.float32)
        return LinearStatistics(
            50, 32, float(np.abs(values).max()), None, h, channel_amax=np.abs(values).max(axis=0), sample=values[::7]
        )

    found, wanted = of(x).divided(k), of((x / 2.0**k).astype(np.float32))
    assert found.input_amax == wanted.input_amax
    for part, array in wanted.arrays():
        assert_same_bits(getattr(found, part), array)
    assert_same_bits(scaled(x, k), x * np.float32(2) ** k.astype(np.float32))
