"""What headrooms cost on a part of a tensor: the sums of the reference, whichever way of the library finds them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends.cpu import headroom
from halfbyte.backends.headroom import EVERY, Candidate, Sample, Total, Trial, candidate, ends
from halfbyte.backends.reference import headroom as reference
from halfbyte.backends.survey import survey_part
from halfbyte.codec.bits import dtype_name, widen
from halfbyte.codec.blocks import split
from halfbyte.request import Request, resolve
from tests.backends.test_headroom import CONTRACTS, sample

TRIALS = [Trial((1.0, 2.0)), Trial((1.0, 1.75, 2.0), 3), Trial((1.5, 2.0))]
COLUMNS = 8


def asked(contract: str, dtype: npt.DTypeLike, threads: int | None = 1) -> Request:
    return resolve("nvfp4", contract, hb.Optimal(), dtype=dtype_name(np.dtype(dtype)), threads=threads)


def differences(totals: tuple[Total, ...]) -> list[int | None]:
    """Sums count up to a number that all share."""
    first = next((total for total in totals if total is not None), 0)
    return [None if total is None else total - first for total in totals]


def number_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each survey whether one call of the library found its sums."""
    served: list[bool] = []
    real = headroom._by_whole_call

    def counted(*arguments: object) -> tuple[Total, ...] | None:
        found = real(*arguments)  # type: ignore[arg-type]
        served.append(found is not None)
        return found

    monkeypatch.setattr(headroom, "_by_whole_call", counted)
    return served


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_sums_are_those_of_the_reference(contract: str, dtype: npt.DTypeLike, monkeypatch: pytest.MonkeyPatch) -> None:
    request, served = asked(contract, dtype), number_of_calls(monkeypatch)
    for kind, factor in (("gauss", 1.0), ("low", 1.3), ("tiny", 1.0)):  # the whole tensor may have a larger amax
        x = sample(kind, (6, 16 * COLUMNS)).astype(dtype)
        amax = np.float32(factor * np.abs(widen(x)).max())
        for trial, before in zip(TRIALS, (0, 7, 0), strict=True):
            counts = EVERY if trial.step == 1 else Sample(0, trial.step).behind(before * COLUMNS)
            found = survey_part(x, request, amax, trial, before)
            wanted = reference.survey(split(widen(x), 16), amax, request, trial.candidates, counts)
            assert differences(found) == differences(wanted), (kind, trial)
    assert any(served)
    assert not all(served), "amaxes beyond the range of the kernels are for the reference"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_ends_are_those_of_the_formulas(contract: str) -> None:
    request = asked(contract, np.float32)
    found = 0
    for amax in np.exp2(np.arange(-130, 127, 3.7)).astype(np.float32):
        one, two = (candidate(np.array([amax]), h, request) for h in (1.0, 2.0))
        (wanted,) = ends(one, two, request)
        if not served(one, amax) or not served(two, amax):
            wanted = None
        assert headroom.edge_of(request, amax) == wanted
        found += wanted is not None
    assert found > 20


def served(found: Candidate, amax: np.float32) -> bool:
    """Whether the kernels are exact for these numbers (backends/cpu/ranges.py)."""
    own, g = float(found.amax[0]), float(found.multiplier[0])
    return 2.0**-60 <= own <= 2.0**60 and 2.0**-80 <= g <= 2.0**60 and float(amax) <= g * 2.0**50


def test_weights_and_several_threads_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.tile(sample("gauss", (16, 256)), (64, 1))
    amax = np.float32(np.abs(x).max())
    calls = number_of_calls(monkeypatch)
    one, two = (asked("modelopt", np.float32, threads) for threads in (1, 2))
    assert survey_part(x, one, amax, TRIALS[0]) == survey_part(x, two, amax, TRIALS[0])
    assert calls == [True, False]
    weighted = resolve("nvfp4", "modelopt", hb.Optimal(weights=np.ones(256)), threads=1)
    kept = len(headroom._CALLS)
    totals = [survey_part(x, request, amax, TRIALS[0]) for request in (weighted, one)]
    assert differences(totals[0]) == differences(totals[1])
    assert calls[2:] == [False, True]
    assert len(headroom._CALLS) == kept, "methods with arrays are not kept"


def test_few_requests_are_kept() -> None:
    x = sample("gauss", (4, 64))
    for _ in range(2 * headroom.MOST_CALLS):
        survey_part(x, asked("modelopt", np.float32), np.float32(9), TRIALS[0])
    assert len(headroom._CALLS) <= headroom.MOST_CALLS
