"""Values of every way of storing, against the numbers that were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import CheckpointError
from halfbyte.verify.stored import read_contents
from halfbyte.verify.values import Matrix, _integers, coded_rows, matrices
from tests.quantized import decode
from tests.samples import f32
from tests.tiny_models import BF16, E4M3, E8M0, Array, Tensors
from tests.verify.headers import Headers, checkpoint, compressed, contents, opened
from tests.verify.matrices import matrix

RANDOM = np.random.default_rng(5)


def read(path: Path, tensors: Tensors, **config: Any) -> dict[str, Matrix]:
    made = opened(path, tensors, config)
    return matrices(made, read_contents(made))


def values(one: Matrix) -> Array:
    return one.read(0, one.shape[0])


@pytest.mark.parametrize(
    ("shape", "chunk", "ranges"),
    [
        ((5, 3), 6, [(0, 2), (2, 4), (4, 5)]),
        ((5, 3), 7, [(0, 2), (2, 4), (4, 5)]),
        ((2, 3), 1, [(0, 1), (1, 2)]),
        ((2, 0), 1, [(0, 1), (1, 2)]),
        ((0, 3), 9, []),
        ((2, 3), 6, [(0, 2)]),
        ((2, 0), 2, [(0, 2)]),
    ],
)
def test_chunks(monkeypatch: pytest.MonkeyPatch, shape: Any, chunk: int, ranges: list[tuple[int, int]]) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    one = matrix("w", np.zeros(shape))
    assert list(one.chunks()) == ranges
    assert one.size == shape[0] * shape[1]


def test_rows() -> None:
    assert matrix("w", [[1, 2], [3, 4], [5, 6]]).row(1).tolist() == [3, 4]


def test_plain_weights(tmp_path: Path) -> None:
    """Matrices called weight, of floats, that are not empty."""
    whole = RANDOM.standard_normal((4, 6)).astype(BF16)
    found = read(
        tmp_path,
        {
            "a.weight": whole,
            "b.bias": whole,
            "c.weight": f32(1),
            "d.weight": np.ones((2, 3, 4), np.float32),
            "e.weight": np.ones((2, 3), np.int64),
            "f.weight": np.ones((0, 3), np.float32),
        },
    )
    assert list(found) == ["a"]
    one = found["a"]
    assert (one.shape, one.kind, one.sources, one.encoded, one.multipliers) == (
        (4, 6),
        "bf16",
        ("a.weight",),
        None,
        None,
    )
    assert one.plain is not None
    assert one.plain.name == "a.weight"
    assert one.stored is not None
    assert one.stored(1, 3).tolist() == whole[1:3].tolist()
    np.testing.assert_array_equal(one.read(1, 3), whole[1:3].astype(np.float32))


@pytest.mark.parametrize(
    ("model_type", "order"),
    [("qwen3_moe", "halves"), ("llama4", "transposed"), ("gpt_oss", "interleaved"), ("", "halves")],
)
def test_plain_stacks(tmp_path: Path, model_type: str, order: str) -> None:
    """Gate and up in halves or in turns, as they lie or transposed."""
    gate_up, down = RANDOM.standard_normal((3, 4, 6)).astype(BF16), RANDOM.standard_normal((3, 6, 2)).astype(BF16)
    as_stored = (
        (lambda stack: stack) if order == "halves" else (lambda stack: np.ascontiguousarray(stack.swapaxes(1, 2)))
    )
    names = {"l.experts.gate_up_proj": as_stored(gate_up), "l.experts.down_proj": as_stored(down)}
    config = {"model_type": model_type, "hidden_size": 6, "moe_intermediate_size": 2, "intermediate_size": 2}
    found = read(tmp_path, names, **config)
    gates = {"interleaved": (slice(0, 4, 2), slice(1, 4, 2))}.get(order, (slice(0, 2), slice(2, 4)))
    wanted = {}
    for expert in range(3):
        wanted[f"l.experts.{expert}.gate_proj"] = gate_up[expert, gates[0]]
        wanted[f"l.experts.{expert}.up_proj"] = gate_up[expert, gates[1]]
    wanted |= {f"l.experts.{expert}.down_proj": down[expert] for expert in range(3)}
    assert list(found) == list(wanted)
    for name, whole in wanted.items():
        one = found[name]
        assert (one.shape, one.kind, one.plain, one.stored) == (whole.shape, "bf16", None, None)
        np.testing.assert_array_equal(values(one), whole.astype(np.float32))
        np.testing.assert_array_equal(one.read(1, 2), whole[1:2].astype(np.float32))
        assert one.sources == (f"l.experts.{'down' if 'down' in name else 'gate_up'}_proj",)


def codes(*shape: int) -> Array:
    return RANDOM.integers(0, 256, shape, np.uint8)


def scales(*shape: int) -> Array:
    return np.exp2(RANDOM.integers(-3, 3, shape)).astype(E4M3)


def test_matrices_in_blocks(tmp_path: Path) -> None:
    """Both layouts of NVFP4, whose tensor scales multiply or divide; MXFP4."""
    a, b, c = codes(4, 16), codes(4, 16), codes(4, 32)
    sa, sb, sc = scales(4, 2), scales(4, 2), RANDOM.integers(120, 130, (4, 2), np.uint8)
    tensors: Tensors = {"a.weight": a, "a.weight_scale": sa, "a.weight_scale_2": np.asarray(np.float32(0.25))}
    tensors |= {"b.weight_packed": b, "b.weight_scale": sb, "b.weight_global_scale": f32(8)}
    tensors |= {"c.weight_packed": c, "c.weight_scale": sc, "d.weight_packed": b, "d.weight_scale": sb}
    tensors["d.weight_global_scale"] = f32(0)
    found = read(tmp_path, tensors)
    for name, wanted, number in (
        ("a", decode(a, sa, 16, 0.25), 0.25),
        ("b", decode(b, sb, 16, 0.125), 0.125),
        ("c", decode(c, sc, 32), 1.0),
    ):
        one = found[name]
        assert (one.shape, one.plain, one.stored, one.multipliers) == (wanted.shape, None, None, None)
        np.testing.assert_array_equal(values(one), wanted)
        np.testing.assert_array_equal(one.read(1, 3), wanted[1:3])
        assert one.encoded is not None
        stored = one.encoded(1, 3)
        assert (stored.tensor_scale, stored.block) == (number, 32 if name == "c" else 16)
        np.testing.assert_array_equal(stored.codes, {"a": a, "b": b, "c": c}[name][1:3])
        np.testing.assert_array_equal(stored.scales * number, np.abs(stored.factors()))
    assert found["a"].sources == ("a.weight", "a.weight_scale", "a.weight_scale_2")
    assert found["d"].encoded is not None
    assert found["d"].encoded(0, 1).tensor_scale == np.inf
    assert [found[name].kind for name in "abc"] == [
        "nvfp4 (modelopt)",
        "nvfp4 (compressed-tensors)",
        "mxfp4 (compressed-tensors)",
    ]


def test_stacks_in_blocks(tmp_path: Path) -> None:
    """Transposed ones of Model-Optimizer, upright ones of gpt-oss."""
    a, sa = codes(2, 16, 6), scales(2, 2, 6)
    tensors: Tensors = {"l.experts.gate_up_proj": a, "l.experts.gate_up_proj_weight_scale": sa}
    tensors["l.experts.gate_up_proj_weight_scale_2"] = np.asarray(np.float32(2))
    b, sb = codes(2, 4, 2, 16), RANDOM.integers(120, 130, (2, 4, 2), np.uint8)
    tensors |= {"m.experts.down_proj_blocks": b, "m.experts.down_proj_scales": sb}
    found = read(tmp_path, tensors, model_type="llama4")
    for expert in range(2):
        whole = decode(np.ascontiguousarray(a[expert].T), np.ascontiguousarray(sa[expert].T), 16, 2)
        for leaf, part in (("gate_proj", slice(0, 3)), ("up_proj", slice(3, 6))):
            one = found[f"l.experts.{expert}.{leaf}"]
            assert one.shape == (3, 32)
            np.testing.assert_array_equal(values(one), whole[part])
            assert one.encoded is not None
            np.testing.assert_array_equal(one.encoded(1, 3).codes, a[expert].T[part][1:3])
            assert one.encoded(1, 2).tensor_scale == 2
        down = found[f"m.experts.{expert}.down_proj"]
        np.testing.assert_array_equal(values(down), decode(b[expert].reshape(4, 32), sb[expert], 32))


def test_integers(tmp_path: Path) -> None:
    """The lowest bits first, 8 stands for zero, one scale per row and group."""
    numbers = RANDOM.integers(0, 16, (3, 64)).astype(np.int64)
    words = (numbers.reshape(3, 8, 8) << np.arange(0, 32, 4)).sum(axis=2).astype(np.uint32).view(np.int32)
    factors = np.exp2(RANDOM.integers(-3, 3, (3, 2))).astype(np.float32)
    wanted = (numbers - 8) * np.repeat(factors, 32, axis=1)
    np.testing.assert_array_equal(_integers(words, factors), wanted)
    assert _integers(words, factors).dtype == np.float32


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((), (1, 1)),
        ((1,), (1, 1)),
        ((6, 1), (6, 1)),
        ((6,), (6, 1)),
        ((1, 40), (1, 40)),
        ((3, 1), (3, 1)),
        ((6, 3), (6, 3)),
        ((6, 1, 3, 1), (6, 3)),
    ],
)
def test_fp8(tmp_path: Path, shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    """Scales of the tensor, of rows, of columns, and of blocks of 16 whose last are partial."""
    rows = 40 if grid[0] == 3 else 6
    number = RANDOM.standard_normal((rows, 40)).astype(E4M3)
    factors = np.exp2(RANDOM.integers(-3, 3, shape)).astype(np.float32)
    one = read(tmp_path, {"a.weight": number, "a.weight_scale": np.asarray(factors)})["a"]
    tall, wide = {1: rows, 3: 16}.get(grid[0], 1), {1: 40, 3: 16}.get(grid[1], 1)
    spread = np.repeat(np.repeat(factors.reshape(grid), tall, 0), wide, 1)[:rows, :40]
    np.testing.assert_array_equal(values(one), number.astype(np.float32) * spread)
    np.testing.assert_array_equal(one.read(2, 5), (number.astype(np.float32) * spread)[2:5])
    assert one.multipliers is not None
    assert one.encoded is None
    np.testing.assert_array_equal(
        np.broadcast_to(one.multipliers(2, 5), (3, 40)), np.broadcast_to(spread, (rows, 40))[2:5]
    )
    np.testing.assert_array_equal(one.read(2, 99), (number.astype(np.float32) * spread)[2:])


@pytest.mark.parametrize("dtype", [E8M0, np.uint8])
def test_fp8_with_exponents(tmp_path: Path, dtype: Any) -> None:
    number = np.ones((2, 16), E4M3)
    exponents = np.array([[126], [129]], np.uint8).view(dtype)
    one = read(tmp_path, {"a.weight": number, "a.weight_scale": exponents})["a"]
    assert values(one)[:, 0].tolist() == [0.5, 4]


def test_weights_that_lack_a_part_are_left_out() -> None:
    short = compressed("a")
    del short["a.weight_scale"]
    made: Headers = short | compressed("b") | {"c.weight": ("U8", (4,)), "c.weight_scale": ("F8_E4M3", (4, 1))}
    made |= {"c.weight_scale_2": ("F32", ())}
    assert list(matrices(checkpoint(made), contents(made))) == ["b"]


def test_scales_without_axes(tmp_path: Path) -> None:
    made = opened(tmp_path, {"a.weight": np.ones((2, 16), E4M3), "a.weight_scale": np.ones((2, 1), np.float32)})
    (weight,) = read_contents(made).quantized.values()
    with pytest.raises(CheckpointError, match=r"^a.weight_scale: fp8 \(weight_scale\) has no axes of its own$"):
        coded_rows(tmp_path, weight, "scales", 0, slice(1))
