"""check_load(): who is asked, and what comes back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from halfbyte.errors import CheckpointError, ModelCodeError, UnknownNameError
from halfbyte.load_check import LoadReport, Mismatch, check, check_load
from tests.tiny_models import make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "source")


def pretend(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """Only these packages of the clients are installed, each in version 1.0."""
    spec = importlib.util.spec_from_loader("any", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in installed else None)
    monkeypatch.setattr(check, "version", lambda name: "1.0")


def test_an_unknown_client(source: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown client 'tensorrt'; known: transformers, vllm"):
        check_load(source, "tensorrt")


def test_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", "torch")
    with pytest.raises(CheckpointError, match="is not there"):
        check_load(tmp_path / "nothing", "transformers")


def test_a_client_that_is_not_installed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(
        ModelCodeError, match=r"transformers is not installed; .*pip install 'halfbyte\[transformers\]'"
    ):
        check_load(source, "transformers")
    with pytest.raises(ModelCodeError, match=r"vLLM is not installed in this environment; .*pip install vllm"):
        check_load(source, "vllm")
    pretend(monkeypatch, "transformers")
    with pytest.raises(ModelCodeError, match="torch is not installed"):
        check_load(source, "transformers")


def test_compressed_tensors_needs_its_package(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", "torch")
    _quantized(source, '{"quant_method": "compressed-tensors"}')
    with pytest.raises(ModelCodeError, match="compressed-tensors is not installed"):
        check_load(source, "transformers")


def _quantized(path: Path, part: str) -> None:
    config = (path / "config.json").read_text().rstrip().removesuffix("}")
    (path / "config.json").write_text(f'{config}, "quantization_config": {part}}}')


def test_a_layout_without_a_reader_is_an_answer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", "torch")
    monkeypatch.setattr(check, "ask", None)  # nobody is asked
    _quantized(source, '{"quant_method": "modelopt", "quant_algo": "NVFP4"}')
    report = check_load(source, "transformers")
    assert report.sentences() == [
        "transformers 1.0 cannot load it: it has no reader for Model-Optimizer's layout; vLLM, SGLang and TensorRT-LLM "
        "have. For transformers, convert with --layout compressed-tensors"
    ]


def test_the_answer_becomes_a_report(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "vllm")
    told = {"missing": ["a"], "unexpected": ["b", "c"], "mismatched": [["d", [1, 2], [2, 1]]]}
    calls = []
    monkeypatch.setattr(check, "ask", lambda *given, **named: calls.append((given, named)) or told)  # type: ignore[func-returns-value]
    report = check_load(source, "vllm", trust_remote_code=True, seconds=7)
    assert report == LoadReport("vllm", "1.0", 21, ("a",), ("b", "c"), (Mismatch("d", (1, 2), (2, 1)),))
    ((given, named),) = calls
    assert given == ("halfbyte.load_check.in_vllm", str(source.resolve()), "trust")
    assert named["seconds"] == 7


def test_a_client_that_fails_is_an_answer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", "torch")

    def fail(*given: object, **named: object) -> None:
        raise ModelCodeError("KeyError: 'rope'")

    monkeypatch.setattr(check, "ask", fail)
    assert check_load(source, "transformers").error == "KeyError: 'rope'"
