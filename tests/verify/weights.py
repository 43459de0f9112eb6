"""Quantized matrices for tests of single checks, without files: any contract and method, damaged at will."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte.codec.element import encode
from halfbyte.formats import E2M1, E4M3, get_format
from halfbyte.verify.against.measure import measure
from halfbyte.verify.against.places import damage_problems
from halfbyte.verify.nearest import VALUES, Encoded, look_up
from halfbyte.verify.problems import Problem
from halfbyte.verify.values import Matrix

Numbers = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def kinds_of_numbers(shape: tuple[int, int], seed: int) -> Iterator[tuple[str, Numbers]]:
    """Matrices as weights are, and as they are not."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(shape)
    outliers = normal.copy()
    outliers[:, ::37] *= 20
    constant = np.full(shape, 0.1)
    constant[0, 0] = 1
    found = {
        "normal": normal,
        "heavy tails": generator.standard_t(3, shape),
        "laplace": generator.laplace(size=shape),
        "uniform": generator.uniform(-1, 1, shape),
        "rows of many sizes": normal * np.exp(generator.standard_normal((shape[0], 1))),
        "sparse": normal * (generator.random(shape) < 0.2),
        "outliers": outliers,
        "tiny blocks": normal * np.exp(3 * generator.standard_normal(shape)),
        "nearly constant": constant,
        "two values": np.where(generator.random(shape) < 0.5, 0.7, -0.4),
        "zeros": np.zeros(shape),
    }
    for name, values in found.items():
        yield name, values.astype(np.float32)


class Weight:
    """A matrix, quantized, and its source. Codes and scales may be changed in place."""

    def __init__(
        self, source: Numbers, format: str = "nvfp4", contract: str | None = None, method: str = "amax"
    ) -> None:
        q = hb.quantize(source, format, contract, method=method)
        self.source = source
        self.format = get_format(format)
        self.codes: Bytes = np.asarray(q.codes).copy()
        self.scales: Bytes = np.asarray(q.scales).copy()
        self.tensor_scale = 1.0 if q.global_scale is None else float(np.asarray(q.global_scale).reshape(-1)[0])

    def encoded(self, start: int, stop: int) -> Encoded:
        scales = self.scales[start:stop]
        return Encoded(
            self.codes[start:stop], scales, self.format.scale.values[scales], self.tensor_scale, self.format.scale
        )

    def read(self, start: int, stop: int) -> Numbers:
        stored = self.encoded(start, stop)
        scales = np.repeat(stored.scales * np.float32(self.tensor_scale), stored.block, axis=1)
        return np.asarray(look_up(VALUES, stored.codes) * scales, np.float32)

    @property
    def pair(self) -> tuple[Matrix, Matrix]:
        """The matrix and its source as verify sees them."""
        rows, columns = self.source.shape
        mine = Matrix("w", (rows, columns), "nvfp4", ("w",), self.read, encoded=self.encoded)
        return mine, Matrix("w", (rows, columns), "f32", ("w",), lambda start, stop: self.source[start:stop])

    def problems(self) -> list[Problem]:
        mine, theirs = self.pair
        return list(damage_problems(measure(mine, theirs), mine, theirs))


def random_rounding(weight: Weight) -> None:
    """Codes of one of the two neighbours, each as likely as it is near: the mean is right."""
    scales = np.repeat(E4M3.values[weight.scales] * np.float32(weight.tensor_scale), 16, axis=1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    quotient = np.minimum(np.abs(weight.source) / scales, 6)
    below = np.clip(np.searchsorted(magnitudes, quotient, side="right") - 1, 0, 6)
    share = (quotient - magnitudes[below]) / (magnitudes[below + 1] - magnitudes[below])
    up = np.random.default_rng(9).random(share.shape) < share
    codes = (below + up + np.where(weight.source < 0, 8, 0)).astype(np.uint8)
    weight.codes = np.asarray(codes[:, ::2] | codes[:, 1::2] << 4, np.uint8)


def feedback_rounding(weight: Weight) -> None:
    """GPTQ: the error of each column is passed on to the columns after it."""
    generator = np.random.default_rng(7)
    rows, columns = weight.source.shape
    inputs = generator.standard_normal((4 * columns, columns)) @ (
        np.eye(columns) + 1.5 * generator.standard_normal((columns, columns)) / columns**0.5
    )
    hessian = inputs.T @ inputs / len(inputs) + 0.01 * np.eye(columns)
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    values, codes = weight.source.astype(np.float64), np.zeros((rows, columns), np.uint8)
    for column in range(columns):
        scale = E4M3.values[weight.scales[:, column // 16]].astype(np.float64) * weight.tensor_scale
        codes[:, column] = encode((values[:, column] / scale).astype(np.float32), E2M1)
        error = (values[:, column] - E2M1.values[codes[:, column]] * scale) / factor[column, column]
        values[:, column + 1 :] -= np.outer(error, factor[column, column + 1 :])
    weight.codes = np.asarray(codes[:, ::2] | codes[:, 1::2] << 4, np.uint8)
