"""Weight sync: the same bits as convert, only complete groups, and the same rules under the trainer's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.online import Config, Named, _one_by_one, quantize_named
from halfbyte.online_plan import decided
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import llama, random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
ONE = Resources(workers=1, max_memory=1 << 28, sync=False)
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def as_torch(x: Array) -> torch.Tensor:
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
    )


def by_groups(tensors: dict[str, Array]) -> list[list[tuple[str, Array]]]:
    """Groups as a trainer gives them: partners together, every other tensor alone."""
    batches: dict[object, list[tuple[str, Array]]] = {}
    for name, x in tensors.items():
        prefix, _, end = name.removesuffix(".weight").rpartition(".")
        key = next(((prefix, names) for names in GROUPS if end in names and x.ndim == 2), name)
        batches.setdefault(key, []).append((name, x))
    return list(batches.values())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(method="amax", activations="unit"),
        Options(method="four_six"),
        Options(layout="compressed-tensors", activations="unit"),
        Options(to="mxfp4", layout="compressed-tensors"),
        Options(contract="transformer_engine", method="amax"),
        Options(contract="compressed_tensors", method="amax", layout="compressed-tensors"),
    ],
    ids=["default", "amax", "four_six", "ct", "mxfp4", "te", "ct contract"],
)
def test_the_same_bits_as_convert(tmp_path: Path, options: Options, kind: str) -> None:
    tensors = llama()
    tensors["model.layers.0.self_attn.o_proj.weight"][...] = 0
    run(make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), options), tmp_path / "d", ONE)
    expected = read_checkpoint(tmp_path / "d")
    config = Config(options, "llama", 2)
    got: dict[str, Array] = {}
    for batch in by_groups(tensors):
        pairs: list[Named] = [(name, as_torch(x) if kind == "torch" else x) for name, x in batch]
        for name, x in quantize_named(pairs, Rules(), config):
            assert isinstance(x, torch.Tensor) == (kind == "torch")
            found = to_numpy(x)
            got[name] = found.view(np.uint8) if found.dtype == ml_dtypes.float8_e4m3fn else found
    assert set(got) == set(expected)
    for name, x in expected.items():
        assert_same_bits(got[name], x)


def partners(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,) * 3) -> list[tuple[str, torch.Tensor]]:
    """q, k and v of grouped attention, uniform as torch makes them: the best headroom is not 1."""
    generator = torch.Generator().manual_seed(0)
    return [
        (f"model.layers.0.self_attn.{end}.weight", (torch.rand(rows, 64, generator=generator) - 0.5).to(dtype))
        for (end, rows), dtype in zip({"q_proj": 64, "k_proj": 16, "v_proj": 16}.items(), dtypes, strict=True)
    ]


def assert_same_named(found: list[Named], expected: list[Named]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, mine), (_, wanted) in zip(found, expected, strict=True):
        assert_same_bits(to_numpy(mine), to_numpy(wanted))


def test_partners_share_the_headroom_of_convert(tmp_path: Path) -> None:
    pairs = partners()
    source = write_checkpoint(tmp_path / "s", {name: to_numpy(x) for name, x in pairs}, shards=3)
    run(make_plan(source, Options()), tmp_path / "d", ONE)
    expected = read_checkpoint(tmp_path / "d")
    found = dict(quantize_named(pairs, Rules(), Config(Options(), "llama", 2)))
    for name, x in expected.items():
        assert_same_bits(to_numpy(found[name]).view(x.dtype), x)
    fixed = Config(Options(method="optimal:headroom=1"), "llama", 2)
    scale = "model.layers.0.self_attn.q_proj.weight_scale_2"
    assert to_numpy(found[scale]) > to_numpy(dict(quantize_named(pairs, Rules(), fixed))[scale])


def test_a_hessian_has_the_headroom_of_convert(tmp_path: Path) -> None:
    """Partners share it: it is the one that Optimal chooses for all of them."""
    h = hb.hessian_from_activations(np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32))
    pairs, options = partners(), Options(method=hb.Hessian(h))
    source = write_checkpoint(tmp_path / "s", {name: to_numpy(x) for name, x in pairs}, shards=3)
    run(make_plan(source, options), tmp_path / "d", ONE)
    expected = read_checkpoint(tmp_path / "d")
    found = dict(quantize_named(pairs, Rules(), Config(options, "llama", 2)))
    optimal = dict(quantize_named(pairs, Rules(), Config(Options(method="optimal"), "llama", 2)))
    for name, x in expected.items():
        assert_same_bits(to_numpy(found[name]).view(x.dtype), x)
    whole = hb.quantize(torch.cat([x for _, x in pairs]), "nvfp4", "modelopt", hb.Hessian(h))
    start = 0
    for name, weight in pairs:
        part = whole[start : start + len(weight)]
        start += len(weight)
        assert_same_bits(to_numpy(found[name]), to_numpy(part.codes))
        assert_same_bits(to_numpy(found[f"{name}_scale_2"]), to_numpy(optimal[f"{name}_scale_2"]))


@pytest.mark.parametrize(
    "options", [Options(), Options(method="amax"), Options(to="mxfp4", layout="compressed-tensors")]
)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.float16)])
def test_what_a_card_does_without_batches(options: Options, dtypes: tuple[torch.dtype, ...]) -> None:
    """Each module by itself, with its group's amax and headroom. Here on the CPU, which gives the same bits."""
    pairs, config = partners(dtypes), Config(options, "llama", 2)
    pairs += [("model.layers.0.mlp.down_proj.weight", torch.zeros(32, 64, dtype=torch.bfloat16))]
    sync = decided(tuple(name for name, _ in pairs), [tuple(x.shape) for _, x in pairs], Rules(), config)
    made = _one_by_one([x for _, x in pairs], [*pairs], sync)
    assert_same_named([named for at in range(4) for named in made[at]], quantize_named(pairs, Rules(), config))


def test_float8_scales_come_as_float8() -> None:
    x = torch.ones(32, 64, dtype=torch.bfloat16)
    named = dict(quantize_named([("a.down_proj.weight", x)], Rules(), Config()))
    assert named["a.down_proj.weight_scale"].dtype == torch.float8_e4m3fn
    assert named["a.down_proj.weight_scale_2"].shape == ()


@pytest.mark.parametrize(
    ("given", "missing"), [("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("w1", "w3"), ("q_proj", "k_proj")]
)
def test_incomplete_groups_are_refused(given: str, missing: str) -> None:
    with pytest.raises(CheckpointError, match=f"m.0.{given} shares its scale with m.0.{missing}"):
        quantize_named([(f"m.0.{given}.weight", random(0, 32, 32))], Rules(), Config())


def test_a_family_without_gates() -> None:
    pairs = [("backbone.layers.0.mixer.experts.0.up_proj.weight", random(0, 32, 32))]
    assert len(quantize_named(pairs, Rules(), Config(model_type="nemotron_h"))) == 3


@pytest.mark.parametrize(
    ("rules", "trainer_name"),
    [
        (Rules(keep=("down_proj",)), ""),
        (Rules(keep_first=1), ""),
        (Rules(keep_last=4), ""),
        (Rules(experts_only=True), ""),
        (Rules(keep=("decoder.layers.0.",)), "module.module.decoder.layers.0.mlp.linear_fc2.weight"),
        (Rules(keep=("*linear_fc2*",)), "module.module.decoder.layers.0.mlp.linear_fc2.weight"),
    ],
)
def test_rules_keep(rules: Rules, trainer_name: str) -> None:
    pair = ("model.layers.0.mlp.down_proj.weight", random(0, 32, 32))
    config = Config(num_hidden_layers=4, trainer_name=trainer_name)
    (name, x), *rest = quantize_named([pair], rules, config)
    assert (name, rest) == (pair[0], [])
    assert x is pair[1]


@pytest.mark.parametrize(("layer", "kept"), [(0, True), (1, False), (3, True)])
def test_the_trainers_layer_number_counts_where_the_name_has_none(layer: int, kept: bool) -> None:
    rules = Rules(keep_first=1, keep_last=1)
    config = Config(num_hidden_layers=4, trainer_name=f"module.module.decoder.layers.{layer}.mlp.linear_fc2.weight")
    named = quantize_named([("mlp.down_proj.weight", random(0, 32, 32))], rules, config)
    assert (len(named) == 1) is kept


def test_everything_else_passes_through() -> None:
    pairs: list[Named] = [
        ("model.layers.0.input_layernorm.weight", random(0, 32)),
        ("lm_head.weight", random(1, 32, 32)),
        ("model.layers.0.mlp.down_proj.bias", random(2, 32)),
        ("model.layers.0.mlp.gate.weight", random(3, 4, 32)),
    ]
    assert quantize_named(pairs, Rules(), Config()) == pairs


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe", "gpt_oss"])
def test_stacked_experts_as_convert_splits_them(tmp_path: Path, model_type: str) -> None:
    shapes = {"qwen3_5_moe": ((2, 64, 64), (2, 64, 32))}.get(model_type, ((2, 64, 64), (2, 32, 64)))
    at = "model.layers.0.mlp.experts"
    tensors = {f"{at}.gate_up_proj": random(0, *shapes[0]), f"{at}.down_proj": random(1, *shapes[1])}
    options = Options(layout="compressed-tensors")
    source = write_checkpoint(
        tmp_path / "s", tensors, {"model_type": model_type, "hidden_size": 64, "intermediate_size": 32}
    )
    run(make_plan(source, options), tmp_path / "d", ONE)
    expected = read_checkpoint(tmp_path / "d")
    got = quantize_named([(name, as_torch(x)) for name, x in tensors.items()], Rules(), Config(options, model_type))
    assert {name for name, _ in got} == set(expected)
    for name, x in got:
        found = to_numpy(x)
        assert_same_bits(found, expected[name])


def test_stacked_experts_of_an_unknown_family() -> None:
    with pytest.raises(InputError, match="orientation is not known"):
        quantize_named([("m.experts.gate_up_proj", random(0, 2, 32, 32))], Rules(), Config())


@pytest.mark.parametrize(
    ("config", "error"),
    [(Config(Options(to="bf16")), UnsupportedError), (Config(Options(activations="amax.json")), UnsupportedError)],
)
def test_what_weight_sync_does_not_do(config: Config, error: type[Exception]) -> None:
    with pytest.raises(error):
        quantize_named([("a.down_proj.weight", random(0, 32, 32))], Rules(), config)


def test_broken_weights_and_dtypes() -> None:
    broken = random(0, 32, 32)
    broken[0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"a.down_proj holds NaN"):
        quantize_named([("a.down_proj.weight", broken)], Rules(), Config())
    with pytest.raises(InputError, match="cannot quantize dtype"):
        quantize_named([("a.down_proj.weight", np.ones((32, 32), np.int32))], Rules(), Config())


def test_partners_are_those_of_the_model_type() -> None:
    pairs: list[Named] = [(f"h.0.mlp.{leaf}.weight", random(7 + len(leaf), 32, 64)) for leaf in ("w1", "w2")]
    pairs[1] = (pairs[1][0], 8 * to_numpy(pairs[1][1]))
    found = dict(quantize_named(pairs, Rules(), Config(model_type="qwen")))
    assert_same_bits(found["h.0.mlp.w1.weight_scale_2"], found["h.0.mlp.w2.weight_scale_2"])
    with pytest.raises(CheckpointError, match=r"w1 shares its scale with h\.0\.mlp\.w3"):
        quantize_named(pairs, Rules(), Config(model_type="mixtral"))


# --- mistakes ---


def test_a_mapping_serves_as_pairs() -> None:
    x = random(0, 32, 32)
    pairs = quantize_named([("a.down_proj.weight", x)], Rules(), Config())
    mapped = quantize_named({"a.down_proj.weight": x}, Rules(), Config())
    assert [name for name, _ in mapped] == [name for name, _ in pairs]
    for (_, got), (_, wanted) in zip(mapped, pairs, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (3, r"takes \(name, tensor\) pairs, not int"),
        ([("a.weight", 1, 2)], "number 0 is no such pair"),
        (["a.weight"], "number 0 is no such pair"),
        ([(1, np.zeros((2, 2), np.float32))], "number 0 is no such pair"),
        ([("a.weight", [1.0])], "a.weight must be a numpy array or a torch tensor, not list"),
        ([("a.weight", np.zeros(2)), ("a.weight", np.zeros(2))], "a.weight is given twice"),
        ([("a.weight", np.ones((32, 32)))], "a.weight: cannot quantize dtype float64"),
    ],
)
def test_pairs_that_are_none(params: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize_named(params, Rules(), Config())


@pytest.mark.parametrize("rules", [Rules(keep_first=1), Rules(keep_last=1)])
def test_messages_speak_of_what_the_caller_gave(rules: Rules) -> None:
    """There is no config.json, no checkpoint and no command line here."""
    pairs = [("m.0.down_proj.weight", random(0, 32, 32))]
    with pytest.raises(InputError, match="Config needs num_hidden_layers; it has None") as caught:
        quantize_named(pairs, rules, Config())
    assert "config.json" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match=r"hand both over in one call, or keep .*: Rules\(keep=\('m.0.gate_proj',\)\)"
    ):
        quantize_named([("m.0.gate_proj.weight", random(0, 32, 32))], Rules(), Config())
    broken = random(0, 32, 32)
    broken[0, 0] = np.inf
    with pytest.raises(CheckpointError, match=r"m.0.down_proj holds Inf: .*Rules\(keep=") as caught_too:
        quantize_named([("m.0.down_proj.weight", broken)], Rules(), Config())
    assert "--keep" not in str(caught_too.value)
    partners = [("m.0.gate_proj.weight", random(1, 32, 32)), ("m.0.up_proj.weight", broken)]
    with pytest.raises(CheckpointError, match=r"a partner of m.0.gate_proj holds Inf"):
        quantize_named(partners, Rules(), Config())


def test_a_parameter_without_rows_comes_back_as_it_came() -> None:
    ((name, x),) = quantize_named([("a.down_proj.weight", np.zeros((0, 32), np.float32))], Rules(), Config())
    assert (name, x.shape) == ("a.down_proj.weight", (0, 32))
