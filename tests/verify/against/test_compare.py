"""A checkpoint against its source, on tensors of a few numbers: what is said, what is counted, and in which order."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint.io.header import TensorInfo
from halfbyte.checkpoint.io.index import Tensor
from halfbyte.verify.against.compare import Progress, _difference, _first_difference, _place, compare
from halfbyte.verify.problems import Report
from halfbyte.verify.rules.structure import structure_problems
from halfbyte.verify.stored import read_contents
from tests.samples import f32
from tests.tiny_models import BF16, E4M3, Tensors
from tests.verify.headers import checkpoint, lines, opened
from tests.verify.weights import Weight, random_rounding

ONES = np.ones((4, 8), np.float32)
SIGNS = np.array([[1 - 2 * ((row & column).bit_count() % 2) for column in range(8)] for row in range(4)], np.float32)
"""Rows that stand at right angles."""


def run(
    path: Path, ours: Tensors, theirs: Tensors, limit: float = 0.25, **config: Any
) -> tuple[Report, list[Progress]]:
    mine, source = opened(path / "mine", ours, config), opened(path / "source", theirs, config)
    report = Report("mine")
    steps: list[Progress] = []
    contents = read_contents(mine)
    broken = {problem.name for problem in structure_problems(contents)}
    compare(mine, contents.without(broken), source, limit, report, steps.append)
    return report, steps


def told(path: Path, ours: Tensors, theirs: Tensors, limit: float = 0.25, **config: Any) -> list[str]:
    return lines(run(path, ours, theirs, limit, **config)[0].problems)


def test_progress_counts_every_tensor_once(tmp_path: Path) -> None:
    """Two matrices, two other tensors, and one that is lost: nothing is left to do for that one."""
    ours: Tensors = {"a.weight": ONES, "b.weight": ONES, "n.weight": f32(1, 2), "m.bias": f32(3)}
    report, steps = run(tmp_path, ours, ours | {"lost": f32(1)})
    assert steps == [Progress(done, 4) for done in (1, 2, 3, 4)]
    assert report.equal == 4
    assert lines(report.problems) == ["error [lost] lost: in the source (F32 [1]), but not in the checkpoint"]


def test_errors_are_sorted(tmp_path: Path) -> None:
    """NaN first, then the worst, then by name."""
    theirs: Tensors = {f"{name}.weight": ONES for name in "edcba"}
    sizes = {"a": 1.0, "b": 1.25, "c": np.nan, "d": 1.5, "e": 1.5}
    ours: Tensors = {f"{name}.weight": (size * ONES).astype(BF16) for name, size in sizes.items()}
    report, _ = run(tmp_path, ours, theirs, limit=1)
    assert [error.name for error in report.errors] == ["c", "d", "e", "b", "a"]
    assert [error.relative for error in report.errors][1:] == [0.5, 0.5, 0.25, 0]
    assert math.isnan(report.errors[0].relative)
    assert report.equal == 0


def test_the_limit(tmp_path: Path) -> None:
    """An error of just the limit is judged as one of rounding, a larger one as that of the weight."""
    one, half = SIGNS.copy(), SIGNS.copy()
    one[2] *= 1.5
    half[2] *= 1.5 + 2.0**-6
    wanted: Tensors = {"a.weight": SIGNS}
    rounding = "error [values] a: bf16: row 2, column 0 is 1.5, the source is 1 (and 7 more values); "
    once = "each should be the source's, rounded once"
    assert told(tmp_path / "a", {"a.weight": one.astype(BF16)}, wanted) == [rounding + once]
    assert told(tmp_path / "b", {"a.weight": half.astype(BF16)}, wanted) == [
        "error [values] a: bf16: relative error 0.258, more than 0.25",
        "error [row] a: row 2: relative error 0.516",
    ]
    two = half.copy()
    two[1:] *= 1.5  # half of the rows are bad: the median row too
    assert told(tmp_path / "c", {"a.weight": two.astype(BF16)}, wanted)[1:] == []


def test_a_median_row_of_just_the_limit(tmp_path: Path) -> None:
    ours = (SIGNS[:3] * f32(1.25, 1.25, 4)[:, None]).astype(BF16)
    first, second = told(tmp_path, {"a.weight": ours}, {"a.weight": SIGNS[:3]})
    assert first.startswith("error [values] a: bf16: relative error 1.74, more than 0.25")
    assert second == "error [row] a: row 2: relative error 3"


def test_a_row_with_nan_is_placed(tmp_path: Path) -> None:
    ours = ONES.copy()
    ours[1, 3] = np.nan
    assert told(tmp_path, {"a.weight": ours.astype(BF16)}, {"a.weight": ONES}) == [
        "error [values] a: bf16: relative error nan, more than 0.25; it decodes to NaN",
        "error [row] a: row 1: relative error nan",
    ]


def test_a_matrix_of_another_shape(tmp_path: Path) -> None:
    assert told(tmp_path, {"a.weight": ONES[:3], "b.weight": ONES}, {"a.weight": ONES, "b.weight": ONES}) == [
        "error [shape] a: shape [3, 8], but [4, 8] in the source"
    ]


def test_fp8(tmp_path: Path) -> None:
    """Exact values of another kind have no error; one that is off is placed."""
    codes, scale = ONES.astype(E4M3), np.full((), 2, np.float32)
    ours: Tensors = {"a.weight": codes, "a.weight_scale": scale}
    report, _ = run(tmp_path / "a", ours, {"a.weight": 2 * ONES})
    assert lines(report.problems) == []
    assert [(error.kind, error.relative) for error in report.errors] == [("fp8 (weight_scale)", 0)]
    codes[1, 2] = E4M3(1.25)
    assert told(tmp_path / "b", ours, {"a.weight": 2 * ONES}) == [
        "error [values] a: fp8 (weight_scale): row 1, column 2 is 2.5, the source is 2: more than half a step off"
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (f32(1, 2, 3), f32(1, 2, 3), None),
        (f32(1, 2, 3), f32(1, 2, 4), "kept as F32, but not as in the source: they differ from element [2] on"),
        (f32(1, 2, 3), f32(1, 2), "shape [3], but [2] in the source"),
        (f32(1, 2, 3).astype(BF16), f32(1, 2, 3), None),
        (f32(1, 1e-3).astype(BF16), f32(1, 1e-3), None),
        (
            f32(1, 2).astype(BF16),
            f32(1, 1e-3),
            "F32 rounded to BF16, but not as in the source: they differ from element [1] on",
        ),
        (f32(1, np.inf).astype(np.float16), f32(1, 1e9), None),
        (np.float32(1), np.float32(2), "kept as F32, but not as in the source: they differ from byte 2 on"),
        (
            np.zeros((2, 3, 4), np.int8),
            np.eye(6, 4, -5, dtype=np.int8).reshape(2, 3, 4),
            "kept as I8, but not as in the source: they differ from element [1, 2, 0] on",
        ),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 21])
def test_kept_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: Any, theirs: Any, expected: str | None, chunk: int
) -> None:
    monkeypatch.setattr("halfbyte.verify.reading.PIECE", chunk)
    report, _ = run(tmp_path, {"n": np.asarray(ours), "o": f32(1)}, {"n": np.asarray(theirs), "o": f32(1)})
    rule = "shape" if expected is not None and expected.startswith("shape") else "kept"
    assert lines(report.problems) == ([] if expected is None else [f"error [{rule}] n: {expected}"])
    assert report.equal == (2 if expected is None else 1)


@pytest.mark.parametrize(("mine", "theirs"), [("U16", "I16"), ("I16", "U16")])
def test_dtypes_that_cannot_be_compared(mine: str, theirs: str) -> None:
    ours, source = (Tensor(TensorInfo("n", dtype, (3,), 0, 6), "f") for dtype in (mine, theirs))
    problem = _difference(checkpoint({}), checkpoint({}), ours, source)
    text = f"error [dtype] n: {mine}, but {theirs} in the source, and such values cannot be compared"
    assert problem is not None
    assert lines([problem]) == [text]


def test_places_in_bytes() -> None:
    assert _first_difference(f32(1, 2, 3), f32(1, 2, 3.5)) == 10  # of the third number, the third byte
    info = SimpleNamespace(bytes=24, shape=(2, 3))
    tensor: Any = SimpleNamespace(info=info)
    assert [_place(tensor, byte) for byte in (0, 3, 4, 23)] == [
        "element [0, 0]",
        "element [0, 0]",
        "element [0, 1]",
        "element [1, 2]",
    ]
    info.bytes = 5  # less than a byte each
    assert _place(tensor, 4) == "byte 4"


def test_a_damaged_source_is_said_to_be_one(tmp_path: Path) -> None:
    theirs: Tensors = {"a.weight": ONES.astype(E4M3), "a.weight_scale": np.ones(3, np.float32), "n": f32(1)}
    ours: Tensors = {"a.weight": ONES, "n": f32(1)}
    first, *rest = told(tmp_path, ours, theirs)
    assert first.startswith("error [source] a: in the source: codes [4, 8] with scales [3]: fp8 (weight_scale) ")
    assert rest == [
        "error [lost] a.weight_scale: in the source (F32 [3]), but not in the checkpoint",
        "error [no-source] a: f32 [4, 8], but the source has no such weight",
    ]


STACK = "l.mlp.experts.gate_up_proj"


def test_biases_of_experts(tmp_path: Path) -> None:
    """Each expert's bias is a part of the common one; gate and up in turns or in halves."""
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    names = [f"l.mlp.experts.{expert}.{leaf}.bias" for expert in range(2) for leaf in ("gate_proj", "up_proj")]
    halves = dict(zip(names, whole.reshape(4, 2), strict=True))
    turns = dict(zip(names, [row[start::2] for row in whole for start in (0, 1)], strict=True))
    for model_type, ours, wrong in (("gpt_oss", turns, "0:4:2"), ("llama4", halves, "0:2:1")):
        config: dict[str, Any] = {"model_type": model_type, "architectures": []}
        report, _ = run(tmp_path / model_type, dict(ours), {f"{STACK}_bias": whole}, **config)
        assert (lines(report.problems), report.equal) == ([], 4)
        ours[names[2]] = ours[names[0]]
        report, _ = run(tmp_path / f"{model_type}-wrong", dict(ours), {f"{STACK}_bias": whole}, **config)
        expected = [f"error [kept] {names[2]}: is not row 1 of {STACK}_bias, elements {wrong}"]
        assert (lines(report.problems), report.equal) == (expected, 3)


def test_scales_of_the_cache_keep_their_value(tmp_path: Path) -> None:
    before: Tensors = {f"l.self_attn.{part}_proj.{part}_scale": np.asarray(np.float32(2)) for part in "kv"}
    after: Tensors = {"l.self_attn.k_scale": f32(2), "l.self_attn.v_scale": f32(3)}
    report, _ = run(tmp_path / "a", after | {"n": f32(1)}, {**before, "n": f32(1)})
    text = "is not what l.self_attn.v_proj.v_scale is in the source"
    assert (lines(report.problems), report.equal) == ([f"error [kept] l.self_attn.v_scale: {text}"], 2)
    same, _ = run(tmp_path / "b", {**before}, {**before})  # under the same name: compared as other tensors are
    assert (lines(same.problems), same.equal) == ([], 2)
    new, _ = run(tmp_path / "c", {**after, "n": f32(1)}, {"n": f32(1)})
    assert [problem.rule for problem in new.problems] == ["no-source"] * 2


@pytest.mark.parametrize(("count", "more"), [(1, ""), (2, " (and 1 more weight)"), (3, " (and 2 more weights)")])
def test_another_rounding_is_said_of_all_together(tmp_path: Path, count: int, more: str) -> None:
    """Codes one step above the nearest, in every block."""
    ours: Tensors = {}
    for number in range(count):
        ours[f"{number}.weight"] = np.full((16, 16), 0x22, np.uint8)
        ours[f"{number}.weight_scale"] = np.ones((16, 2), E4M3)
        ours[f"{number}.weight_scale_2"] = np.ones((), np.float32)
    values = np.float32(0.74) + (np.arange(32, dtype=np.float32) % 2) * np.float32(0.5) + np.zeros((16, 1), np.float32)
    theirs: Tensors = {f"{number}.weight": values for number in range(count)}
    text = (
        f"most rows have codes that are not the nearest to the source{more}: the writer rounded in another way "
        "(GPTQ, at random), so damage is found only where it is large"
    )
    assert told(tmp_path / "a", ours, theirs, limit=0.3) == [f"warning [rounding] 0: {text}"]
    good = {name: np.full((16, 16), 0x32, np.uint8) if name.endswith("weight") else x for name, x in ours.items()}
    exact: Tensors = {name: np.where(values > 1, f32(1.5), f32(1)) for name in theirs}
    assert told(tmp_path / "b", good, exact) == []


def test_another_rounding_is_not_said_of_a_wrong_tensor_scale(tmp_path: Path) -> None:
    weight = Weight(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32), "nvfp4", "modelopt")
    random_rounding(weight)
    for factor, rule in ((1, "warning [rounding]"), (0.95, "error [values]")):
        scale = np.asarray(np.float32(weight.tensor_scale * factor))
        ours: Tensors = {
            "a.weight": weight.codes,
            "a.weight_scale": weight.scales.view(E4M3),
            "a.weight_scale_2": scale,
        }
        (line,) = told(tmp_path / rule[:3], ours, {"a.weight": weight.source})
        assert line.startswith(f"{rule} a: ")
