"""Names, dtypes and shapes: every sentence that is said of headers alone."""

from __future__ import annotations

import pytest

from halfbyte.layouts.modelopt import AWQ
from halfbyte.verify.rules.structure import structure_problems
from tests.verify.headers import Headers, compressed, contents, fp8, int4, lines, modelopt, mxfp4, plain


def found(headers: Headers) -> list[str]:
    return lines(structure_problems(contents(headers)))


STACK: Headers = {
    "l.experts.down_proj": ("U8", (2, 64, 16)),
    "l.experts.down_proj_weight_scale": ("F8_E4M3", (2, 8, 16)),
    "l.experts.down_proj_weight_scale_2": ("F32", ()),
}


def test_good_weights_have_no_problems() -> None:
    headers = modelopt("a", inputs=True) | compressed("b", inputs=True) | mxfp4("c") | int4("d", groups=4) | fp8("e")
    headers |= fp8("f", scales=(1, 1)) | fp8("g", scales=(16, 1)) | plain("h") | STACK
    headers |= {"a.weight_scale_2": ("F32", (1,)), "i.bias": ("U8", (4,)), "j.weight": ("I32", (4, 4))}
    assert found(headers) == []


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I8"])
def test_codes_without_scales(dtype: str) -> None:
    """Codes of NVFP4 by their dtype alone would be any bytes."""
    told = found({"a.weight": (dtype, (4, 8)), "a.bias": (dtype, (4,))})
    if dtype == "U8":
        assert told == [
            f"error [missing-part] a: stored as nvfp4 (modelopt), but there is no tensor a.{part}"
            for part in ("weight_scale", "weight_scale_2")
        ]
    else:
        assert told == [
            f"error [missing-part] a.weight: {dtype} [4, 8] has no scale beside it: its values cannot be known"
        ]


def test_parts_that_are_missing_or_stray() -> None:
    short = compressed("a")
    del short["a.weight_global_scale"]
    assert found(
        short | {"s.weight_scale_2": ("F32", ()), "t.scale": ("F8_E8M0", (2, 2)), "u.scale": ("F32", (3,))}
    ) == [
        "error [missing-part] a: stored as nvfp4 (compressed-tensors), but there is no tensor a.weight_global_scale",
        "error [stray-tensor] s.weight_scale_2: F32 [] belongs to no weight; readers drop it or stop",
        "error [stray-tensor] t.scale: F8_E8M0 [2, 2] belongs to no weight; readers drop it or stop",
    ]


def test_parts_that_are_wrong_in_themselves() -> None:
    headers = modelopt("a") | {"a.weight_scale_2": ("F16", (2,)), "a.pre_quant_scale": ("BF16", (128,))}
    headers |= compressed("c") | {"c.weight_global_scale": ("F32", (2,))}
    headers |= fp8("b") | {"b.input_scale": ("I32", (1,)), "b.weight_scale": ("I32", ())}
    assert found(headers) == [
        "error [dtype] a.weight_scale_2: F16, but readers of nvfp4 (modelopt) expect F32",
        "error [shape] a.weight_scale_2: shape [2]: one number is expected",
        f"error [shape] a: a.pre_quant_scale: {AWQ}",
        "error [shape] c.weight_global_scale: shape [2]: one number is expected",
        "error [dtype] b.weight_scale: I32, but readers of fp8 (weight_scale) expect F32 or BF16 or F16 or F8_E8M0 or "
        "U8",
        "error [dtype] b.input_scale: I32, but readers of fp8 (weight_scale) expect BF16 or F16 or F32",
    ]


ONE_FOR = "has codes [out, in/2] and scales [out, in/16]"


@pytest.mark.parametrize(
    ("codes", "scales", "wanted"),
    [
        ((16, 64), (16, 7), ONE_FOR),
        ((16, 64), (15, 8), ONE_FOR),
        ((16, 64), (8,), ONE_FOR),
        ((16, 60), (16, 8), "has codes [out, in/2]"),
        ((16,), (16, 8), "has codes [out, in/2]"),
        ((0, 64), (0, 8), "has codes [out, in/2]"),
        ((16, 0), (16, 0), "has codes [out, in/2]"),
    ],
)
def test_shapes_that_do_not_belong_together(codes: tuple[int, ...], scales: tuple[int, ...], wanted: str) -> None:
    headers = modelopt("a") | {"a.weight": ("U8", codes), "a.weight_scale": ("F8_E4M3", scales)}
    text = f"codes {list(codes)} with scales {list(scales)}: nvfp4 (modelopt) {wanted}"
    assert found(headers) == [f"error [shape] a: {text}"]


def test_shapes_that_a_function_checks() -> None:
    (line,) = found(fp8("a", scales=(3, 1)))
    text = "3 scales do not fit an axis of 16 elements: neither one, nor one per row, nor 128s"
    assert line == f"error [shape] a: codes [16, 128] with scales [3, 1]: fp8 (weight_scale) {text}"
    (line,) = found(int4("a", groups=3))
    assert line.startswith(
        "error [shape] a: codes [16, 16] with scales [16, 3]: int4 (compressed-tensors) 3 scales per"
    )
    (line,) = found(fp8("a", scales=(0,)))
    assert line.endswith("with scales [0]: fp8 (weight_scale) has codes [out, in]")


NARROW = (
    "warning [tensor-parallel] {}: width {} is not 8 whole parts of {}-element blocks: "
    "tensor parallelism of 8 will be refused"
)


def test_widths_that_cannot_be_cut_into_eight() -> None:
    """Only of layers that are cut along their width, and whose blocks have a length."""
    odd = modelopt("a.o_proj", 16, 64) | modelopt("a.q_proj", 16, 64) | fp8("b.o_proj", 16, 64)
    assert found(odd) == [NARROW.format("a.o_proj", 64, 16)]
    assert found(odd | mxfp4("c.down_proj", 16, 128) | modelopt("d.w2", 16, 192)) == [
        NARROW.format("a.o_proj", 64, 16) + " (2 more like it)"
    ]
    assert found(odd | mxfp4("c.down_proj", 16, 128)) == [NARROW.format("a.o_proj", 64, 16) + " (1 more like it)"]
    assert found(modelopt("a.o_proj", 16, 256) | mxfp4("b.o_proj", 16, 256)) == []
    narrow = {
        name: (dtype, shape if len(shape) < 3 else (2, shape[1] // 2, 16)) for name, (dtype, shape) in STACK.items()
    }
    assert found(narrow) == []
