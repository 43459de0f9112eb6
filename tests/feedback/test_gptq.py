"""What error feedback does: a case worked by hand, the textbook, the order of methods, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.errors import HalfbyteError, InputError, UnsupportedError
from halfbyte.feedback import prepare
from halfbyte.testing import assert_same_bits
from tests.feedback.problems import layer
from tests.feedback.textbook import textbook


def test_two_columns_by_hand() -> None:
    """Two inputs that always agree: what the first column rounds down, the second rounds up.

    MXFP4, largest weight 6, scale 1. H = [[1, c], [c, 1]] with c = 0.8, all else unrelated. The first weight, 1.25, is
    half-way between 1 and 1.5; ties go to the even code, 1, with the error −0.25. R[0, 1] = c. The second weight, 1.1,
    becomes 1.1 + 0.25·0.8 = 1.3 and rounds to 1.5 instead of 1.
    """
    h = np.eye(32)
    h[0, 1] = h[1, 0] = 0.8
    w = np.zeros((1, 32), np.float32)
    w[0, :2], w[0, 31] = (1.25, 1.1), 6
    assert hb.dequantize(hb.quantize(w, "mxfp4"))[0, :2].tolist() == [1, 1]
    q = hb.gptq(w, h, "mxfp4", damping=0, order="given")
    assert hb.dequantize(q)[0, :2].tolist() == [1, 1.5]
    assert hb.dequantize(q)[0, 31] == 6
    assert prepare(h, 32, hb.Gptq(damping=0)).feedback.factor[0, 1] == np.float32(0.8)


def test_the_factor_is_that_of_the_textbook() -> None:
    """Rows of the inverse of R are rows of the upper Cholesky factor of the inverse, divided by their diagonal."""
    h = layer(width=64).second_moment.astype(np.float64)
    r = np.asarray(prepare(h, 16, hb.Gptq(damping=0.01, order="given")).feedback.factor).astype(np.float64)
    damped = h + 0.01 * np.diag(h).mean() * np.eye(64)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    wanted = upper / np.diag(upper)[:, None]
    assert np.abs(np.linalg.inv(r) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_the_textbook_finds_the_same_weights() -> None:
    given = layer(rows=30, width=96)
    h, amax = given.second_moment, float(np.abs(given.weight).max())
    blocks = prepare(h, 16, hb.Gptq(order="given")).feedback.objective.matrices

    def scales(part: Any, number: int) -> Any:
        method = hb.Hessian(blocks[number : number + 1])
        return hb.quantize(part.astype(np.float32), "nvfp4", method=method, global_amax=amax)

    by_book = textbook(given.weight, h, scales)
    ours = hb.dequantize(hb.gptq(given.weight, h, "nvfp4", order="given", headroom=1))
    same = np.isclose(np.asarray(ours, np.float64), by_book, rtol=1e-5, atol=1e-9)
    assert same.mean() > 0.98  # a tie that falls the other way changes the rest of its row
    assert abs(given.output_error(ours) / given.output_error(by_book.astype(np.float32)) - 1) < 0.02


def test_the_published_order_of_methods() -> None:
    """naive > optimal > hessian > gptq > gptq with Hessian scales > blocks in order, in the error of the output."""
    given = layer(rows=96, width=256, spread=0.3)
    h, amax = given.second_moment, float(np.abs(given.weight).max())
    blocks = hb.Hessian(hb.hessian_from_activations(given.inputs))

    def naive(part: Any, number: int) -> Any:
        return hb.quantize(part.astype(np.float32), "nvfp4", global_amax=amax)

    errors = [
        given.output_error(hb.dequantize(hb.quantize(given.weight, "nvfp4", method=m)))
        for m in ("amax", "optimal", blocks)
    ]
    errors.append(given.output_error(textbook(given.weight, h, naive).astype(np.float32)))
    errors += [
        given.output_error(hb.dequantize(hb.gptq(given.weight, h, "nvfp4", order=order)))
        for order in ("given", "falling")
    ]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == 6


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_feedback_beats_scales_alone(format: str) -> None:
    given = layer(rows=64, width=192, seed=3)
    h, block = given.second_moment, hb.get_format(format).block
    hessian = hb.Hessian(hb.hessian_from_activations(given.inputs, block))
    by_scales = given.output_error(hb.dequantize(hb.quantize(given.weight, format, method=hessian)))
    plain = given.output_error(hb.dequantize(hb.gptq(given.weight, h, format)))
    descended = given.output_error(hb.dequantize(hb.gptq(given.weight, h, format, descent=2)))
    assert descended < plain < 0.9 * by_scales


def test_cross_moments_restore_the_exact_outputs() -> None:
    """The target that accounts for wrong inputs gives outputs nearer to those of the unquantized model."""
    given = layer(rows=64, width=128, tokens=4096, seed=5)
    wanted = given.exact.astype(np.float64) @ given.weight.T

    def distance(**options: Any) -> float:
        q = hb.gptq(given.weight, given.second_moment, "nvfp4", damping=0.01, **options)
        found = given.inputs.astype(np.float64) @ np.asarray(hb.dequantize(q), np.float64).T
        return float(((found - wanted) ** 2).sum())

    half = distance(cross_moment=given.cross_moment, asymmetry=0.5)
    whole = distance(cross_moment=given.cross_moment, asymmetry=1.0)
    assert whole < half < distance()
    assert distance(cross_moment=given.cross_moment, asymmetry=0) == distance()


def test_torch_in_torch_out() -> None:
    given = layer(rows=12, width=64)
    q = hb.gptq(given.weight, given.second_moment, "nvfp4")
    t = hb.gptq(torch.from_numpy(given.weight), torch.from_numpy(given.second_moment), "nvfp4")
    assert isinstance(t.codes, torch.Tensor)
    assert_same_bits(t.codes, q.codes)
    assert t.method == hb.Gptq()
    assert_same_bits(hb.dequantize(t), hb.dequantize(q))
    stacked = hb.gptq(given.weight.reshape(3, 4, 64), given.second_moment, "nvfp4")
    assert_same_bits(np.asarray(stacked.codes).reshape(12, -1), q.codes)
    half = torch.from_numpy(given.weight).bfloat16()
    assert_same_bits(
        hb.gptq(half, given.second_moment, "nvfp4").codes, hb.gptq(half.float(), given.second_moment, "nvfp4").codes
    )


def test_weights_without_rows() -> None:
    q = hb.gptq(np.zeros((0, 64), np.float32), np.eye(64), "nvfp4")
    assert q.codes.shape == (0, 32)


# --- statistics that are not as they should be ---


def test_dead_inputs_keep_plain_rounding_and_feed_nothing_back() -> None:
    given = layer(rows=20, width=64, dead=16)
    factor = prepare(given.second_moment, 16)
    assert factor.dead == 16
    assert np.array_equal(factor.feedback.factor[-16:, -16:], np.eye(16))
    assert not factor.feedback.factor[:-16, -16:].any()
    amax = float(np.abs(given.weight).max())
    q = hb.gptq(given.weight, factor, "nvfp4", global_amax=amax)
    plain = hb.quantize(given.weight[:, -16:].copy(), "nvfp4", method="optimal", global_amax=amax)
    assert_same_bits(np.asarray(q.codes)[:, -8:], plain.codes)
    assert_same_bits(np.asarray(q.scales)[:, -1:], plain.scales)


def test_no_token_at_all_is_optimal() -> None:
    w = layer(rows=9, width=64).weight
    q = hb.gptq(w, np.zeros((64, 64)), "nvfp4")
    assert_same_bits(q.codes, hb.quantize(w, "nvfp4", method="optimal").codes)


def test_a_singular_matrix_gets_more_damping() -> None:
    x = np.random.default_rng(0).standard_normal((5, 64))  # five tokens for 64 inputs
    h = x.T @ x
    assert not prepare(h, 16).damped
    factor = prepare(h - 1e-9 * np.eye(64) * np.diag(h), 16, hb.Gptq(damping=0))
    assert factor.damped
    assert factor.method.damping in (1e-3, 1e-2)
    indefinite = np.eye(64)
    indefinite[0, 1] = indefinite[1, 0] = 40.0
    with pytest.raises(InputError, match=r"layer.q: second_moment cannot be factored, even with damping 1"):
        hb.gptq(np.ones((1, 64), np.float32), indefinite, "nvfp4", name="layer.q")


def broken(at: tuple[int, int], value: float) -> Any:
    h = np.eye(64)
    h[at] = value
    return h


@pytest.mark.parametrize(
    ("h", "error"),
    [
        (broken((3, 3), np.nan), r"weight: second_moment of shape \(64, 64\) holds NaN or Inf"),
        (broken((3, 4), np.inf), "NaN or Inf"),
        (broken((3, 4), 0.5), "not symmetric"),
        (broken((3, 3), -1.0), "negative number on its diagonal"),
        (np.eye(32), r"weight has shape \(2, 64\), but the second moments are those of 32 inputs"),
        (np.eye(24), "the width must be a multiple of the block, 16"),
        (np.ones(64), r"it must be \(K, K\)"),
        ("moments", "must be an array of numbers"),
    ],
)
def test_statistics_that_are_none(h: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        hb.gptq(np.ones((2, 64), np.float32), h, "nvfp4")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "mxfp8"}, "nvfp4 and mxfp4, not to mxfp8"),
        ({"contract": hb.contracts.transformer_engine(columnwise=True)}, "transforms the weight"),
        ({"contract": hb.contracts.transformer_engine(tile=(16, 16))}, "spans several"),
        ({"damping": 1.5}, "damping must be a number from 0 to 1"),
        ({"asymmetry": float("nan")}, "asymmetry must be a number"),
        ({"descent": -1}, "descent is a number of sweeps"),
        ({"order": "rising"}, "unknown order of blocks 'rising'; known: falling, given"),
        ({"cross_moment": np.eye(32)}, r"cross_moment has shape \(32, 32\), the second moments \(64, 64\)"),
        ({"backend": "gpu"}, "takes tensors on a GPU"),
        ({"threads": 0}, "number of threads"),
        ({"global_amax": -1.0}, "must not be negative"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], error: str) -> None:
    arguments = {"format": "nvfp4", **options}
    with pytest.raises(HalfbyteError, match=error):
        hb.gptq(np.ones((2, 64), np.float32), np.eye(64), **arguments)


def test_weights_that_no_feedback_can_serve() -> None:
    w = np.ones((2, 64), np.float32)
    w[1, 5] = np.inf
    with pytest.raises(InputError, match=r"layer.q of shape \(2, 64\) holds NaN or Inf"):
        hb.gptq(w, np.eye(64), "nvfp4", name="layer.q")
    with pytest.raises(InputError, match="prepared for blocks of 32, nvfp4 has 16"):
        hb.gptq(np.ones((2, 64), np.float32), prepare(np.eye(64), 32), "nvfp4")
    with pytest.raises(InputError, match="a Factor holds its cross moments already"):
        hb.gptq(np.ones((2, 64), np.float32), prepare(np.eye(64)), "nvfp4", cross_moment=np.eye(64))


def test_quantize_says_where_to_go() -> None:
    with pytest.raises(UnsupportedError, match=r"'gptq' needs second moments of the inputs: hb\.gptq"):
        hb.quantize(np.ones((2, 64), np.float32), "nvfp4", method="gptq")


def test_options_are_recorded() -> None:
    q = hb.gptq(np.ones((2, 64), np.float32), np.eye(64), "nvfp4", damping=0.01, order="given", descent=1)
    assert q.method == hb.Gptq(damping=0.01, order="given", descent=1)
    assert q.method == replace(hb.Gptq(), damping=0.01, order="given", descent=1)
