"""Factors of a checkpoint: read, checked against the model, and folded into the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.smoothing import FILE, Link, Smoothing, write_smoothing
from halfbyte.verify.against.smoothed import smoothed, smoothing_of, vector_problem
from tests.samples import f32
from tests.tiny_models import BF16, Tensors
from tests.verify.headers import Headers, checkpoint, compressed, lines, opened, plain
from tests.verify.matrices import matrix

LAYER = "model.layers.0"
CONFIG = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}


def exponents(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    return np.array(numbers, np.int8)


NORM = Link(
    f"{LAYER}.input_layernorm", tuple(f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkv"), True, exponents(1, -1)
)
VALUES = Link(f"{LAYER}.self_attn.v_proj", (f"{LAYER}.self_attn.o_proj",), False, exponents(1, 2), 2, 2)


def found(path: Path, *links: Link, **config: object) -> tuple[int, list[str]]:
    headers: Headers = {}
    for leaf in "qkvo":
        headers |= (plain if leaf == "q" else compressed)(f"{LAYER}.self_attn.{leaf}_proj")
    write_smoothing(path / FILE, Smoothing(links))
    smoothing, problems = smoothing_of(checkpoint(headers, CONFIG | config, path))
    return len(smoothing.links), lines(problems)


def test_factors_that_leave_the_outputs_alone(tmp_path: Path) -> None:
    smoothing, problems = smoothing_of(checkpoint({}, CONFIG, tmp_path))
    assert (smoothing.links, problems) == ((), [])
    assert found(tmp_path, NORM, VALUES) == (2, [])


@pytest.mark.parametrize(
    "link",
    [
        Link(NORM.origin, NORM.into[:2], True, NORM.exponents),
        Link(NORM.origin, NORM.into, False, NORM.exponents),
        Link(VALUES.origin, VALUES.into, False, VALUES.exponents, 1, 2),
        Link(VALUES.origin, VALUES.into, False, VALUES.exponents, 2, 1),
        Link("model.norm", ("lm_head",), True, NORM.exponents),
    ],
)
def test_factors_that_nobody_undoes(tmp_path: Path, link: Link) -> None:
    text = f"{FILE} divides it by factors that {', '.join(link.into)} would have to undo; in this model they do not"
    assert found(tmp_path, link) == (1, [f"error [smoothing] {link.origin}: {text}"])


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    smoothing, problems = smoothing_of(checkpoint({}, CONFIG, tmp_path))
    text = f"{tmp_path / FILE} is no file of smoothing factors: it has no halfbyte_smoothing of version 1"
    assert (smoothing.links, lines(problems)) == ((), [f"error [smoothing] {FILE}: {text}"])
    count, (line,) = found(tmp_path, NORM, model_type="other")
    assert (count, line.startswith(f"error [smoothing] {FILE}: --smooth: where factors can be folded")) == (0, True)


def test_matrices_of_the_source() -> None:
    values = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    extra = {"plain": "p", "stored": "s", "multipliers": "m"}
    link = Link("w", ("v", "both"), False, exponents(1, 0))
    rows = Link("both", ("x",), False, exponents(0, 1, 2))
    smoothing = Smoothing((link, rows))
    other = matrix("other", values, **extra)
    assert smoothed(other, smoothing) is other
    columns = smoothed(matrix("v", values, **extra), smoothing)
    assert (columns.plain, columns.stored, columns.multipliers) == (None, None, None)
    assert columns.read(1, 3).tolist() == [[6, 4], [10, 6]]
    assert smoothed(matrix("w", values[:2]), smoothing).read(0, 2).tolist() == [[0.5, 1], [3, 4]]
    assert smoothed(matrix("both", values), smoothing).read(1, 3).tolist() == [[3, 2], [2.5, 1.5]]
    for name, wrong in (("w", values), ("v", values.T), ("both", values[:2]), ("both", np.zeros((3, 3)))):
        unfit = matrix(name, wrong)
        assert smoothed(unfit, smoothing) is unfit


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (f32(1, 8).astype(BF16), f32(2, 4).astype(BF16), None),
        (f32(1, 7).astype(BF16), f32(2, 4).astype(BF16), "kept: element 1 is 7, but 4 / 2^-1 in the source"),
        (f32(2, 7).astype(BF16), f32(2, 4).astype(BF16), "kept: element 0 is 2, but 2 / 2^1 in the source"),
        (f32(1, 8), f32(2, 4).astype(BF16), "shape: F32 [2], unlike the source or its factors"),
        (f32(1, 8, 0), f32(2, 4), "shape: F32 [3], unlike the source or its factors"),
        (f32(1, 8, 0), f32(2, 4, 0), "shape: F32 [3], unlike the source or its factors"),
    ],
)
def test_vectors(tmp_path: Path, mine: object, theirs: object, expected: str | None) -> None:
    name = f"{NORM.origin}.weight"
    ours: Tensors = {name: np.asarray(mine)}
    wanted: Tensors = {name: np.asarray(theirs)}
    made, source = opened(tmp_path / "a", ours), opened(tmp_path / "b", wanted)
    problem = vector_problem(made, source, made.tensors[name], source.tensors[name], Smoothing((NORM,)))
    rule, _, text = (expected or "").partition(": ")
    assert (problem and lines([problem])) == (None if expected is None else [f"error [{rule}] {name}: {text}"])
