"""Rows with a scale each: only those that no kernel is exact for go to the reference, and the bits are its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends.cpu import headroom, row_decode, rows
from halfbyte.backends.headroom import merged, probe
from halfbyte.backends.reference import quantize as reference
from halfbyte.backends.reference.headroom import survey
from halfbyte.methods import Method
from halfbyte.request import resolve
from halfbyte.testing import assert_same_bits

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
METHODS: list[str | Method] = ["amax", "four_six", "optimal", hb.Optimal(headroom=1), hb.Optimal(headroom=(1, 2))]
KINDS = ["gauss", "uniform", "wide", "some zero", "spikes", "on the grid", "few"]


def operand(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Rows of a kind, and among them one of zeros, one of −0, one with NaN, and ones near the ends of float32."""
    rng = np.random.default_rng(seed)
    x, by_block = rng.standard_normal(shape), (shape[0], shape[1] // 16)
    match kind:
        case "uniform":
            x = rng.uniform(-1, 1, shape)
        case "wide":
            x *= np.exp2(rng.integers(-14, 1, by_block)).repeat(16, 1)
        case "some zero":
            x = np.where((rng.random(by_block) < 0.5).repeat(16, 1), 0, x)
        case "spikes":
            x = np.where(rng.random(shape) < 0.01, x * 3000, x / 1000)
        case "on the grid":
            x = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], shape) * rng.choice([-1, 1], shape)
        case "few":
            x = np.where(rng.random(shape) < 0.1, x, 0)
    x[1], x[3], x[5, 7] = 0, -0.0, np.nan
    x[7] *= 1e-33
    x[9] *= 1e33
    x[10] *= 1e-25
    return x.astype(np.float32)


def assert_rows_of_the_reference(x: np.ndarray[Any, Any], method: str | Method) -> None:
    found, expected = (
        hb.quantize(x, "nvfp4", method=method, scaling="row", backend=backend) for backend in ("cpu", "reference")
    )
    for part in ("codes", "scales", "stored_scale", "global_scale"):
        assert_same_bits(getattr(found, part), getattr(expected, part))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_of_all_kinds_beside_each_other(method: str | Method, kind: str) -> None:
    for number, dtype in enumerate(DTYPES):
        with np.errstate(over="ignore"):
            assert_rows_of_the_reference(operand(kind, (11, 48), seed=number).astype(dtype), method)


@pytest.mark.parametrize("seed", range(3))
def test_short_rows_choose_between_two_headrooms(seed: int) -> None:
    """One to three blocks per row: whether a block gains, and is found to, differs from row to row."""
    x = np.concatenate([operand(kind, (11, 48), seed)[:, : 16 * (1 + seed)] for kind in KINDS])
    assert_rows_of_the_reference(x, hb.Optimal(headroom=(1, 2)))


@pytest.mark.parametrize("kind", ["gauss", "uniform"])
def test_a_sample_of_rows_is_that_of_the_reference(kind: str) -> None:
    """Beyond 65,536 elements rows are sampled; neither normal nor uniform data speak for a further headroom."""
    x = operand(kind, (160, 512), seed=2).astype(ml_dtypes.bfloat16)
    x[5, 7] = 1
    request = resolve("nvfp4", None, "optimal", scaling="row", dtype="bf16")
    trial = probe(request, x.size)
    assert trial is not None
    amax = np.abs(x.astype(np.float32)).max(axis=1)
    found = headroom._sampled_rows(x, amax, request, trial)
    blocks = x.astype(np.float32).reshape(160, 32, 16)[:: trial.step]
    each = [
        survey(row[None], own, request, trial.candidates) for row, own in zip(blocks, amax[:: trial.step], strict=True)
    ]
    wanted = merged(totals for totals in each if None not in totals)
    one = (wanted[0] or 0) - (found[0] or 0)  # up to a number that all candidates share
    assert [(a or 0) - (b or 0) for a, b in zip(wanted, found, strict=True)] == [one] * len(wanted)
    assert not trial.finds(found)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_only_rows_out_of_range_go_to_the_reference(method: str | Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of zeros once sent the whole matrix there, which took minutes instead of milliseconds."""
    sent: list[int] = []

    def counted(x: np.ndarray[Any, Any], *rest: Any) -> Any:
        sent.append(len(x))
        return reference.quantize_matrix(x, *rest)

    monkeypatch.setattr(rows, "quantize_matrix", counted)
    hb.quantize(operand("gauss", (64, 128), seed=3), "nvfp4", method=method, scaling="row", backend="cpu")
    assert sent == [4 if method == "four_six" else 3]  # NaN, 1e-33 and 1e33; 4over6 squares 1e-25 as it is


def test_rows_with_given_amaxes() -> None:
    x = operand("gauss", (14, 64), seed=4)
    amax = np.abs(np.nan_to_num(x)).max(axis=1) * 2
    for method in ("amax", "four_six", "optimal"):
        found, expected = (
            hb.quantize(x, "nvfp4", method=method, scaling="row", global_amax=amax, backend=backend)
            for backend in ("cpu", "reference")
        )
        assert_same_bits(found.codes, expected.codes)
        assert_same_bits(found.scales, expected.scales)


# --- decoding ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(14, 64), (14, 72), (14, 57)], ids=str)
def test_rows_decode_as_the_reference_decodes_them(
    shape: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = operand("wide", (14, 80), seed=5)[:, : shape[1]]
    q = hb.quantize(np.ascontiguousarray(x), "nvfp4", scaling="row")
    expected = hb.dequantize(q, dtype, backend="reference")
    sent: list[int] = []

    class Counted(reference.Reference):
        def dequantize(self, parts: Any, shape: Any, *rest: Any) -> Any:
            sent.append(shape[0])
            return super().dequantize(parts, shape, *rest)

    monkeypatch.setattr(row_decode, "Reference", Counted)
    assert_same_bits(hb.dequantize(q, dtype, backend="cpu"), expected)
    assert sum(sent) <= 3  # NaN, and what overflows in the dtype


@pytest.mark.parametrize("contract", ["transformer_engine", "modelopt", "fouroversix"])
def test_experts_decode_as_the_reference_decodes_them(contract: str) -> None:
    x = np.random.default_rng(6).standard_normal((3, 5, 64)).astype(np.float32)
    x[1] = 0
    q = hb.quantize(x, "nvfp4", contract, scaling="expert")
    for dtype in ("float32", "bfloat16"):
        assert_same_bits(hb.dequantize(q, dtype, backend="cpu"), hb.dequantize(q, dtype, backend="reference"))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("width", [1, 15, 31, 33, 47])
def test_widths_that_are_no_multiple_of_a_block_decode(format: str, width: int) -> None:
    x = np.random.default_rng(7).standard_normal((5, width)).astype(np.float32)
    q = hb.quantize(x, format)
    for dtype in ("float32", "bfloat16"):
        assert_same_bits(hb.dequantize(q, dtype, backend="cpu"), hb.dequantize(q, dtype, backend="reference"))
        out = np.empty(x.shape, np.float32)
        assert_same_bits(hb.dequantize(q, backend="cpu", out=out), hb.dequantize(q, backend="reference"))
