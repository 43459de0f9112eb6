"""QuantizedTensor.save and hb.load: everything survives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(4, 64)
H = hb.hessian_from_activations(gaussian(40, 64))
CALLS: list[dict[str, Any]] = [
    {"format": "nvfp4"},
    {"format": "nvfp4", "scaling": "row"},
    {"format": "nvfp4", "contract": "modelopt", "method": "sweep:fused"},
    {"format": "nvfp4", "contract": hb.contracts.torchao(two_level=False)},
    {"format": "nvfp4", "contract": hb.contracts.flashinfer(global_scale=448.0)},
    {"format": "nvfp4", "method": hb.FourSix("mse", 256, fast_error=True)},
    {"format": "nvfp4", "method": hb.Optimal(np.arange(64, dtype=np.float32))},
    {"format": "nvfp4", "method": hb.Hessian(H, "descent")},
    {"format": "nvfp4", "method": hb.Optimal(headroom=1)},
    {"format": "nvfp4", "method": hb.Optimal(np.ones(64), headroom=(1, 1.3))},
    {"format": "nvfp4", "block": 32},
    {"format": "mxfp4", "contract": hb.contracts.torchao(scaling_mode="rceil")},
    {"format": "mxfp8", "method": "optimal"},
]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_there_and_back(call: dict[str, Any], kind: str, tmp_path: Path) -> None:
    q = hb.quantize(torch.from_numpy(X) if kind == "torch" else X, **call)
    path = tmp_path / "q.safetensors"
    q.save(path)
    again = hb.load(path)
    assert again == q
    assert (again.contract, again.format, again.shape) == (q.contract, q.format, q.shape)
    assert type(again.codes) is type(q.codes)
    assert type(again.method) is type(q.method)
    assert again.method.spelling == q.method.spelling
    assert_same_bits(again.dequantize(), q.dequantize())
    for array in ("weights", "h"):
        if hasattr(q.method, array) and getattr(q.method, array) is not None:
            assert_same_bits(getattr(again.method, array), getattr(q.method, array))
    assert isinstance(hb.load(path, "numpy").codes, np.ndarray)
    assert isinstance(hb.load(str(path), "cpu").codes, torch.Tensor)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_gptq_gives_comes_back(kind: str, tmp_path: Path) -> None:
    """Its method is a record of options; the second moments are not needed to read it."""
    moments = np.diag(np.arange(1, 65, dtype=np.float32))
    q = hb.gptq(torch.from_numpy(X) if kind == "torch" else X, moments, "nvfp4", damping=0.01, descent=2, order="given")
    q.save(tmp_path / "q")
    again = hb.load(tmp_path / "q")
    assert (again, again.method) == (q, q.method)
    assert again.method == hb.Gptq(damping=0.01, descent=2, order="given")


def test_a_contract_that_is_not_known_is_no_other_one(tmp_path: Path) -> None:
    q = hb.quantize(X, "mxfp4", "gguf")
    q.save(tmp_path / "q")
    with safe_open(tmp_path / "q", "numpy") as file:
        metadata, parts = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(parts, tmp_path / "q", metadata | {"contract": "of a later version"})
    with pytest.raises(hb.UnknownNameError, match="unknown contract 'of a later version'"):
        hb.load(tmp_path / "q")


def test_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    hb.quantize(torch.from_numpy(X), "nvfp4", hb.contracts.torchao(two_level=False))[::2].save(path)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {"codes", "scales"}
        metadata = file.metadata()
    documented = {"halfbyte", "format", "block", "shape", "contract", "contract_options", "method", "arrays"}
    assert set(metadata) == documented
    assert all(f"`{key}`" in (hb.load.__doc__ or "") for key in documented)
    assert (metadata["shape"], metadata["contract_options"]) == ("[2, 64]", '{"two_level": false}')


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    q = hb.quantize(X, "nvfp4")
    by_hand = dataclasses.replace(q, contract=dataclasses.replace(q.contract, name="mine"))
    with pytest.raises(hb.UnsupportedError, match="was made by hand"):
        by_hand.save(tmp_path / "a")
    changed = dataclasses.replace(q, contract=dataclasses.replace(q.contract, rules=hb.contracts.modelopt().rules))
    with pytest.raises(hb.UnsupportedError, match="was made by hand"):
        changed.save(tmp_path / "a")
    other = dataclasses.replace(q.format, name="mine")
    with pytest.raises(hb.UnsupportedError, match="format mine with blocks of 16 is not halfbyte's own"):
        dataclasses.replace(q, format=other).save(tmp_path / "a")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(hb.InputError, match="cannot be read as safetensors"):
        hb.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(hb.InputError, match="cannot be read as safetensors"):
        hb.load(path)
    save_file({"weight": X}, path)
    with pytest.raises(hb.InputError, match="not a file of QuantizedTensor"):
        hb.load(path)
    save_file({"codes": X}, path, {"halfbyte": "1"})
    with pytest.raises(hb.InputError, match="its metadata or tensors are damaged"):
        hb.load(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(hb.InputError, match=r"is a folder; load reads one file that .*save wrote; .*inspect"):
        hb.load(tmp_path)
