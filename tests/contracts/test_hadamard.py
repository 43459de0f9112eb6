"""The random Hadamard transform of sixteen."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.contracts.hadamard import GROUP, SIGNS, rotate, sylvester
from halfbyte.testing import assert_same_bits
from tests.samples import F32, f32, gaussian

# + + + − + − − − − − − + − + − −
SIGN_VECTOR = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def doubled(order: int) -> F32:
    """Sylvester's own construction: [[H, H], [H, −H]]."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(np.float32)
    return matrix


def loop(x: F32, signs: list[int]) -> F32:
    """y_j = Σ x_i·sign_i·H_ij/4, added one by one in float32."""
    matrix = doubled(16)
    y = []
    for j in range(16):
        total = np.float32(0)
        for i in range(16):
            total = np.float32(total + np.float32(x[i] * np.float32(signs[i] * matrix[i, j] / 4)))
        y.append(total)
    return np.array(y, np.float32)


@pytest.mark.parametrize("order", [1, 2, 4, 16, 32])
def test_sylvester_by_doubling(order: int) -> None:
    assert_same_bits(sylvester(order), doubled(order))


def test_rows_are_orthogonal() -> None:
    assert_same_bits(sylvester(16) @ sylvester(16).T, 16 * np.eye(16, dtype=np.float32))


def test_sign_vector() -> None:
    assert SIGNS.tolist() == SIGN_VECTOR
    assert GROUP == 16


@pytest.mark.parametrize("random_signs", [True, False])
def test_transform_of_unit_vectors_is_the_matrix(random_signs: bool) -> None:
    signs = np.array(SIGN_VECTOR if random_signs else [1] * 16, np.float32)
    expected = signs[:, None] * doubled(16) / 4
    assert_same_bits(rotate(np.eye(16, dtype=np.float32), "fp32", random_signs) + np.float32(0), expected)


@given(st.lists(st.integers(-64, 64), min_size=16, max_size=16))
def test_twice_without_signs_is_the_identity(numbers: list[int]) -> None:
    """H/4 is its own inverse; small integers keep every sum exact."""
    x = f32(*numbers)[None]
    assert_same_bits(rotate(rotate(x, "fp32", False), "fp32", False) + np.float32(0), x + np.float32(0))


@given(st.lists(st.integers(-64, 64), min_size=16, max_size=16))
def test_length_is_kept(numbers: list[int]) -> None:
    x = f32(*numbers)[None]
    y = rotate(x, "fp32", True)
    assert float((y.astype(np.float64) ** 2).sum()) == float((x.astype(np.float64) ** 2).sum())


def test_sum_in_index_order() -> None:
    x = gaussian(20, 16)
    assert_same_bits(rotate(x, "fp32", True), np.stack([loop(row, SIGN_VECTOR) for row in x]))
    other = np.stack([loop(row[::-1].copy(), SIGN_VECTOR[::-1]) for row in x])
    assert not np.array_equal(np.sort(np.abs(rotate(x, "fp32", True))), np.sort(np.abs(other)))  # the order shows


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_sixteen_bit_operands_are_rounded_once(name: str, dtype: type) -> None:
    x = gaussian(8, 16).astype(dtype).astype(np.float32)
    expected = np.stack([loop(row, SIGN_VECTOR) for row in x]).astype(dtype).astype(np.float32)
    assert_same_bits(rotate(x, name, True), expected)


def test_groups_are_apart() -> None:
    x = gaussian(3, 48)
    groups = [rotate(x[:, start : start + 16], "fp32", True) for start in (0, 16, 32)]
    assert_same_bits(rotate(x, "fp32", True), np.concatenate(groups, axis=1))
