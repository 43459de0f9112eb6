"""Mistakes at each public function: halfbyte says what is wrong and what to do, and never raises another's error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.checkpoint import Options, Rules
from halfbyte.layouts.swizzle import swizzle
from halfbyte.online import Config, quantize_named
from tests.samples import gaussian

X = gaussian(4, 64)
T = torch.from_numpy(X)
STACK = torch.stack([T, T])
META = T.to("meta")
Q = hb.quantize(T, "nvfp4")
MX = hb.quantize(T, "mxfp4")
EYE = torch.eye(64)
DOWN = "layers.0.mlp.down_proj.weight"
ANY: Any = None
SIXTEEN: Any = 16
RHT = hb.contracts.transformer_engine(columnwise=True, with_rht=True)


def parts(**changes: Any) -> dict[str, Any]:
    return {"format": "mxfp4", "shape": (4, 64), "codes": MX.codes, "scales": MX.scales} | changes


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch
        return torch.nested.nested_tensor([T[0], T[1]], layout=torch.strided)


def nvfp4(stored: Any) -> hb.QuantizedTensor:
    return hb.QuantizedTensor("nvfp4", (4, 64), Q.codes, Q.scales, stored_scale=stored, contract="modelopt")


def sync(params: Any = ANY, rules: Any = None, config: Any = None) -> Any:
    given = {DOWN: T} if params is None else params
    return quantize_named(given, Rules() if rules is None else rules, Config() if config is None else config)


def expert(**options: Any) -> Any:
    return hb.quantize(STACK, "nvfp4", scaling="expert", **options)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    # tensors that hold no numbers, or not in plain memory
    "meta": (lambda: hb.quantize(META, "nvfp4"), r"shape \(4, 64\) on the meta device holds no numbers"),
    "meta amax": (lambda: hb.quantize(T, "nvfp4", global_amax=META[0, 0]), "on the meta device"),
    "meta error": (lambda: Q.error(META), "on the meta device"),
    "meta weights": (lambda: hb.Optimal(META[0]), "weights of Optimal must be an array of numbers, not Tensor: .*meta"),
    "meta moments": (lambda: hb.gptq(T, EYE.to("meta"), "nvfp4"), "second_moment must be .*meta"),
    "meta sync": (lambda: sync({DOWN: META}), f"{DOWN}: .*on the meta device"),
    "sparse sync": (lambda: sync({DOWN: T.to_sparse()}), f"{DOWN}: .*call .to_dense"),
    "nested": (lambda: hb.quantize(nested(), "nvfp4"), "got nested tensor; give its parts one by one"),
    # numbers that are none
    "amax per expert": (lambda: expert(global_amax=["a", "b"]), "global_amax must be a number .* got 'a'"),
    "amaxes per expert": (lambda: expert(global_amax=np.ones((2, 2))), r"global_amax has shape \(2, 2\)"),
    "ragged amax": (lambda: hb.quantize(T, "nvfp4", global_amax=[[1.0], [2.0, 3.0]]), "global_amax must be a number"),
    "large amax": (lambda: hb.quantize(T, "nvfp4", global_amax=1e60), "global_amax does not fit into float32"),
    "large scale": (lambda: nvfp4(1e60), "stored_scale does not fit into float32"),
    "larger scale": (lambda: nvfp4(10**400), "stored_scale does not fit into float32"),
    "complex moments": (lambda: hb.gptq(T, EYE * 1j, "nvfp4"), "second_moment must be an array of real numbers"),
    "complex inputs": (lambda: hb.hessian_from_activations(X * 1j), "activations must be an array of real numbers"),
    "complex error": (lambda: Q.error(T.to(torch.complex64)), "x is torch.complex64, but the values of q are real"),
    "fast_error": (lambda: hb.FourSix("mse", 256, "no"), "fast_error of FourSix is True or False, not 'no'"),  # type: ignore[arg-type]
    "steps": (lambda: hb.search_global_scale(T, steps=1.5), "steps must be a whole number"),  # type: ignore[arg-type]
    # what is no tensor
    "axis of a list": (lambda: hb.quantize([[1.0]], "nvfp4", axis=0), "expected a numpy array .* got list"),  # type: ignore[arg-type]
    "list of experts": (lambda: hb.quantize([T, T], "nvfp4", scaling="expert"), "got list"),  # type: ignore[arg-type]
    "decoded": (lambda: hb.dequantize(T), "dequantize takes a QuantizedTensor, not Tensor; quantize"),  # type: ignore[arg-type]
    "error of a list": (lambda: Q.error([1.0]), r"x is list, but q has shape \(4, 64\)"),  # type: ignore[arg-type]
    "weight": (lambda: hb.gptq(ANY, EYE, "nvfp4"), "weight must be a numpy array or a torch tensor, not NoneType"),
    "swizzle": (lambda: swizzle(None), "scales must be a numpy array or a torch tensor"),
    "error of a quantized": (lambda: hb.error(Q, Q), "x is QuantizedTensor, not an array"),  # type: ignore[arg-type]
    "search of texts": (lambda: hb.search_global_scale(np.array([["a"] * 16])), "takes float32.* not <U1"),
    "search of integers": (lambda: hb.search_global_scale(np.ones((1, 16), int)), "takes float32.* not int64"),
    # options
    "block of numbers": (lambda: hb.get_format("nvfp4", np.ones(3)), "block is a whole number.*array"),  # type: ignore[arg-type]
    "threads of numbers": (lambda: hb.quantize(X, "nvfp4", threads=T), "threads must be a whole number of at least 1"),  # type: ignore[arg-type]
    "class of threads": (lambda: hb.quantize(X, "nvfp4", threads=int), "threads must be a whole number of at least 1"),  # type: ignore[arg-type]
    "flashinfer": (lambda: hb.contracts.flashinfer(mode=ANY), "unknown mode of flashinfer 'None'; known: "),
    "modelopt": (lambda: hb.contracts.modelopt(mode=ANY), "unknown mode of modelopt 'None'; known: "),
    "fouroversix": (lambda: hb.contracts.fouroversix(rule=ANY), "unknown rule of fouroversix 'None'; known: "),
    "torchao": (lambda: hb.contracts.torchao(scaling_mode=ANY), "unknown scaling_mode of torchao 'None'; known: "),
    "tile": (lambda: hb.contracts.transformer_engine(tile=SIXTEEN), "tile is a pair .* not 16"),
    "miles": (lambda: hb.contracts.miles(env="A=1"), "env is a mapping of environment variables, not 'A=1'"),  # type: ignore[arg-type]
    # parts and their shapes
    "shape": (lambda: hb.QuantizedTensor(**parts(shape=64)), "shape must be a tuple of whole numbers.* not 64"),
    "text shape": (lambda: hb.QuantizedTensor(**parts(shape="ab")), "shape must be a tuple .* not 'ab'"),
    "float shape": (lambda: hb.QuantizedTensor(**parts(shape=(4.0, 64.0))), "shape must be a tuple of whole numbers"),
    "negative shape": (lambda: hb.QuantizedTensor(**parts(shape=(4, -64))), "has a negative length"),
    "experts into": (lambda: expert(out=hb.quantize(STACK, "mxfp4")), r"out does not hold nvfp4 of shape \(2, 4, 64\)"),
    # rows
    "no such row": (lambda: Q[10], r"index 10 on shape \(4, 64\): axis 0 has 4"),
    "tensor of rows": (lambda: Q[torch.tensor([0, 1])], "rows are taken by integers and slices, not Tensor"),
    "array of rows": (lambda: Q[np.array([0, 1])], "rows are taken by integers and slices, not ndarray"),
    "array and the last axis": (lambda: Q[np.array([0, 1]), :], "rows are taken by integers and slices, not ndarray"),
    "two dots": (lambda: Q[..., ...], "only one ... is possible"),
    "text in a slice": (lambda: Q["a":], "rows are taken by integers and slices"),
    "float in a slice": (lambda: Q[1.0:2.0], "rows are taken by integers and slices"),
    # devices and dtypes
    "to a dtype": (lambda: Q.to(torch.float16), r"not to torch.float16; dequantize\(torch.float16\) gives"),  # type: ignore[arg-type]
    "to nothing": (lambda: Q.to(ANY), r"to\(\) takes a device such as 'cpu' or 'cuda:0', not None"),
    "to no device": (lambda: Q.to("foo"), "'foo' is no device"),
    "gptq on no device": (lambda: hb.gptq(T, EYE, "nvfp4", device="foo"), "'foo' is no device"),
    "decoded to None": (lambda: hb.dequantize(Q, None), "unknown output dtype 'None'"),
    # transforms
    "error after a rotation": (lambda: hb.quantize(T.T, "nvfp4", RHT).error(T), "rotates the tensor"),
    "search after a rotation": (lambda: hb.search_global_scale(T.T, RHT), "transforms the tensor"),
    # rules
    "keep": (lambda: Rules(keep="lm_head"), r"keep is a tuple of names, not one text: keep=\('lm_head',\)"),  # type: ignore[arg-type]
    "include": (lambda: Rules(include=(5,)), r"include is a tuple of names, not \(5,\)"),  # type: ignore[arg-type]
    "ignore": (lambda: Options(ignore="head"), "ignore is a tuple of names, not one text"),  # type: ignore[arg-type]
    "layers": (lambda: Rules(keep_first="a"), "keep_first and keep_last are numbers of layers"),  # type: ignore[arg-type]
    "rules": (lambda: Options(rules="x"), r"rules of Options are Rules\(…\), not 'x'"),  # type: ignore[arg-type]
    "no rules": (lambda: sync(rules="x"), "takes the pairs, Rules.* not str and Config"),
    "no config": (lambda: sync(config={"model_type": "llama"}), "takes the pairs, Rules.* not Rules and dict"),
    "options": (lambda: Config("nvfp4"), r"options of Config are Options\(…\)"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("error")
def test_mistakes(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(hb.HalfbyteError, match=message):
        call()


def test_a_row_that_is_not_there_ends_a_loop() -> None:
    with pytest.raises(IndexError):
        Q[4]
    assert [row.shape for row in Q] == [(64,)] * 4  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(hb.InputError, match="torch finds no CUDA device here, so nothing can go to 'cuda'; take 'cpu'"):
        Q.to("cuda")
    with pytest.raises(hb.InputError, match=r"gptq\(device=…\): torch finds no CUDA device"):
        hb.gptq(T, EYE, "nvfp4", device="cuda")


def test_paths(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "q.safetensors"):
        with pytest.raises(hb.InputError, match=r"cannot be written: .*; give the path of a file in a folder"):
            Q.save(path)
    wrong: tuple[Any, ...] = (None, 5)
    for given in wrong:
        for act in (Q.save, hb.load):
            with pytest.raises(hb.InputError, match=f"a path is a text or a pathlib.Path, not {given}"):
                act(given)
    Q.save(tmp_path / "q")
    with pytest.raises(hb.InputError, match="'foo' is no device"):
        hb.load(tmp_path / "q", "foo")


def test_whole_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    q = hb.QuantizedTensor(**parts(shape=np.array([4, 64])))
    assert q.shape == (4, 64)
    q.save(tmp_path / "q")
    assert hb.load(tmp_path / "q") == q == MX
    assert Q[np.int64(1)] == Q[torch.tensor(1)] == Q[1]
