"""The choice of a headroom by the host, with the sums of the CPU in place of a device's: it is the reference's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.backends.gpu import WORDS, raised, raised_on_device
from halfbyte.backends.headroom import Trial
from halfbyte.backends.reference.headroom import raised_amax
from halfbyte.backends.survey import survey_part
from halfbyte.codec.blocks import split
from halfbyte.request import Request, resolve
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.headroom_cases import operand


def survey_matrix(x: torch.Tensor, request: Request, amax: float, trial: Trial) -> torch.Tensor:
    """Totals as words. A candidate that is left out has a number that would win."""
    totals = survey_part(x.numpy(), request, np.float32(amax), trial)
    return torch.tensor([[(total or 0) >> 32 * word & 0xFFFFFFFF for word in range(WORDS)] for total in totals])


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raised, "survey_matrix", survey_matrix)


@pytest.mark.parametrize("kind", ["uniform", "gauss", "low", "huge", "zeros"])
@pytest.mark.parametrize("headroom", [None, 1, 1.5, (1, 2), (2, 64)])
def test_small_matrices(kind: str, headroom: float | tuple[float, ...] | None) -> None:
    x = operand(kind, "fp32", 4, 64).astype(np.float32)
    request = resolve("nvfp4", "modelopt", hb.Optimal(headroom=headroom))
    amax = np.abs(x).max().reshape(1)
    wanted = raised_amax(split(x, 16), amax, request, x.size)
    assert_same_bits(raised_on_device(torch.from_numpy(x), request, amax), wanted)


def test_a_sample_decides_for_larger_ones() -> None:
    x = operand("gauss", "fp32", 96, 1024).astype(np.float32)
    written = np.asarray(hb.dequantize(hb.quantize(x, "nvfp4", method=hb.FourSix("mse", 256))))
    request = resolve("nvfp4", None, "optimal")
    for matrix, headroom in ((written, 1.75), (operand("uniform", "fp32", 96, 1024).astype(np.float32), 2.0)):
        amax = np.asarray(np.abs(matrix).max(), np.float32).reshape(1)
        found = raised_on_device(torch.from_numpy(matrix), request, amax)
        assert_same_bits(found, (headroom * amax.astype(np.float64)).astype(np.float32))
