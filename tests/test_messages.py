"""Bad input, case by case: the type of the error, and a message that names the rule and the way out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.errors import VectorError, unknown_name
from tests.samples import gaussian

X = gaussian(4, 64)


def quantize(x: Any = X, format: Any = "nvfp4", **options: Any) -> hb.QuantizedTensor:
    """hb.quantize without type annotations, because mypy would reject these mistakes."""
    return hb.quantize(x, format, **options)


# --- the tensor ---

GIVE = "give float32, float16 or bfloat16"
DTYPES: list[tuple[Any, str]] = [
    (X.astype(np.int32), f"cannot quantize dtype int32: {GIVE}"),
    (X.astype(np.uint8), f"cannot quantize dtype uint8: {GIVE}"),
    (X.astype(np.bool_), f"cannot quantize dtype bool: {GIVE}"),
    (X.astype(np.complex64), f"cannot quantize dtype complex64: {GIVE}"),
    (X.astype(">f4"), f"cannot quantize dtype >f4: {GIVE}"),
    (X.astype(ml_dtypes.float8_e4m3fn), f"cannot quantize dtype float8_e4m3fn: {GIVE}"),
    (X.astype(object), f"cannot quantize dtype object: {GIVE}"),
    (torch.zeros(2, 32, dtype=torch.int64), f"cannot quantize dtype torch.int64: {GIVE}"),
    (torch.zeros(2, 32, dtype=torch.int16), f"cannot quantize dtype torch.int16: {GIVE}"),
    (torch.zeros(2, 32, dtype=torch.bool), f"cannot quantize dtype torch.bool: {GIVE}"),
    (torch.zeros(2, 32, dtype=torch.float8_e4m3fn), f"cannot quantize dtype torch.float8_e4m3fn: {GIVE}"),
    (torch.zeros(2, 32, dtype=torch.complex64), f"cannot quantize dtype torch.complex64: {GIVE}"),
]


@pytest.mark.parametrize(("x", "message"), DTYPES, ids=[message.split(":")[0] for _, message in DTYPES])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_wrong_dtype(x: Any, message: str, format: str) -> None:
    with pytest.raises(hb.InputError, match=f"^{message}, or convert it"):
        quantize(x, format)


@pytest.mark.parametrize("x", [[1.0] * 16, (1.0,) * 16, 3.0, None, "x", np.float32(1), {"a": 1}, b"bytes"])
def test_not_an_array(x: Any) -> None:
    with pytest.raises(hb.InputError, match=f"^expected a numpy array or a torch tensor, got {type(x).__name__}$"):
        quantize(x)


SHAPES: list[tuple[Any, str]] = [
    (np.zeros(0, np.float32), r"\(0,\): the axis to cut into blocks has no elements"),
    (np.zeros((4, 0), np.float32), r"\(4, 0\): the axis to cut into blocks has no elements"),
    (np.zeros((), np.float32), r"\(\): it has no axis to cut into blocks"),
    (torch.zeros(0), r"\(0,\): the axis to cut into blocks has no elements"),
    (torch.tensor(1.0), r"\(\): it has no axis to cut into blocks"),
]


@pytest.mark.parametrize(("x", "rule"), SHAPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_no_elements(x: Any, rule: str, format: str) -> None:
    """Rows without elements, scalars. A tensor without rows is fine (test_no_rows.py)."""
    with pytest.raises(hb.InputError, match=f"^cannot quantize a tensor of shape {rule}"):
        quantize(x, format)


def test_columns_without_elements() -> None:
    with pytest.raises(hb.InputError, match="the axis to cut into blocks has no elements"):
        quantize(np.zeros((0, 16), np.float32), contract=contracts.transformer_engine(columnwise=True))


def test_search_of_nothing() -> None:
    with pytest.raises(hb.InputError, match=r"a tensor of shape \(0, 16\) has no elements, so no error to reduce"):
        hb.search_global_scale(np.zeros((0, 16), np.float32))


def test_a_quantized_tensor_needs_an_axis() -> None:
    with pytest.raises(hb.InputError, match="at least one axis"):
        hb.QuantizedTensor(
            hb.get_format("mxfp4"), (), np.zeros(0, np.uint8), np.zeros(0, np.uint8), None, None, contracts.ocp()
        )


@pytest.mark.parametrize(
    ("format", "contract", "width", "block"),
    [
        *(("nvfp4", name, 40, 16) for name in ("compressed_tensors", "torchao", "qwantize", "flashinfer", "vllm")),
        *(("mxfp4", name, 48, 32) for name in ("compressed_tensors", "torchao", "qwantize", "gguf", "flashinfer")),
        ("nvfp4", "torchao", 1, 16),
    ],
)
def test_last_axis_not_whole_blocks(format: str, contract: str, width: int, block: int) -> None:
    rule = (
        rf"^shape \(2, {width}\): contract {contract} needs a last axis that is a multiple of {block}, not {width}; pad"
    )
    with pytest.raises(hb.InputError, match=rule):
        quantize(gaussian(2, width), format, contract=contract)


@pytest.mark.parametrize("contract", ["ocp", "transformer_engine", "modelopt", "fouroversix", "miles"])
def test_contracts_that_pad_take_any_width(contract: str) -> None:
    format = "mxfp4" if contract == "ocp" else "nvfp4"
    assert quantize(gaussian(2, 5), format, contract=contract).shape == (2, 5)


def test_last_axis_of_the_hadamard_transform() -> None:
    """The block axis of the transposed operand is the rows."""
    contract = contracts.transformer_engine(columnwise=True, with_rht=True)
    with pytest.raises(hb.InputError, match="Hadamard transform needs a block axis that is a multiple of 16, not 20"):
        quantize(gaussian(20, 32), contract=contract)


# --- names ---

NAMES: list[tuple[dict[str, Any], str]] = [
    ({"format": "nvfp8"}, "^unknown format 'nvfp8'; known: mxfp4, mxfp8, nvfp4$"),
    ({"format": None}, "^unknown format None; known: mxfp4, mxfp8, nvfp4$"),
    ({"contract": "nvidia"}, "^unknown contract 'nvidia'; known: .*modelopt, ocp, .*vllm$"),
    ({"contract": ""}, "^unknown contract ''; known: "),
    ({"method": "best"}, "^unknown method 'best'; known: amax, four_six"),
    ({"method": 46}, "^unknown method 46; known: a name, .*FourSix"),
    ({"method": hb.FourSix}, "^unknown method .*FourSix.*; known: a name"),
    ({"backend": "cuda"}, "^unknown backend 'cuda'; known: auto, .*reference"),
    ({"backend": None}, "^unknown backend None; known: auto"),
    ({"scaling": "column"}, "^unknown scaling 'column'; known: expert, row, tensor$"),
    ({"scaling": True}, "^unknown scaling True; known: expert, row, tensor$"),
]


@pytest.mark.parametrize(("options", "message"), NAMES, ids=[str(options) for options, _ in NAMES])
def test_unknown_names_list_the_known(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.UnknownNameError, match=message):
        quantize(**options)


def test_one_wording_for_unknown_names() -> None:
    assert str(unknown_name("colour", "reed", ["red", "blue"])) == "unknown colour 'reed'; known: blue, red"


def test_of_many_names_the_nearest_are_listed() -> None:
    names = [f"layers.{i}.{leaf}" for i in range(30) for leaf in ("up_proj", "down_proj", "norm")]
    message = str(unknown_name("module", "layers.17.down_prj", names))
    assert message.startswith(
        "unknown module 'layers.17.down_prj'; nearest of 90: layers.17.down_proj, layers.17.up_proj"
    )
    assert "nearest of 90: layers.0.norm" in str(unknown_name("module", "layers.99.norm", names))


def test_unknown_backend_of_dequantize() -> None:
    with pytest.raises(hb.UnknownNameError, match=r"^unknown backend 'cuda'; known: auto"):
        hb.dequantize(quantize(), backend="cuda")


# --- combinations that are not defined ---

TE256 = hb.FourSix("mse", 256, True)
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    # formats and decode-only contracts
    ({"contract": "ocp"}, "^contract ocp has no nvfp4; it has mxfp4, mxfp8$"),
    ({"format": "mxfp4", "contract": "miles"}, "^contract miles has no mxfp4; it has nvfp4$"),
    ({"format": "mxfp8", "contract": "modelopt"}, "^contract modelopt has no mxfp8; it has nvfp4, mxfp4$"),
    ({"format": "mxfp4", "contract": "transformers"}, "^contract transformers decodes mxfp4 only: it has no quantizer"),
    ({"contract": "gguf"}, "^contract gguf decodes nvfp4 only: it has no quantizer"),
    # blocks
    ({"block": 8}, "^nvfp4 has blocks of 16 or 32, not 8$"),
    ({"block": "16"}, "^block is a whole number, 16 or 32 for nvfp4, not '16'$"),
    ({"format": "mxfp8", "block": 16}, "^mxfp8 has blocks of 32, not 16$"),
    ({"format": "mxfp4", "contract": "gguf", "block": 16}, "contract gguf has .*32"),
    # tiles
    ({"tile": (32, 32)}, r"^tile \(32, 32\) does not fit: contract transformer_engine has \(1, 16\), \(16, 16\)"),
    ({"tile": (16, 1)}, r"^tile \(16, 1\) does not fit"),
    ({"tile": (16,)}, r"^tile is a pair such as \(1, 16\) or \(16, 16\), not \(16,\)$"),
    ({"tile": 16}, r"^tile is a pair such as .*, not 16$"),
    ({"tile": (1, 32)}, r"^tile \(1, 32\) does not fit: .* for nvfp4 with blocks of 16$"),
    ({"tile": (16, 16), "block": 32}, r"^tile \(16, 16\) does not fit: .* has \(1, 32\) for nvfp4 with blocks of 32$"),
    ({"tile": (16, 16), "contract": "miles"}, r"^tile \(16, 16\) does not fit: contract miles has \(1, 16\) for"),
    ({"tile": (16, 16), "format": "mxfp4"}, r"^tile \(16, 16\) does not fit: contract ocp has \(1, 32\) for mxfp4"),
    ({"tile": (16, 16), "scaling": "row"}, r"^tile \(16, 16\) spans rows, .*; use tile=None$"),
    # row scaling
    (
        {"scaling": "row", "format": "mxfp4"},
        "^mxfp4 has no global scale, so scaling='row' has no meaning; leave it out$",
    ),
    ({"scaling": "row", "contract": "modelopt"}, "^contract modelopt has no row scaling"),
    ({"scaling": "row", "contract": "miles"}, "^contract miles has no row scaling"),
    # global_amax where nothing global is
    ({"global_amax": 1.0, "format": "mxfp4"}, "^mxfp4 under this contract has no global scale; leave global_amax out$"),
    ({"global_amax": 1.0, "contract": "qwantize"}, "^nvfp4 under this contract has no global scale"),
    (
        {"global_amax": 1.0, "contract": contracts.torchao(two_level=False)},
        "^nvfp4 under this contract has no global scale",
    ),
    # methods
    (
        {"method": "four_six", "contract": "torchao"},
        "^contract torchao does not define method four_six for nvfp4; it takes amax, optimal; contracts with four_six: "
        "transformer_engine, miles, modelopt, fouroversix$",
    ),
    (
        {"method": "four_six", "format": "mxfp4"},
        "^contract ocp does not define method four_six for mxfp4; it takes .*l$",
    ),
    (
        {"method": "sweep"},
        "^contract transformer_engine does not define method sweep for nvfp4; it takes amax, optimal, "
        "four_six:mae:448; contracts with sweep: modelopt$",
    ),
    ({"method": hb.Sweep(True)}, "^contract transformer_engine does not define method sweep:fused for nvfp4"),
    ({"method": hb.FourSix(), "contract": "vllm"}, "^contract vllm does not define method four_six:mae:448 for"),
    (
        {"method": hb.FourSix(), "contract": "modelopt"},
        "^contract modelopt does not define method four_six:mae:448 .* contracts with four_six: transformer_engine, "
        "miles, fouroversix$",
    ),
    ({"method": hb.Gptq()}, r"^method 'gptq' needs second moments of the inputs: hb\.gptq\(weight, second_moment"),
    (
        {"method": hb.FourSix("abs_max")},
        "transformer_engine has no .*abs_max.*; it has error mae, mse, e4m3_max 448, 256, fast_error False or True$",
    ),
    (
        {"method": hb.FourSix("mae", 448), "contract": "fouroversix"},
        "^contract fouroversix has no .*448.*; it has error mae, mse, abs_max, e4m3_max 256, fast_error False$",
    ),
    (
        {"method": TE256, "contract": "fouroversix"},
        "^contract fouroversix has no .*fast_error=True.*; it has .* False$",
    ),
]


@pytest.mark.parametrize(("options", "message"), UNSUPPORTED, ids=[str(options) for options, _ in UNSUPPORTED])
def test_no_such_combination(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.UnsupportedError, match=message):
        quantize(**options)


# --- global_amax ---

AMAXES: list[tuple[Any, dict[str, Any], str]] = [
    (-1.0, {}, "^global_amax must not be negative or NaN: it is the largest magnitude"),
    (float("nan"), {}, "^global_amax must not be negative or NaN"),
    (np.float32(-np.inf), {}, "^global_amax must not be negative or NaN"),
    (torch.tensor(-2.0), {}, "^global_amax must not be negative or NaN"),
    ([1.0, 2.0], {}, "^global_amax has 2 values, but scaling='tensor' needs 1$"),
    ([], {}, "^global_amax has 0 values, but scaling='tensor' needs 1$"),
    (1.0, {"scaling": "row"}, "^global_amax has 1 values, but scaling='row' needs 4$"),
    ([1.0] * 5, {"scaling": "row"}, "^global_amax has 5 values, but scaling='row' needs 4$"),
    ([1.0, 1.0, 1.0, -1.0], {"scaling": "row"}, "^global_amax must not be negative or NaN"),
    ("large", {}, "^global_amax must be a number or an array of numbers, got 'large'$"),
    ({"amax": 1}, {}, "^global_amax must be a number or an array of numbers"),
]


@pytest.mark.parametrize(("amax", "options", "message"), AMAXES, ids=[f"{amax}-{more}" for amax, more, _ in AMAXES])
def test_global_amax(amax: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        quantize(global_amax=amax, **options)


# --- NaN and Inf are not errors ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("contract", sorted(set(contracts.CONTRACTS) - {"transformers"}))
def test_nan_and_inf_are_each_contract_s_own_business(contract: str, bad: float) -> None:
    x = X.copy()
    x[1, 3] = bad
    formats = contracts.CONTRACTS[contract]().rules
    for format in formats:
        if (contract, format) != ("gguf", "nvfp4"):
            q = quantize(x, format, contract=contract)
            assert tuple(hb.dequantize(q).shape) == x.shape


# --- the errors themselves ---


@pytest.mark.parametrize("kind", [hb.InputError, hb.UnknownNameError, hb.UnsupportedError])
def test_mistakes_of_a_call_are_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, hb.HalfbyteError)
    assert issubclass(kind, ValueError)


def test_vector_errors_are_of_the_family() -> None:
    assert issubclass(VectorError, hb.HalfbyteError)
