"""What `halfbyte convert` writes is clean in the eyes of `halfbyte verify`, family by family and layout by layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint.io.header import read_header
from halfbyte.verify import verify
from tests.clients.converted import convert, converted
from tests.quantized import edit, load
from tests.tiny_models import BF16, MODELS, Tensors, make

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
WAYS = {
    "modelopt": ("--to", "nvfp4", *MODELOPT),
    "modelopt W4A4": ("--to", "nvfp4", *MODELOPT, "--activations", "unit"),
    "first layer kept": ("--to", "nvfp4", *MODELOPT, "--keep-first", "1"),
    "compressed-tensors": ("--to", "nvfp4", *COMPRESSED),
    "MXFP4": ("--to", "mxfp4", *COMPRESSED),
}
OWN_LAYOUT = "deepseek_v4"
"""Its readers know Model-Optimizer's tensors beside its own FP8, and nothing else."""

CASES = [
    (model, way)
    for model in MODELS
    for way in WAYS
    if model != OWN_LAYOUT or way not in ("compressed-tensors", "MXFP4")
]
FP4 = ("nvfp4", "mxfp4")


@pytest.mark.parametrize(("model", "way"), CASES)
def test_convert_is_clean(tmp_path: Path, model: str, way: str) -> None:
    path = converted(tmp_path, model, *WAYS[way])
    report = verify(path, tmp_path / model)
    assert report.clean, report.problems
    assert sum(count for kind, count in report.kinds.items() if kind.startswith(FP4)) >= 2
    for error in report.errors:
        assert error.relative < (0.15 if error.kind.startswith(FP4) else 0.004), error


@pytest.mark.parametrize(("model", "way"), [("gpt_oss_mxfp4", "modelopt"), ("deepseek_v4", "modelopt")])
def test_mxfp4_becomes_nvfp4_without_loss(tmp_path: Path, model: str, way: str) -> None:
    """Exponents within the window: every value is the source's."""
    report = verify(converted(tmp_path, model, *WAYS[way]), tmp_path / model)
    assert {error.relative for error in report.errors if error.kind.startswith("nvfp4")} == {0.0}


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_from_one_layout_to_the_other(tmp_path: Path, model: str) -> None:
    first = converted(tmp_path, model, *WAYS["modelopt"])
    second = convert(first, tmp_path / "second", *WAYS["compressed-tensors"])
    report = verify(second, first)
    assert report.clean, report.problems
    assert (
        max(error.relative for error in report.errors) <= 2**-23
    )  # the reciprocal of a float32 scale, and its reciprocal again
    assert verify(second, tmp_path / model).clean


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3"])
def test_and_back_to_bf16(tmp_path: Path, model: str) -> None:
    quantized = converted(tmp_path, model, *WAYS["modelopt"])
    plain = convert(quantized, tmp_path / "plain", "--to", "bf16")
    report = verify(plain, quantized)
    assert report.clean, report.problems
    assert report.kinds == {}
    assert max(error.relative for error in report.errors) < 0.004  # one rounding to BF16


def test_verify_sees_one_changed_bit_of_a_kept_tensor(tmp_path: Path) -> None:
    """The clean reports above are not clean by blindness."""
    source = make("llama", tmp_path / "llama", shards=1)
    path = convert(source, tmp_path / "q", *WAYS["modelopt"])
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[read_header(file).tensors["model.norm.weight"].start] ^= 1
    file.write_bytes(data)
    assert [problem.rule for problem in verify(path).problems] == ["manifest"]
    (path / "halfbyte.json").unlink()
    assert [problem.rule for problem in verify(path, source).problems] == ["kept"]


def test_verify_knows_what_was_written(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", *WAYS["modelopt"])
    extra: Tensors = {"model.layers.1.extra": np.zeros(3, np.float32)}
    edit(path, extra, ("model.layers.1.input_layernorm.weight",))
    found = [problem.name for problem in verify(path, headers_only=True).problems if problem.rule == "manifest"]
    assert found == ["model.layers.1.input_layernorm.weight", "model.layers.1.extra"]


def test_zero_scales_of_a_contract_that_has_them_are_a_warning(tmp_path: Path) -> None:
    """TransformerEngine's rules give blocks far below the tensor's amax the scale 0; Model-Optimizer's do not."""
    source = make("llama", tmp_path / "llama")
    name = "model.layers.1.self_attn.o_proj.weight"
    values = load(source)[name].astype(np.float32)
    values[:8] *= np.float32(1e-6)
    edit(source, {name: values.astype(BF16)})
    theirs = ("--contract", "transformer_engine", "--method", "amax")
    report = verify(convert(source, tmp_path / "te", *WAYS["modelopt"], *theirs), source)
    assert report.clean, report.problems
    assert [problem.rule for problem in report.problems] == ["block-scale"]
    ours = convert(source, tmp_path / "ours", *WAYS["modelopt"])
    assert verify(ours, source).problems == []
