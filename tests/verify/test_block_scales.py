"""Scale bytes that no block should have, counted one by one, and the blocks whose values they lose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint.io.index import MANIFEST
from halfbyte.verify.block_scales import block_problems
from halfbyte.verify.stored import read_contents
from tests.tiny_models import E4M3, Array
from tests.verify.headers import lines, opened

ROWS, BLOCKS = 600, 3
"""More rows than are looked at together."""


def weight(name: str, scales: dict[tuple[int, int], int], codes: dict[tuple[int, int], int]) -> dict[str, Array]:
    """NVFP4: scales of 1 over codes of 0, but for these bytes."""
    scale_bytes, code_bytes = np.full((ROWS, BLOCKS), 0x38, np.uint8), np.full((ROWS, 8 * BLOCKS), 0x80, np.uint8)
    for place, byte in scales.items():
        scale_bytes[place] = byte
    for place, byte in codes.items():
        code_bytes[place] = byte
    return {
        f"{name}.weight": code_bytes,
        f"{name}.weight_scale": scale_bytes.view(E4M3),
        f"{name}.weight_scale_2": np.ones((), np.float32),
    }


def found(path: Path, tensors: dict[str, Array], contract: str | None = None) -> list[str]:
    made = opened(path / "made", tensors)
    if contract is not None:
        manifest = {"fingerprint": "", "shards": {}, "contract": contract}
        (path / "made" / MANIFEST).write_text(json.dumps(manifest))
    return lines(block_problems(made.path, read_contents(made)))


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({(0, 0): 0x7E, (1, 1): 0x01}, None),
        ({(0, 0): 0x7F, (599, 2): 0xFF}, "error a: 2 of 1800 scales are NaN: their blocks decode to NaN"),
        ({(0, 0): 0x81, (5, 1): 0xFE, (599, 2): 0xB8}, "error a: 3 of 1800 scales are negative"),
        (
            {(0, 0): 0x80, (5, 1): 0},
            "warning a: 2 of 1800 scales are 0 (over zero codes); Model-Optimizer's rule is never to write 0",
        ),
    ],
)
def test_bytes_of_scales(tmp_path: Path, scales: dict[tuple[int, int], int], expected: str | None) -> None:
    told = found(tmp_path, weight("a", scales, {}) | weight("b", {}, {}))
    wanted = [] if expected is None else [expected.replace(" a:", " [block-scale] a.weight_scale:")]
    assert told == wanted


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    told = found(tmp_path, weight("a", {(0, 0): 0xFF, (1, 1): 0x90, (2, 2): 0}, {(2, 16): 0x01}))
    assert [line.partition("weight_scale: ")[2] for line in told] == [
        "1 of 1800 scales are NaN: their blocks decode to NaN",
        "1 of 1800 scales are negative",
        "1 of 1800 scales are 0, 1 of them over codes that are not: those values are lost",
    ]


ZEROS = {(0, 0): 0, (0, 1): 0, (255, 2): 0x80, (256, 0): 0, (599, 2): 0, (300, 1): 0}
"""The last of them over zero codes, the others over one code each: low or high, first or last of the block."""
CODES = {(0, 0): 0x01, (0, 15): 0x10, (255, 23): 0x78, (256, 0): 0xF0, (599, 23): 0x0F, (300, 7): 0x11, (300, 16): 0x11}


def test_values_that_are_lost(tmp_path: Path) -> None:
    text = "6 of 1800 scales are 0, 5 of them over codes that are not: those values are lost"
    assert found(tmp_path, weight("a", ZEROS, CODES)) == [f"error [block-scale] a.weight_scale: {text}"]


@pytest.mark.parametrize("contract", ["miles", "transformer_engine:2", "modelopt"])
def test_contracts_that_write_zero(tmp_path: Path, contract: str) -> None:
    told = found(tmp_path, weight("a", ZEROS, CODES), contract)
    if contract == "modelopt":
        assert told[0].startswith("error ")
    else:
        text = "6 of 1800 scales are 0 (as its contract writes them); Model-Optimizer's rule is never to write 0"
        assert told == [f"warning [block-scale] a.weight_scale: {text}"]


def test_exponents_of_mxfp4(tmp_path: Path) -> None:
    """Every byte is a scale but 255."""
    scales = np.arange(256, dtype=np.uint8).reshape(128, 2)
    codes = np.full((128, 32), 0x77, np.uint8)
    tensors: dict[str, Array] = {"a.weight_packed": codes, "a.weight_scale": scales}
    text = "1 of 256 scales are NaN: their blocks decode to NaN"
    assert found(tmp_path, tensors) == [f"error [block-scale] a.weight_scale: {text}"]


def test_weights_without_scales_or_of_other_formats_are_left_alone(tmp_path: Path) -> None:
    lone = {"a.weight_packed": np.ones((4, 8), np.uint8), "b.weight": np.ones((4, 8)).astype(E4M3)}
    assert found(tmp_path, {**lone, "b.weight_scale": np.zeros((4, 1), np.float32)}) == []
