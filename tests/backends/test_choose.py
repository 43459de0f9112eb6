"""Which backend serves a request. A backend that the caller names never falls back silently."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends import BACKENDS, Parts, Request, choose_backend
from halfbyte.codec.bits import F32, U8
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

REQUEST = Request(hb.FORMATS["nvfp4"], hb.contracts.transformer_engine(), hb.Amax(), (1, 16), "tensor", "fp32")


class Unable:
    """A backend that serves nothing."""

    name = "unable"
    takes_tensors = False

    def supports(self, request: Request) -> str | None:
        return f"no {request.format.name} today"

    def supports_decoding(self, request: Request) -> str | None:
        return self.supports(request)

    def quantize(
        self, x: npt.NDArray[Any], request: Request, amax: F32 | None = None, out: tuple[U8, U8] | None = None
    ) -> Parts[npt.NDArray[Any]]:
        raise AssertionError("asked in spite of its refusal")

    def dequantize(
        self,
        parts: Parts[npt.NDArray[Any]],
        shape: tuple[int, int],
        request: Request,
        dtype: Any,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        raise AssertionError("asked in spite of its refusal")


def test_table_is_keyed_by_name() -> None:
    assert all(backend.name == name for name, backend in BACKENDS.items())
    assert BACKENDS["reference"].supports(REQUEST) is None


def test_by_name() -> None:
    assert choose_backend("reference", REQUEST) is BACKENDS["reference"]


@pytest.mark.parametrize("name", ["cuda", "", "Reference"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(hb.UnknownNameError, match=r"unknown backend .*; known: auto, .*reference"):
        choose_backend(name, REQUEST)


def test_auto_passes_over_a_backend_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.backends.BACKENDS", {"unable": Unable(), **BACKENDS})
    assert choose_backend("auto", REQUEST).supports(REQUEST) is None


def test_a_named_backend_that_cannot_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "unable", Unable())
    with pytest.raises(hb.UnsupportedError, match="backend unable cannot do this: no nvfp4 today"):
        hb.quantize(gaussian(2, 16), "nvfp4", backend="unable")
    q = hb.quantize(gaussian(2, 16), "nvfp4")
    with pytest.raises(hb.UnsupportedError, match="no nvfp4 today"):
        hb.dequantize(q, backend="unable")


def test_auto_and_reference_give_the_same_bits() -> None:
    x = gaussian(3, 64)
    auto, reference = hb.quantize(x, "nvfp4"), hb.quantize(x, "nvfp4", backend="reference")
    assert_same_bits(auto.codes, reference.codes, inputs=x)
    assert_same_bits(auto.scales, reference.scales, inputs=x)
    assert_same_bits(hb.dequantize(auto), hb.dequantize(reference, backend="reference"))
