"""Every table of every layout, written out: what readers of these files expect, by suffix, dtype and shape."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.compressed_tensors import int4_grid
from halfbyte.layouts.description import Claim, PartRule, Reader, Storage, is_transposed
from halfbyte.layouts.fp8 import block_length, fp8_grid
from halfbyte.layouts.storage import all_storages, read_config

MATRIX = "codes {codes} U8 rows,packed; scales .weight_scale F8_E4M3 rows,blocks; "
PRESCALE = "; prescale .pre_quant_scale BF16|F16|F32 columns optional refused"
FP8 = (
    "codes .weight F8_E4M3 rows,columns; scales {} F32|BF16|F16|F8_E8M0|U8 fp8_grid presence; "
    "input_multiplier .input_scale BF16|F16|F32 () optional"
)
TABLES = {
    "nvfp4 (modelopt)": (
        "modelopt nvfp4 16 2 ",
        MATRIX.format(codes=".weight")
        + "multiplier .weight_scale_2 F32 (); input_multiplier .input_scale F32 () optional"
        + PRESCALE,
    ),
    "nvfp4 stack (modelopt)": (
        "modelopt nvfp4 16 2 ",
        "codes  U8 experts,packed,rows; scales _weight_scale F8_E4M3 experts,blocks,rows; "
        "multiplier _weight_scale_2 F32 (); input_multiplier _input_scale F32 () optional",
    ),
    "nvfp4 (compressed-tensors)": (
        "compressed-tensors nvfp4 16 2 ",
        MATRIX.format(codes=".weight_packed")
        + "divisor .weight_global_scale F32 1; input_divisor .input_global_scale F32 1 optional"
        + PRESCALE,
    ),
    "mxfp4 (compressed-tensors)": (
        "compressed-tensors mxfp4 32 2 .weight_global_scale",
        "codes .weight_packed U8 rows,packed; scales .weight_scale U8 rows,blocks dtype",
    ),
    "int4 (compressed-tensors)": (
        "compressed-tensors int4 0 8 ",
        "codes .weight_packed I32 rows,packed; scales .weight_scale BF16|F16|F32 int4_grid; "
        "shape .weight_shape I64|I32 2 optional; zero_points .weight_zero_point I32|I8 int4_grid optional refused; "
        "order .weight_g_idx I32|I64 columns optional refused",
    ),
    "mxfp4 (gpt-oss)": (
        "gpt-oss mxfp4 32 2 ",
        "codes _blocks U8 experts,rows,blocks,block_bytes; scales _scales U8 experts,rows,blocks",
    ),
    "mxfp4 (deepseek)": (
        "deepseek mxfp4 32 2 ",
        "codes .weight I8|U8 rows,packed; scales .scale F8_E8M0|U8 rows,blocks dtype",
    ),
    "mxfp4 (quark)": (
        "quark mxfp4 32 2 .weight_scale_2",
        "codes .weight U8|I8 rows,packed; scales .weight_scale U8|F8_E8M0 rows,blocks dtype",
    ),
    "fp8 (weight_scale_inv)": ("fp8 fp8 0 1 ", FP8.format(".weight_scale_inv")),
    "fp8 (weight_scale)": ("fp8 fp8 0 1 ", FP8.format(".weight_scale")),
    "fp8 (scale)": ("fp8 fp8 0 1 ", FP8.format(".scale")),
}


def row(rule: PartRule) -> str:
    shape: Any = rule.shape
    axes = shape.__name__ if callable(shape) else ",".join(map(str, shape)) or "()"
    told = "" if rule.tells == "nothing" else f" {rule.tells}"
    marks = (" optional" if rule.optional else "") + (" refused" if rule.refusal else "")
    return f"{rule.role} {rule.suffix} {'|'.join(rule.dtypes)} {axes}{told}{marks}"


def test_tables_of_all_storages() -> None:
    found = {
        storage.name: (
            f"{storage.layout} {storage.format} {storage.block} {storage.packing} {'|'.join(storage.without)}",
            "; ".join(map(row, storage.parts)),
        )
        for storage in all_storages()
    }
    assert found == TABLES


def test_those_that_are_told_by_most_come_first() -> None:
    """Two things, one thing, none."""
    order = [storage.name for storage in all_storages()]
    assert set(order[:2]) == {"mxfp4 (compressed-tensors)", "mxfp4 (quark)"}
    assert set(order[2:6]) == {"mxfp4 (deepseek)", "fp8 (weight_scale_inv)", "fp8 (weight_scale)", "fp8 (scale)"}


LINES = {
    "modelopt": "modelopt some families None False {}* False ",
    "compressed-tensors": r"compressed-tensors never None True re:(.*\.)?{}\..* False ",
    "gpt-oss": "mxfp4 always interleaved False  False ",
    "deepseek-v4": "fp8 never None False  True modelopt",
    "fp8": "fp8 never None False  False ",
    "quark": "quark never None False  False ",
}


def test_what_is_said_of_each_layout() -> None:
    names = ("quant_method", "stacks", "stacking", "run_time_names", "all_under", "needs_input_scales", "replaces")
    assert {name: " ".join(str(getattr(layout, key)) for key in names) for name, layout in LAYOUTS.items()} == LINES
    readers = {name: layout.readers for name, layout in LAYOUTS.items() if layout.readers}
    assert {
        name: [(r.name, r.asks_for_fused, r.matches_substrings) for r in found] for name, found in readers.items()
    } == {
        "modelopt": [("vLLM", True, True), ("SGLang", True, False), ("TensorRT-LLM", False, False)],
        "compressed-tensors": [("vLLM", True, False)],
    }
    assert {name: layout.config_file for name, layout in LAYOUTS.items() if layout.config_file} == {
        "modelopt": "hf_quant_config.json"
    }


@pytest.mark.parametrize(
    ("size", "scales", "length"),
    [
        (7, 1, 7),
        (7, 7, 1),
        (256, 2, 128),
        (257, 3, 128),
        (129, 2, 128),
        (100, 2, 64),
        (64, 2, 32),
        (96, 2, 64),
        (33, 2, 32),
        (32, 2, 16),
        (48, 3, 16),
        (17, 2, 16),
        (300, 3, 128),
        (512, 2, 256),
        (400, 2, 256),
        (256, 3, None),
        (16, 2, None),
        (10, 0, None),
    ],
)
def test_lengths_of_blocks(size: int, scales: int, length: int | None) -> None:
    """All, one, or 128 and then others; the last block may be partial."""
    if length is not None:
        assert block_length(size, scales) == length
        return
    text = f"^{scales} scales do not fit an axis of {size} elements: neither one, nor one per row, nor 128s$"
    with pytest.raises(CheckpointError, match=text):
        block_length(size, scales)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((), (1, 1)),
        ((1,), (1, 1)),
        ((1, 1), (1, 1)),
        ((256,), (256, 1)),
        ((256, 1), (256, 1)),
        ((1, 300), (1, 300)),
        ((1, 256, 1), (256, 1)),
        ((2, 3), (2, 3)),
        ((2, 1, 3), (2, 3)),
        ((2, 1, 3, 1), (2, 3)),
        ((1, 1, 3, 1), (1, 3)),
        ((2, 1, 1, 1), (2, 1)),
    ],
)
def test_grids_of_fp8(shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    assert fp8_grid(256, 300, shape) == grid


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 3, 2), r"scales of shape \[2, 3, 2\] are not known for FP8"),
        ((2, 2, 3, 1), r"scales of shape \[2, 2, 3, 1\] are not known"),
        ((5, 3), "5 scales do not fit an axis of 256 elements"),
        ((2, 7), "7 scales do not fit an axis of 300 elements"),
        ((1, 300, 1), "300 scales do not fit an axis of 256"),
    ],
)
def test_grids_that_fp8_cannot_have(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{text}"):
        fp8_grid(256, 300, shape)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((4, 1), True), ((4, 2), True), ((4, 4), True), ((4, 8), True), ((4, 16), False), ((4, 3), False)],
)
def test_groups_of_int4(shape: tuple[int, int], fits: bool) -> None:
    if fits:
        assert int4_grid(4, 256, shape) == shape
        return
    with pytest.raises(
        CheckpointError, match=f"^{shape[1]} scales per row do not fit 256 elements: groups of 32, 64 or 128$"
    ):
        int4_grid(4, 256, shape)


@pytest.mark.parametrize("shape", [(4,), (3, 2), (4, 2, 1), (), (0, 2)])
def test_scales_that_are_none_of_the_rows(shape: tuple[int, ...]) -> None:
    text = r"^they are no scales of 4 rows: codes are \[out, in/8\], scales \[out, groups\]$"
    with pytest.raises(CheckpointError, match=text):
        int4_grid(4, 256, shape)
    with pytest.raises(CheckpointError, match=r"^0 scales per row"):
        int4_grid(4, 256, (4, 0))


FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
FP8_BESIDE = ("fp8", "deepseek")


@pytest.mark.parametrize(
    ("config", "claim"),
    [
        ({}, Claim(None, False)),
        ({"ignore": ["x"]}, Claim(None, False, beside=FP8_BESIDE)),
        ({"quant_method": "awq"}, Claim("awq", False, beside=FP8_BESIDE)),
        ({"quant_method": "fp8"}, Claim("fp8", False, beside=FP8_BESIDE)),
        ({"quant_method": "quark"}, Claim("quark", False, beside=FP8_BESIDE)),
        ({"quant_method": "mxfp4"}, Claim("gpt-oss", False, formats=("mxfp4",))),
        (
            {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "quantized_layers": {"a": 1}},
            Claim("modelopt", True, formats=("nvfp4",), layers=("a",), beside=FP8_BESIDE),
        ),
        (
            {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "quantized_layers": ["a"]},
            Claim("modelopt", True, formats=("nvfp4",), beside=FP8_BESIDE),
        ),
        (
            {"quant_method": "modelopt_fp4", "quant_algo": "nvfp4", "ignore": ["a"], "exclude_modules": ["b"]},
            Claim("modelopt", True, ("a",), formats=("nvfp4",)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "exclude_modules": ["b", 3]},
            Claim("modelopt", False, ("b", "3"), formats=("nvfp4",)),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "quantized_layers": {"a": 1}}, Claim("modelopt", False)),
        ({"quant_method": "modelopt"}, Claim("modelopt", False)),
        (
            {"quant_method": "modelopt", "quant_algo": "mixed_precision", "quantized_layers": {"a": 1, "b": 2}},
            Claim("modelopt", False, formats=("nvfp4",), layers=("a", "b"), beside=("fp8",)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": []},
            Claim("modelopt", False),
        ),
        ({"quant_method": "compressed-tensors"}, Claim("compressed-tensors", False, targets=())),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head"],
                "config_groups": {
                    "a": {"targets": ["Linear", "x"], "weights": FOUR, "input_activations": None},
                    "b": {"targets": ["x", "y"], "weights": FOUR | {"strategy": "group"}, "input_activations": FOUR},
                    "c": 3,
                },
            },
            Claim("compressed-tensors", True, ("lm_head",), ("Linear", "x", "y"), ("nvfp4", "mxfp4")),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": FOUR | {"num_bits": 8}, "input_activations": FOUR | {"num_bits": 8}},
                    "b": {"weights": FOUR | {"type": "int"}, "input_activations": FOUR | {"type": "int"}},
                    "c": {"weights": FOUR | {"strategy": "row"}},
                    "d": {},
                },
            },
            Claim("compressed-tensors", False, targets=(), formats=("",), beside=("fp8",)),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": [FOUR]},
            Claim("compressed-tensors", False, targets=()),
        ),
    ],
)
def test_what_configs_claim(config: dict[str, Any], claim: Claim) -> None:
    assert read_config(config) == claim


@pytest.mark.parametrize(
    ("content", "config"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ({"quantization": ["FP8"]}, {}),
        ({}, {}),
    ],
)
def test_the_file_of_model_optimizer(content: dict[str, Any], config: dict[str, Any]) -> None:
    assert LAYOUTS["modelopt"].read_config_file(content) == config
    assert LAYOUTS["fp8"].read_config_file(content) == content


def test_a_table_says_as_little_as_it_needs() -> None:
    """What holds where nothing is said."""
    codes = PartRule("codes", ".c", ("U8",), ("rows", "packed"))
    scales = PartRule("scales", ".s", ("U8",), ("rows", "blocks"))
    table = Storage("n", "l", "f", (codes, scales))
    assert (codes.optional, codes.tells, codes.refusal) == (False, "nothing", "")
    assert (table.block, table.packing, table.without) == (0, 2, ())
    assert (table.divides, table.has_tensor_scale, table.stacked) == (False, False, False)
    assert (table.global_role, table.input_role) == ("multiplier", "input_multiplier")
    assert table.sizes((3, 5)) == (0, 3, 10)
    assert table.shape_of(scales, 0, 3, 10) == (3, 0)
    reader = Reader("r", lambda name, listed: False)
    assert (reader.asks_for_fused, reader.matches_substrings) == (True, False)


@pytest.mark.parametrize(
    ("axes", "block", "packing", "shape", "sizes"),
    [
        (("rows", "packed"), 16, 2, (3, 16), (0, 3, 32)),
        (("rows", "packed"), 16, 2, (3, 12), None),
        (("rows", "packed"), 16, 2, (3, 16, 1), None),
        (("rows", "packed"), 16, 2, (3,), None),
        (("rows", "columns"), 0, 1, (3, 7), (0, 3, 7)),
        (("rows", "columns"), 4, 1, (3, 7), None),
        (("experts", "packed", "rows"), 16, 2, (5, 8, 3), (5, 3, 16)),
        (("experts", "rows", "blocks", "block_bytes"), 32, 2, (5, 3, 2, 16), (5, 3, 64)),
        (("experts", "rows", "blocks", "block_bytes"), 32, 2, (5, 3, 2, 15), None),
        (("rows", "packed"), 0, 8, (3, 2), (0, 3, 16)),
    ],
)
def test_sizes_of_weights(axes: Any, block: int, packing: int, shape: tuple[int, ...], sizes: object) -> None:
    rule = PartRule("codes", "", ("U8",), axes)
    table = Storage("n", "l", "f", (rule,), block, packing)
    assert table.sizes(shape) == sizes
    assert table.stacked is ("experts" in axes)


def test_shapes_that_a_function_checks_have_no_axes() -> None:
    rule = PartRule("codes", "", ("U8",), int4_grid)
    table = Storage("n", "l", "f", (rule,))
    assert (table.sizes((2, 2)), table.stacked, table.describe(rule), table.shape_of(rule, 0, 2, 2)) == (
        None,
        False,
        "[]",
        (),
    )


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [((), False), (("rows",), False), (("rows", "packed"), False), (("packed", "rows"), True), (int4_grid, False)],
)
def test_axes_that_are_turned(shape: Any, transposed: bool) -> None:
    """A vector of one number per row is no matrix."""
    assert is_transposed(PartRule("codes", "", ("U8",), shape)) is transposed
