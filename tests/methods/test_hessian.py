"""Hessians: from activations of every kind, and refused where they cannot be one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(40, 64, seed=3)


def by_definition(x: Any, block: int = 16) -> Any:
    exact = x.astype(np.float64)
    return np.stack(
        [exact[:, i : i + block].T @ exact[:, i : i + block] for i in range(0, exact.shape[1], block)]
    ).astype(np.float32)


def test_it_is_xtx_of_each_block_of_columns() -> None:
    assert hb.hessian_from_activations(X) == pytest.approx(by_definition(X), rel=1e-6, abs=1e-6)
    assert hb.hessian_from_activations(X, block=32).shape == (2, 32, 32)


def test_chunks_and_leading_axes_add_up() -> None:
    whole = hb.hessian_from_activations(X)
    assert hb.hessian_from_activations(X.reshape(4, 10, 64)) == pytest.approx(whole, rel=1e-6, abs=1e-6)
    chunks = (X[start : start + 7] for start in range(0, 40, 7))
    assert hb.hessian_from_activations(chunks) == pytest.approx(whole, rel=1e-6, abs=1e-6)
    assert_same_bits(hb.hessian_from_activations([X, X[:0]]), whole)  # a chunk without tokens adds nothing
    assert not hb.hessian_from_activations(X[:0]).any()


def test_torch_activations() -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.from_numpy(X).to(dtype)
        wanted = hb.hessian_from_activations(x.double().numpy())
        assert_same_bits(hb.hessian_from_activations(x), wanted)
        chunks = hb.hessian_from_activations([x[:11], x[11:]])
        assert_same_bits(chunks, hb.hessian_from_activations([x[:11].double().numpy(), x[11:].double().numpy()]))
    assert_same_bits(hb.hessian_from_activations(torch.from_numpy(X).requires_grad_()), hb.hessian_from_activations(X))
    bf16 = X.astype(ml_dtypes.bfloat16)
    assert_same_bits(hb.hessian_from_activations(bf16), hb.hessian_from_activations(bf16.astype(np.float32)))


def test_torch_matrices_and_weights() -> None:
    import torch

    h = hb.hessian_from_activations(X)
    weights = np.arange(1, 65, dtype=np.float32)
    for method, same in (
        (hb.Hessian(h), hb.Hessian(torch.from_numpy(h).requires_grad_())),
        (hb.Optimal(weights), hb.Optimal(torch.from_numpy(weights).to(torch.bfloat16))),
    ):
        got, wanted = (hb.quantize(X, "nvfp4", method=m) for m in (same, method))
        assert_same_bits(got.scales, wanted.scales)
        assert_same_bits(got.codes, wanted.codes)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (3.0, "must be an array .* not float"),
        ([[1.0, 2.0]], r"activations of shape \(2,\): the last axis must be a multiple of 16"),
        (["a"], "activations must be an array of numbers, not str"),
        (np.ones((4, 20)), r"activations of shape \(4, 20\): the last axis must be a multiple of 16"),
        (np.zeros((4, 0)), r"activations of shape \(4, 0\)"),
        (np.full((4, 16), np.nan), r"activations of shape \(4, 16\) hold NaN or Inf"),
        ([], "no activations"),
        ([np.ones((2, 16)), np.ones((2, 32))], "chunks differ in width: 16 and 32"),
        (np.full((4, 16), 1e20), "exceeds float32; divide"),
    ],
)
def test_bad_activations(x: Any, message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        hb.hessian_from_activations(x)


@pytest.mark.parametrize("block", [0, -16, 1.5, None])
def test_bad_block(block: Any) -> None:
    with pytest.raises(hb.InputError, match="block must be a whole number of at least 1"):
        hb.hessian_from_activations(X, block)


def indefinite(share: float) -> Any:
    """A matrix whose smallest eigenvalue is this share of the largest one, below zero."""
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))[0]
    h = (rotation * np.append(-share, np.linspace(0, 1, 15))) @ rotation.T
    return ((h + h.T) / 2).astype(np.float32)[None]


def test_a_matrix_that_is_not_semidefinite_is_refused_with_a_way_out() -> None:
    h = np.concatenate([np.eye(16, dtype=np.float32)[None], indefinite(0.25)])
    with pytest.raises(
        hb.InputError, match=r"h\[1\] is not positive semidefinite: it has the eigenvalue -0.25, and 1 of 2"
    ):
        hb.Hessian(h)
    hb.Hessian(h + np.float32(0.25) * np.eye(16, dtype=np.float32))
    with pytest.raises(hb.InputError, match="not positive semidefinite"):
        hb.Hessian(-np.eye(16)[None])


def test_rounding_is_allowed_for() -> None:
    hb.Hessian(indefinite(9e-4))
    with pytest.raises(hb.InputError, match="not positive semidefinite"):
        hb.Hessian(indefinite(1.1e-3))
    few = gaussian(3, 64, seed=1)  # rank 3: thirteen eigenvalues are zero but for rounding
    hb.Hessian(hb.hessian_from_activations(few))
    hb.Hessian(np.zeros((2, 16, 16)))


@pytest.mark.parametrize("h", ["abc", [[1, 2], [3]], None])
def test_no_matrices_at_all(h: Any) -> None:
    with pytest.raises(hb.InputError, match=r"h (must be an array of numbers|has shape)"):
        hb.Hessian(h)
