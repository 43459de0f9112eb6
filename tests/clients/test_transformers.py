"""transformers loads what `halfbyte convert` writes and computes what the decoded weights compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.peers.spec import quiet
from tests.clients.converted import cache_scales, convert, converted, with_fp8_cache
from tests.quantized import write_dequantized
from tests.tiny_models import VOCABULARY

CT = ("--layout", "compressed-tensors")
CASES = [
    ("llama", ("--to", "nvfp4", *CT)),
    ("llama", ("--to", "mxfp4", *CT)),
    ("qwen3", ("--to", "nvfp4", *CT)),
    ("qwen3", ("--to", "mxfp4", *CT)),
    ("qwen3_moe", ("--to", "mxfp4", *CT)),
    ("gpt_oss", ("--to", "mxfp4", "--layout", "gpt-oss")),
]


def load(path: Path, dequantize: bool = False) -> tuple[torch.nn.Module, Mapping[str, object]]:
    """The model, and what the loader missed, left over or could not fit."""
    with quiet():  # it warns when it is imported
        import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    more = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if dequantize else {}
    with quiet():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True, **more
        )
    return model.eval(), {key: value for key, value in info.items() if value}


def logits(model: torch.nn.Module) -> torch.Tensor:
    words = np.random.default_rng(3).integers(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        return torch.as_tensor(model(torch.from_numpy(words)).logits).float()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("model", "options"), CASES, ids=[f"{model}-{options[1]}" for model, options in CASES])
def test_logits_are_those_of_the_decoded_weights(tmp_path: Path, model: str, options: tuple[str, ...]) -> None:
    path = converted(tmp_path, model, *options)
    loaded, missed = load(path, dequantize=model == "gpt_oss")
    assert missed == {}
    reference, missed = load(write_dequantized(tmp_path / "decoded", path))
    assert missed == {}
    source, _ = load(tmp_path / model)
    found, wanted = logits(loaded), logits(reference)
    assert relative(found, wanted) < 1e-5
    assert 0.05 < relative(found, logits(source)) < 0.5  # it did quantize
    plain, missed = load(convert(path, tmp_path / "bf16", "--to", "bf16"))
    assert missed == {}
    assert relative(logits(plain), wanted) < 1e-5


def test_activations_are_quantized_where_asked(tmp_path: Path) -> None:
    """With input scales transformers emulates W4A4; without its input scheme the same weights are exact again."""
    path = converted(tmp_path, "llama", "--to", "nvfp4", *CT, "--activations", "unit")
    loaded, missed = load(path)
    assert missed == {}
    wanted = logits(load(write_dequantized(tmp_path / "decoded", path))[0])
    assert 0.01 < relative(logits(loaded), wanted) < 0.5
    for module in loaded.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scheme.input_activations = None
    assert relative(logits(loaded), wanted) < 1e-5


def test_nvfp4_experts_are_not_for_transformers(tmp_path: Path) -> None:
    """What verify warns of: the expert loader leaves every tensor scale out. A version that reads them fails here."""
    path = converted(tmp_path, "qwen3_moe", "--to", "nvfp4", *CT)
    _, missed = load(path)
    assert any("weight_global_scale" in str(name) for name in list(map(str, missed.values())))


def test_modelopt_is_not_for_transformers(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", "--to", "nvfp4", "--layout", "modelopt")
    with pytest.raises((ValueError, RuntimeError)):
        load(path)


def test_scales_of_an_fp8_cache_are_where_it_looks(tmp_path: Path) -> None:
    """Model-Optimizer hangs them on the projections, where transformers would not expect them."""
    loaded, missed = load(convert(with_fp8_cache(tmp_path / "fp8"), tmp_path / "converted", "--to", "nvfp4", *CT))
    assert missed == {}
    found = {
        name: float(value) for name, value in loaded.state_dict().items() if name.endswith((".k_scale", ".v_scale"))
    }
    wanted = {name.replace("k_proj.", "").replace("v_proj.", ""): float(x) for name, x in cache_scales().items()}
    assert found == wanted
