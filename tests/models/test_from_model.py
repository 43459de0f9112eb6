"""Ask transformers what the modules of a model are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.peers.spec import quiet
from halfbyte.errors import ModelCodeError
from halfbyte.models import from_model
from halfbyte.models.from_model import KNOWN, build, describe_directory, modules_from_model
from halfbyte.models.model_class import find_class
from tests.tiny_models import base_config

CODE = """
import torch
from transformers import PreTrainedModel, PretrainedConfig

class OddConfig(PretrainedConfig):
    model_type = "odd"
    def __init__(self, width=32, **more):
        self.width = width
        super().__init__(**more)

class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "inner"
    def __init__(self, config):
        super().__init__(config)
        self.words = torch.nn.Embedding(8, config.width)
        self.mix = torch.nn.Linear(config.width, config.width)
        self.post_init()
    def forward(self, ids):
        return self.mix(self.words(ids))
"""
ODD = {
    "model_type": "odd",
    "architectures": ["OddModel"],
    "width": 64,
    "auto_map": {"AutoConfig": "modeling_odd.OddConfig", "AutoModel": "modeling_odd.OddModel"},
}


def directory(folder: Path, config: dict[str, Any], code: str = "") -> Path:
    """A directory with a config, and perhaps code. No weights: none are read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if code:
        (folder / "modeling_odd.py").write_text(code)
    return folder


def llama(**more: object) -> dict[str, Any]:
    return dict(base_config("llama", "LlamaForCausalLM")) | more


@pytest.fixture(autouse=True)
def quietly() -> Any:
    with quiet():  # transformers warns when it is imported
        yield


def test_a_class_of_transformers(tmp_path: Path) -> None:
    found = describe_directory(str(directory(tmp_path, llama())), KNOWN)
    assert found["modules"]["head"] == ["lm_head"]
    assert found["modules"]["table"] == ["model.embed_tokens"]
    assert "model.layers.#.mlp.up_proj" in found["modules"]["linear"]
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_class_that_comes_as_code(tmp_path: Path) -> None:
    """The whole way, through a process of its own."""
    found = modules_from_model(directory(tmp_path, ODD, CODE), trust_remote_code=True)
    assert found["modules"]["linear"] == ["mix"]
    assert found["modules"]["table"] == ["words"]


def test_code_is_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    path = directory(tmp_path, ODD, f"open({str(tmp_path / 'ran')!r}, 'w')\n{CODE}")
    with pytest.raises(ModelCodeError, match=r"OddModel comes as code .*modeling_odd.OddModel.*--trust-remote-code"):
        find_class(path, trust_remote_code=False)
    assert not (tmp_path / "ran").exists()


def test_transformers_own_class_goes_before_code(tmp_path: Path) -> None:
    """Many checkpoints carry code from before transformers had the class."""
    path = directory(tmp_path, llama(auto_map={"AutoModelForCausalLM": "modeling_odd.LlamaForCausalLM"}), "raise 1")
    assert find_class(path, trust_remote_code=True)[0].__name__ == "LlamaForCausalLM"


def test_a_class_that_does_not_exist(tmp_path: Path) -> None:
    path = directory(tmp_path, llama(architectures=["LlamaForKnitting"]))
    with pytest.raises(ModelCodeError, match=r"transformers [\d.]+ has no class LlamaForKnitting"):
        find_class(path, trust_remote_code=False)


def test_a_config_without_architectures(tmp_path: Path) -> None:
    without = {key: value for key, value in llama().items() if key != "architectures"}
    assert find_class(directory(tmp_path, without), False)[0].__name__ == "LlamaForCausalLM"
    path = directory(tmp_path / "vision", {"model_type": "dinov2"})
    assert find_class(path, False)[0].__name__ == "Dinov2Model"


def test_an_auto_map_without_a_model(tmp_path: Path) -> None:
    path = directory(tmp_path, ODD | {"auto_map": {"AutoConfig": "modeling_odd.OddConfig"}}, CODE)
    with pytest.raises(ModelCodeError, match="no model class in it"):
        find_class(path, trust_remote_code=True)


def test_the_model_has_no_bytes_and_is_not_quantized(tmp_path: Path) -> None:
    quantized = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    model = build(directory(tmp_path, llama(hidden_size=2**16, quantization_config=quantized)), False)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not hasattr(model.config, "quantization_config")


def test_an_error_says_who_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **named: object) -> None:
        raise ModelCodeError("ZeroDivisionError: division by zero")

    monkeypatch.setattr(from_model, "ask", fail)
    path = directory(tmp_path, llama())
    with pytest.raises(ModelCodeError) as caught:
        modules_from_model(path)
    assert str(caught.value) == (
        f"transformers cannot say what the modules of {path} are: ZeroDivisionError: division by zero"
    )


def test_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelCodeError, match=r"holds no config\.json"):
        modules_from_model(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelCodeError, match=r"transformers is not installed; .*halfbyte\[transformers\]"):
        modules_from_model(directory(tmp_path, llama()))
