"""Tensors of zeros: the bits of the reference, which has to look at two rows alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends.cpu import zeros
from halfbyte.backends.reference import quantize as reference
from halfbyte.backends.reference.search import ScaleGrid, exponent_of, search_scales
from halfbyte.formats import E2M1, E4M3
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits

CONTRACTS = [
    "transformer_engine",
    "modelopt",
    "compressed_tensors",
    "torchao",
    "fouroversix",
    "flashinfer",
    "miles",
    "vllm",
]
HESSIAN = hb.Hessian(np.tile(np.eye(16), (3, 1, 1)))
METHODS: list[str | Method] = ["amax", "four_six", "sweep", "optimal", hb.Optimal(np.arange(1.0, 49.0)), HESSIAN]


def signed_zeros(shape: tuple[int, ...], signs: str) -> np.ndarray[Any, Any]:
    x = np.zeros(shape, np.float32)
    if signs == "mixed":
        x[np.random.default_rng(0).random(shape) < 0.5] = -0.0
        x[0] = 0.0
    elif signs == "minus":
        x[:] = -0.0
    return x


@pytest.mark.parametrize("signs", ["plus", "minus", "mixed"])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_zeros_are_the_reference_s(contract: str, signs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counted(x: np.ndarray[Any, Any], *rest: Any) -> Any:
        sent.append(len(x))
        return reference.quantize_matrix(x, *rest)

    monkeypatch.setattr(zeros, "quantize_matrix", counted)
    for method in METHODS:
        for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
            for tile in (None, (16, 16)):
                x = signed_zeros((32, 48), signs).astype(dtype)
                try:
                    expected = hb.quantize(x, "nvfp4", contract, method, tile=tile, backend="reference")
                    found = hb.quantize(x, "nvfp4", contract, method, tile=tile, backend="cpu", threads=2)
                except hb.HalfbyteError:
                    continue
                for part in ("codes", "scales", "stored_scale", "global_scale"):
                    if getattr(expected, part) is not None:
                        assert_same_bits(getattr(found, part), getattr(expected, part))
    assert sent
    assert max(sent) <= 32  # two rows, or two rows of tiles


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_search_without_scales_tries_none(value: float) -> None:
    """The reference keeps the bytes of the amax method then, and its search of 126 scales would take minutes."""

    def encode(byte: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raise AssertionError("a scale was tried")

    blocks = np.full((3, 2, 16), value, np.float32)
    g = np.full((1, 1, 1), value, np.float32)
    start = np.full(blocks.shape, 5, np.uint8), np.full((3, 2, 1), 7, np.uint8)
    codes, bytes_ = search_scales(blocks, start, ScaleGrid(1, E4M3, g, exponent_of(g)), encode, E2M1, hb.Optimal())
    assert_same_bits(codes, start[0])
    assert_same_bits(bytes_, start[1])
