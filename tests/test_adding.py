"""docs/adding.md is true: each recipe is followed with an invented one, and it works.

What the recipe writes as a file is a definition here; a line in a table is an entry that the test takes back. A layout
has a test of its own, tests/test_adding_layout.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

import halfbyte as hb
from halfbyte.backends import BACKENDS, Parts, Request
from halfbyte.backends.reference import search
from halfbyte.backends.reference.quantize import Reference
from halfbyte.backends.reference.search import Encode, ScaleGrid, search_scales
from halfbyte.cli import app
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import CONTRACTS, Contract, NVFP4Rule, expressions
from halfbyte.contracts.options import changed, listing_options
from halfbyte.contracts.spec import Rounding, ScaleByte, TensorScale
from halfbyte.formats import E8M0, FORMATS, BlockFormat, ElementFormat
from halfbyte.methods import METHODS, Method
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import llama, safetensors_bytes, write_checkpoint
from tests.samples import gaussian

X = gaussian(8, 96)
RECIPES = Path(__file__).parents[1] / "docs" / "adding.md"


def assert_same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor) -> None:
    assert_same_bits(got.codes, expected.codes)
    assert_same_bits(got.scales, expected.scales)
    assert_same_bits(hb.dequantize(got), hb.dequantize(expected, backend="reference"))


# --- a contract: one file, one entry ---

ACME = NVFP4Rule(
    factor=expressions.ratio,
    pre_scale=expressions.sixth_then_factor,
    scale_byte=ScaleByte(smallest=2.0**-9),
    element=expressions.over_scale_quotient,
    rounding=Rounding(sign="sign bit"),
    stored_as="encode factor",
    stored=expressions.store_factor,
    multiplier=expressions.reciprocal_of_stored,
    decode=expressions.decode_by_divisor,
)


@listing_options
def acme(*, ties_down: bool = False) -> Contract:
    """A contract made of formulas that exist."""
    rule = dataclasses.replace(ACME, rounding=Rounding(tie="down", sign="sign bit")) if ties_down else ACME
    return Contract(name="acme", source="acme 1.0", rules={"nvfp4": rule}, options=changed(acme, locals()))


def test_a_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONTRACTS, "acme", acme)
    for method in (None, "optimal"):  # known formulas: the kernels serve them without a change
        assert_same(
            hb.quantize(X, "nvfp4", "acme", method, backend="cpu"),
            hb.quantize(X, "nvfp4", "acme", method, backend="reference"),
        )
    assert repr(acme(ties_down=True)) == "acme(ties_down=True)"
    shown = CliRunner().invoke(app, ["contracts", "acme"])
    assert (shown.exit_code, "x/(S/g)" in shown.output) == (0, True)
    source = write_checkpoint(tmp_path / "source", llama())
    made = CliRunner().invoke(
        app, ["convert", str(source), str(tmp_path / "made"), "--contract", "acme", "--method", "amax", "--quiet"]
    )
    assert made.exit_code == 0, made.output
    (tmp_path / "vectors").mkdir()
    case = {"name": "one", "peer": "acme", "format": "nvfp4", "config": {"ties_down": True}}
    (tmp_path / "vectors" / "index.json").write_text(json.dumps({"cases": [case]}))
    q = hb.quantize(X, "nvfp4", acme(ties_down=True), backend="reference")
    answered: dict[str, npt.NDArray[Any]] = {"input": X, "codes": np.asarray(q.codes)}
    answered |= {"scales": np.asarray(q.scales), "tensor_scale": np.asarray(q.stored_scale).reshape(1)}
    (tmp_path / "vectors" / "one.safetensors").write_bytes(safetensors_bytes(answered))
    compared = CliRunner().invoke(app, ["conform", str(tmp_path / "vectors"), "--backend", "cpu"])
    assert compared.exit_code == 0, compared.output


# --- a formula: one function; a kernel case where it should be fast ---


def over_halved(x: F32, scale: F32, t: TensorScale) -> F32:
    """(x/2)/((S/2)/g)"""
    half = np.float32(0.5)
    return np.asarray((x * half) / ((scale * half) / t.factor), np.float32)


def test_a_formula() -> None:
    contract = dataclasses.replace(acme(), rules={"nvfp4": dataclasses.replace(ACME, element=over_halved)})
    assert_same(hb.quantize(X, "nvfp4", contract), hb.quantize(X, "nvfp4", contract, backend="reference"))
    with pytest.raises(hb.UnsupportedError, match="no kernel was written for the element formula over_halved"):
        hb.quantize(X, "nvfp4", contract, backend="cpu")


# --- a format: one file, one entry ---

E3M2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3)
MXFP6 = BlockFormat(name="mxfp6", element=E3M2, scale=E8M0, block=32, has_global=False, blocks=(32,))


def test_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "mxfp6", MXFP6)
    ocp = CONTRACTS["ocp"]()  # it has every format with E8M0 scales
    q = hb.quantize(X, "mxfp6", ocp, "optimal")
    assert (q.codes.shape, q.format.bits_per_element) == ((8, 96), 8.25)
    error = np.linalg.norm(hb.dequantize(q) - X) / np.linalg.norm(X)
    assert error < 0.06
    assert_same(q, hb.quantize(X, "mxfp6", ocp, "optimal", backend="reference"))
    with pytest.raises(hb.UnsupportedError, match=r"backend cpu cannot do this: .*not e3m2 under e8m0"):
        hb.quantize(X, "mxfp6", ocp, backend="cpu")
    with pytest.raises(hb.UnsupportedError, match="contract gguf has no mxfp6; it has"):
        hb.quantize(X, "mxfp6", "gguf")


# --- a method: one file, one entry, its arithmetic in the reference and one entry there ---


@dataclass(frozen=True)
class EvenBytes(Method):
    """The scale with the least squared error among those whose byte is even."""

    name: ClassVar[str] = "even_bytes"
    everywhere: ClassVar[bool] = True
    one_row: ClassVar[bool] = True


def search_even_bytes(
    blocks: F32, start: tuple[U8, U8], grid: ScaleGrid, encode: Encode, element: ElementFormat, method: Method
) -> tuple[U8, U8]:
    """Ask the exact search, which tries every scale, for the codes of even ones alone."""

    def encode_even(byte: U8) -> U8:
        return encode((byte & 0xFE).astype(np.uint8))

    codes, byte = search_scales(blocks, start, grid, encode_even, element, hb.Optimal())
    return codes, (byte & 0xFE).astype(np.uint8)


@pytest.mark.parametrize(("format", "contract"), [("nvfp4", "modelopt"), ("nvfp4", "torchao"), ("mxfp4", "ocp")])
def test_a_method(format: str, contract: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(METHODS, "even_bytes", EvenBytes)
    monkeypatch.setitem(search.SEARCHES, EvenBytes, search_even_bytes)
    q = hb.quantize(X, format, contract, "even_bytes")
    assert q.method == EvenBytes()
    assert not (q.scales & 1).any()
    assert_same(q, hb.quantize(X, format, contract, EvenBytes(), backend="reference"))
    with pytest.raises(hb.UnsupportedError, match="no kernel was written for the method EvenBytes"):
        hb.quantize(X, format, contract, "even_bytes", backend="cpu")
    with pytest.raises(hb.UnsupportedError, match="method even_bytes searches blocks of one row"):
        hb.quantize(gaussian(16, 32), "nvfp4", method="even_bytes", tile=(16, 16))
    source = write_checkpoint(tmp_path / "source", llama(layers=1))
    made = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "made"), "--method", "even_bytes", "-q"])
    assert made.exit_code == 0, made.output


# --- a backend: one folder, one entry ---


class Careful:
    """A backend that takes MX formats alone, and leaves the work to the reference."""

    name = "careful"
    takes_tensors = False
    asked = 0

    def supports(self, request: Request) -> str | None:
        return "it takes MX formats alone" if request.format.has_global else None

    def supports_decoding(self, request: Request) -> str | None:
        return self.supports(request)

    def quantize(
        self, x: npt.NDArray[Any], request: Request, amax: F32 | None = None, out: tuple[U8, U8] | None = None
    ) -> Parts[npt.NDArray[Any]]:
        self.asked += 1
        return Reference().quantize(x, request, amax)

    def dequantize(
        self,
        parts: Parts[npt.NDArray[Any]],
        shape: tuple[int, int],
        request: Request,
        dtype: Any,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        self.asked += 1
        return Reference().dequantize(parts, shape, request, dtype)


def test_a_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    careful = Careful()
    monkeypatch.setattr("halfbyte.backends.BACKENDS", {"careful": careful, **BACKENDS})
    assert_same(hb.quantize(X, "mxfp4", backend="careful"), hb.quantize(X, "mxfp4", backend="reference"))
    assert careful.asked >= 1
    asked = careful.asked
    hb.quantize(X, "mxfp4")  # it stands first: "auto" asks it
    assert careful.asked == asked + 1
    hb.quantize(X, "nvfp4")
    assert careful.asked == asked + 1
    with pytest.raises(hb.UnsupportedError, match="backend careful cannot do this: it takes MX formats alone"):
        hb.quantize(X, "nvfp4", backend="careful")


# --- the page itself ---


def test_the_page_names_files_that_exist() -> None:
    """Paths in backquotes that end in a file name are there, but for x.py, the one to be written."""
    text = RECIPES.read_text()
    named = set(re.findall(r"`((?:src/|tests/|docs/|conformance/)[\w./]+\.\w+)`", text))
    root = RECIPES.parents[1]
    missing = [name for name in named if not (root / name).exists() and Path(name).stem != "x"]
    assert named
    assert missing == []


@pytest.mark.parametrize("what", ["contract", "formula", "format", "method", "backend", "layout", "model family"])
def test_every_recipe_counts_its_files(what: str) -> None:
    section = re.search(rf"^## An? {what}\n(.*?)(?=^## |\Z)", RECIPES.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    assert re.search(r"^Files to touch: \d", section[1], re.MULTILINE)
