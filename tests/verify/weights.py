"""Quantized matrices for tests of single checks, without files: any contract and method, damaged at will."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte.formats import get_format
from halfbyte.verify.measure import measure
from halfbyte.verify.nearest import VALUES, Encoded, look_up
from halfbyte.verify.places import damage_problems
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
