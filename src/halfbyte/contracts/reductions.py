"""Sums in a fixed order. Floating-point addition is not associative, so a contract that adds errors names the order."""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32


def sequential(errors: F32) -> F32:
    """one by one in index order"""
    total = np.zeros_like(errors[..., 0])
    for index in range(errors.shape[-1]):
        total = total + errors[..., index]
    return total


def eight_lanes(errors: F32) -> F32:
    """eight lanes (PyTorch's CPU reduction), then the lanes in order

    Lane l adds the elements l, l+8, … With 32 elements or more, there are four partial sums; vector i goes to partial
    sum i mod 4. The partial sums are added in order before the lanes are.
    """
    vectors = errors.reshape(*errors.shape[:-1], -1, 8)
    count = vectors.shape[-2]
    partials = 4 if count >= 4 else 1
    total = None
    for partial in range(partials):
        lanes = vectors[..., partial, :]
        for index in range(partial + partials, count, partials):
            lanes = lanes + vectors[..., index, :]
        total = lanes if total is None else total + lanes
    return sequential(total if total is not None else vectors[..., 0, :])


def maximum(errors: F32) -> F32:
    """the largest"""
    return np.asarray(errors.max(axis=-1))


def rows_then_tree(errors: F32) -> F32:
    """each row in index order, then the sixteen rows as a tree (r + r+8, then 4, 2, 1)"""
    rows = sequential(errors)
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows[..., 0]


def eight_lanes_flat(errors: F32) -> F32:
    """eight lanes over the tile's elements in row-major order"""
    return eight_lanes(errors.reshape(*errors.shape[:-2], -1))


def maximum_flat(errors: F32) -> F32:
    """the largest of the tile"""
    return np.asarray(errors.max(axis=(-2, -1)))
