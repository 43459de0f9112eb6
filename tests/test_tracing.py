"""hb.quantize and hb.dequantize under torch.compile: no graph break, the same bits, shapes that change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import tracing
from halfbyte.testing import assert_same_bits

CALLS: list[dict[str, Any]] = [
    {"format": "nvfp4"},
    {"format": "nvfp4", "method": hb.FourSix("mse", 256)},
    {"format": "nvfp4", "contract": "torchao"},
    {"format": "nvfp4", "contract": hb.contracts.torchao(two_level=False)},
    {"format": "nvfp4", "contract": hb.contracts.transformer_engine(columnwise=True)},
    {"format": "nvfp4", "scaling": "row"},
    {"format": "nvfp4", "global_amax": 3.0},
    {"format": "nvfp4", "global_amax": torch.tensor(3.0), "method": "optimal"},
    {"format": "mxfp4"},
    {"format": "mxfp8"},
]


def both(x: torch.Tensor, **options: Any) -> tuple[hb.QuantizedTensor, Any]:
    q = hb.quantize(x * 2, **options)
    return q, hb.dequantize(q, "bfloat16")


def same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor) -> None:
    assert (got.shape, got.format) == (expected.shape, expected.format)
    assert (got.contract, got.method) == (expected.contract, expected.method)
    for part in ("codes", "scales", "global_scale", "stored_scale"):
        mine, wanted = getattr(got, part), getattr(expected, part)
        assert (mine is None) == (wanted is None), part
        if wanted is not None:
            assert mine.shape == wanted.shape
            assert_same_bits(mine, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_the_same_bits_without_a_graph_break(options: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    for shape in ((16, 64), (32, 128)):
        x = torch.randn(*shape).to(torch.bfloat16)
        (got, values), (expected, wanted) = compiled(x, **options), both(x, **options)
        same(got, expected)
        assert_same_bits(values, wanted)


def test_the_functions_themselves() -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 32)
    q = hb.quantize(x, "nvfp4")
    same(torch.compile(hb.quantize, fullgraph=True, backend="eager")(x, "nvfp4"), q)
    values = torch.compile(hb.dequantize, fullgraph=True, backend="eager")(q)
    assert_same_bits(values, hb.dequantize(q))


def test_given_outputs_are_written_into() -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 32)
    out, values = hb.quantize(torch.ones(8, 32), "nvfp4"), torch.zeros(8, 32)

    def call(x: torch.Tensor) -> tuple[hb.QuantizedTensor, Any]:
        q = hb.quantize(x, "nvfp4", out=out)
        return q, hb.dequantize(q, out=values)

    torch.compile(call, fullgraph=True, backend="eager")(x)
    expected = hb.quantize(x, "nvfp4")
    assert_same_bits(out.codes, expected.codes)
    assert_same_bits(out.scales, expected.scales)
    assert_same_bits(values, hb.dequantize(expected))


def test_wrong_arguments_are_refused_as_ever() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(hb.quantize, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="multiple of 16, not 24"):
        compiled(torch.randn(8, 24), "nvfp4", "torchao")
    with pytest.raises(Exception, match="unknown format 'nvfp5'"):
        compiled(torch.randn(8, 32), "nvfp5")


def test_names_of_calls_say_what_they_are() -> None:
    """Equal arguments have equal names, in every process; other ones have others, arrays included."""

    def name(method: object, contract: object = None, dtype: str = "torch.float32") -> str:
        return tracing.quantizing("nvfp4", contract, method, None, None, None, "auto", None, dtype, "cpu")

    ones, twos = np.ones(32, np.float32), np.full(32, 2, np.float32)
    assert name("amax") == name(hb.Amax()) == name(None, "transformer_engine")
    assert name(hb.Optimal(ones)) == name(hb.Optimal(ones))
    different = [
        name("amax"), name("optimal"), name(hb.Optimal(ones)), name(hb.Optimal(twos)), name("amax", "torchao"),
        name("amax", hb.contracts.torchao(two_level=False)), name("amax", None, "torch.bfloat16"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_outside_of_tracing_nothing_changes() -> None:
    assert not tracing.is_tracing()
