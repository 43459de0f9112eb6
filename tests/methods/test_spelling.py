"""One spelling of methods: Python, the command line, torch's operators."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halfbyte as hb
import halfbyte.torch_ops
from halfbyte.cli.app import app
from halfbyte.contracts.spec import spelled_methods
from halfbyte.methods import METHODS, Method, method_from, parse_method
from halfbyte.methods.spelling import read_spelling
from tests.samples import gaussian

X = gaussian(4, 32)
H = np.repeat(np.eye(16, dtype=np.float32)[None], 2, 0)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("amax", hb.Amax()),
        ("optimal", hb.Optimal()),
        ("optimal:headroom=1", hb.Optimal(headroom=1)),
        ("optimal:1.3", hb.Optimal(headroom=1.3)),
        ("optimal:headroom=1,1.75,2", hb.Optimal(headroom=(2, 1.75, 1))),
        ("sweep", hb.Sweep()),
        ("sweep:fused", hb.Sweep(True)),
        ("sweep:fused=false", hb.Sweep()),
        ("four_six:mse:256", hb.FourSix("mse", 256)),
        ("four_six:e4m3_max=256:mse:fast_error", hb.FourSix("mse", 256, True)),
    ],
)
def test_spellings(text: str, method: Method) -> None:
    assert method_from(text) == method
    assert method_from(method.spelling) == method
    if isinstance(method, hb.Optimal):
        assert "(" not in method.spelling


def test_hessian_has_arrays_beside_it() -> None:
    made = method_from("hessian:descent", h=H)
    assert isinstance(made, hb.Hessian)
    assert (made.codes, made.spelling) == ("descent", "hessian:descent")
    assert method_from("hessian:headroom=1,2", h=H).spelling == "hessian:headroom=1,2"
    with pytest.raises(hb.UnsupportedError, match="method 'hessian:descent' needs its matrices"):
        hb.quantize(X, "nvfp4", method="hessian:descent")


@dataclass(frozen=True)
class Invented(Method):
    array: object = None
    headroom: float | None = None
    tries: int = 3
    name: ClassVar[str] = "invented"
    everywhere: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("invented:headroom=2", {"headroom": 2.0}),
        ("invented:1.5:7", {"headroom": 1.5, "tries": 7}),
        ("invented:none:tries=4", {"headroom": None, "tries": 4}),
    ],
)
def test_options_of_any_dataclass(text: str, options: dict[str, Any]) -> None:
    kind, given = read_spelling(text, {"invented": Invented})
    assert (kind, given) == (Invented, options)
    assert read_spelling(Invented(**options).spelling, {"invented": Invented})[1] == {
        key: value for key, value in options.items() if value is not None
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "unknown method 'best'; known: amax, four_six, gptq, hessian, optimal, sweep"),
        ("amax:3", "amax takes no options, so '3' has no meaning"),
        ("four_six:mse:256:7", "takes the options error, e4m3_max, fast_error, so '7' has no meaning"),
        ("four_six:mse:error=mae", "gives error twice"),
        ("four_six:mse:many", "e4m3_max is a whole number, not 'many'"),
        ("sweep:fused=perhaps", "fused is true or false, not 'perhaps'"),
        ("four_six:colour=1", "unknown option of method four_six 'colour'; known: e4m3_max, error, fast_error"),
        ("four_six:mse:300", "e4m3_max is 448 or 256"),
        ("optimal:headroom=1,two", "headroom is a number, or several with commas, not '1,two'"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(hb.HalfbyteError, match=message):
        method_from(text)
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.quantize(X, "nvfp4", "transformer_engine" if "sweep" not in text else "modelopt", text)


def test_options_that_are_not_named_are_the_contract_s() -> None:
    own = hb.quantize(X, "nvfp4", "modelopt", "four_six")
    assert own.method == hb.FourSix("mse", 256)
    assert hb.quantize(X, "nvfp4", "modelopt", "four_six:mse").method == own.method
    with pytest.raises(hb.UnsupportedError, match="contract modelopt does not define method four_six:mae:256 "):
        hb.quantize(X, "nvfp4", "modelopt", "four_six:mae")


@pytest.mark.parametrize("contract", hb.contracts.CONTRACTS)
def test_every_listed_method_works_everywhere(contract: str) -> None:
    """What `halfbyte contracts` lists: quantize takes it, and an operator with a text."""
    x = torch.from_numpy(X)
    for format, rule in hb.contracts.CONTRACTS[contract]().rules.items():
        for text in spelled_methods(rule):
            if parse_method(text)[0] is hb.Hessian:
                q = hb.quantize(x, format, contract, method_from(text, h=_h(format)))
                assert q.method.spelling == text
                continue
            q = hb.quantize(x, format, contract, text)
            codes, scales, _, stored = torch.ops.halfbyte.quantize(x, format, contract, text)
            assert torch.equal(codes, q.codes)  # type: ignore[arg-type]
            assert torch.equal(scales, q.scales)  # type: ignore[arg-type]
            y = torch.ops.halfbyte.dequantize(codes, scales, stored, 32, format, contract, torch.float32, text)
            assert torch.equal(y, q.dequantize())  # type: ignore[arg-type]


def _h(format: str) -> np.ndarray[Any, Any]:
    block = hb.get_format(format).block
    return np.repeat(np.eye(block, dtype=np.float32)[None], 32 // block, 0)


def test_the_command_lists_them(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    result = CliRunner().invoke(app, ["contracts", "modelopt", "--json", str(file)])
    assert result.exit_code == 0
    methods = json.loads(file.read_text())["modelopt"]["methods"]
    everywhere = ["amax", "optimal", "hessian", "hessian:descent", "gptq"]
    assert sorted(methods) == sorted([*everywhere, "four_six:mse:256", "sweep", "sweep:fused"])
    assert "methods of nvfp4: amax, optimal, hessian" in result.output
    assert "four_six:mae|mse:448|256[:fast_error]" in CliRunner().invoke(app, ["contracts"], terminal_width=400).output
    assert set(METHODS) >= {text.split(":")[0] for text in methods}


def test_methods_that_an_option_adds_are_listed_with_it(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    shown = CliRunner().invoke(app, ["contracts", "flashinfer", "--json", str(file)]).output
    assert "mode='ref' (or 'te', '4over6')" in shown
    assert "methods of nvfp4 with mode=4over6 too: four_six:mae:448, four_six:mae:448:fast_error, " in shown
    listed = CliRunner().invoke(app, ["contracts"], terminal_width=400).output
    assert "gptq, four_six:mae|mse:448|256[:fast_error] (mode=4over6) " in listed
    assert listed.count("mode=") == 1  # what other options add, the defaults have
    found = json.loads(file.read_text())["flashinfer"]
    assert found["choices"]["mode"] == ["ref", "te", "4over6"]
    assert list(found["methods_by_option"]) == ["mode=4over6"]
    added = found["methods_by_option"]["mode=4over6"]["nvfp4"]
    assert len(added) == 8
    for text in added:
        assert hb.quantize(X, "nvfp4", hb.contracts.flashinfer(mode="4over6"), text).method.spelling == text
        with pytest.raises(hb.UnsupportedError, match="does not define method"):
            hb.quantize(X, "nvfp4", "flashinfer", text)
