"""Matrices of a dtype that cannot be converted: kept where the caller or the model keeps them, else an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Resources, Rules, make_plan, run
from halfbyte.checkpoint.io.header import TensorInfo
from halfbyte.checkpoint.io.index import Tensor
from halfbyte.checkpoint.plan.unreadable import keep_unreadable, unreadable_text
from halfbyte.errors import CheckpointError
from halfbyte.layouts.storage import all_storages
from tests.checkpoint.toy import Array, llama, raw_file, read_checkpoint, write_checkpoint

EXTRA = "model.layers.0.mlp.extra"


def with_dtype(folder: Path, module: str, dtype: str, size: int, tensors: dict[str, Array] | None = None) -> Path:
    """A tiny Llama with one matrix of 4 x 16 of that dtype: its header says so, whatever the bytes are."""
    source = write_checkpoint(folder, (tensors or llama()) | {f"{module}.weight": np.zeros((4, 16 * size), np.uint8)})
    raw = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].decode()
    before = f'"{module}.weight": {{"dtype": "U8", "shape": [4, {16 * size}]'
    assert before in header
    header = header.replace(before, f'"{module}.weight": {{"dtype": "{dtype}", "shape": [4, 16]')
    (source / "model.safetensors").write_bytes(raw_file(header.encode(), raw[8 + length :]))
    return source


def plan_of(source: Path, *keep: str, to: str = "nvfp4") -> Plan:
    return make_plan(source, Options(to, method="amax" if to == "nvfp4" else None, rules=Rules(keep=keep)))


DTYPES = [("F64", 8), ("I64", 8), ("I32", 4), ("F8_E5M2", 1), ("BOOL", 1), ("C64", 8), ("F8_E4M3", 1)]


@pytest.mark.parametrize(("dtype", "size"), DTYPES)
def test_keep_wins_over_a_dtype_that_cannot_be_read(tmp_path: Path, dtype: str, size: int) -> None:
    source = with_dtype(tmp_path / "s", EXTRA, dtype, size)
    plan = plan_of(source, EXTRA)
    assert plan.kept[EXTRA] == f"--keep {EXTRA}"
    assert not any("matches no module" in note for note in plan.notes)
    assert EXTRA in plan.json_files["config.json"]["quantization_config"]["ignore"]
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    header = (tmp_path / "d" / "model.safetensors").read_bytes()[:20000].decode(errors="replace")
    assert f'"{EXTRA}.weight":{{"dtype":"{dtype}","shape":[4,16]' in header


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (
            "F64",
            8,
            "F64 of shape [4, 16] is a weight in a form that no reader knows. Save it as BF16 or F32 first, or ",
        ),
        ("F8_E5M2", 1, "F8_E5M2 of shape [4, 16] is a weight in a form that no reader knows. Save it as BF16 or F32"),
        ("I64", 8, "I64 of shape [4, 16] is a weight in a form that no reader knows. Integers are no linear layer: "),
        ("F8_E4M3", 1, "is quantized (F8_E4M3), but none of its possible scales is there: "),
    ],
)
def test_without_keep_the_message_says_what_to_do(tmp_path: Path, dtype: str, size: int, message: str) -> None:
    source = with_dtype(tmp_path / "s", EXTRA, dtype, size)
    with pytest.raises(CheckpointError) as caught:
        plan_of(source)
    assert message in str(caught.value)
    assert f"copy it as it is with --keep {EXTRA}" in str(caught.value)


def test_all_of_them_are_named_at_once(tmp_path: Path) -> None:
    two = llama() | {f"model.layers.{i}.hash.weight": np.zeros((4, 16), np.int64) for i in range(2)}
    with pytest.raises(CheckpointError, match=r"layers.0.hash.*1 more are like it: model.layers.1.hash$"):
        plan_of(write_checkpoint(tmp_path / "s", two))
    assert plan_of(tmp_path / "s", ".hash").kept["model.layers.1.hash"] == "--keep .hash"


def test_what_the_model_keeps_needs_no_option(tmp_path: Path) -> None:
    tensors = llama() | {"lm_head.weight": np.zeros((32, 64), np.int64)}
    plan = plan_of(write_checkpoint(tmp_path / "s", tensors))
    assert plan.kept["lm_head"] == "output head"


def test_partners_of_a_matrix_that_is_kept_are_kept(tmp_path: Path) -> None:
    tensors = llama()
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 64), np.int64)
    plan = plan_of(write_checkpoint(tmp_path / "s", tensors), "layers.0.self_attn.k_proj")
    partner = "its partner model.layers.0.self_attn.k_proj is kept"
    assert plan.kept["model.layers.0.self_attn.q_proj"] == plan.kept["model.layers.0.self_attn.v_proj"] == partner


def test_decoding_copies_what_is_not_quantized(tmp_path: Path) -> None:
    quantized = llama() | {EXTRA + ".weight": np.ones((4, 16), np.int64)}
    source = write_checkpoint(tmp_path / "s", quantized)
    run(plan_of(source, EXTRA), tmp_path / "q", Resources(workers=1, sync=False))
    plan = plan_of(tmp_path / "q", to="bf16")
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    assert read_checkpoint(tmp_path / "d")[EXTRA + ".weight"].tolist() == [[1] * 16] * 4


def test_a_quantized_source_may_hold_other_dtypes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama() | {EXTRA + ".weight": np.ones((4, 16), np.int64)})
    run(plan_of(source, EXTRA), tmp_path / "q", Resources(workers=1, sync=False))
    plan = make_plan(tmp_path / "q", Options(layout="compressed-tensors"))
    assert plan.kept[EXTRA] == "unquantized in the source"


@pytest.mark.parametrize(
    ("dtype", "size", "advice"),
    [
        *((*kind, "Save it as BF16 or F32 first, or ") for kind in [("F64", 8), ("F8_E5M2", 1), ("F8_E8M0", 1)]),
        *((*kind, "Integers are no linear layer: ") for kind in [("I64", 8), ("I32", 4), ("BOOL", 1)]),
    ],
)
def test_floats_can_be_saved_anew_and_integers_only_kept(tmp_path: Path, dtype: str, size: int, advice: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_of(with_dtype(tmp_path / "s", EXTRA, dtype, size))
    text = f"{EXTRA}.weight: {dtype} of shape [4, 16] is a weight in a form that no reader knows. {advice}"
    assert str(caught.value).startswith(f"{text}copy it as it is with --keep {EXTRA}. Known: BF16, F16, F32, ")
    assert "more are like it" not in str(caught.value)


def test_in_a_quantized_source_the_callers_reason_counts_first(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama() | {EXTRA + ".weight": np.ones((4, 16), np.int64)})
    run(plan_of(source, EXTRA), tmp_path / "q", Resources(workers=1, sync=False))
    plan = make_plan(tmp_path / "q", Options(layout="compressed-tensors", rules=Rules(keep=("extra",))))
    assert plan.kept[EXTRA] == "--keep extra"


def test_codes_without_scales_are_an_error_in_a_quantized_source_too(tmp_path: Path) -> None:
    source = with_dtype(tmp_path / "s", EXTRA, "F8_E4M3", 1)
    run(plan_of(source, EXTRA), tmp_path / "q", Resources(workers=1, sync=False))
    with pytest.raises(CheckpointError) as caught:
        make_plan(tmp_path / "q", Options(layout="compressed-tensors"))
    assert f"{EXTRA}.weight is quantized (F8_E4M3), but none of its possible scales is there: " in str(caught.value)
    assert f"{EXTRA}.weight_scale, {EXTRA}.weight_scale_inv" in str(caught.value)
    assert str(caught.value).endswith(f"; fetch what is missing, or copy it as it is with --keep {EXTRA}")


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3"])
def test_what_cannot_be_kept_is_not_offered_to_be(dtype: str) -> None:
    """Packed codes of no known form belong to no module that could be named."""
    text = unreadable_text(Tensor(TensorInfo("a.weight", dtype, (4, 16), 0, 64), "f"))
    assert "--keep" not in text
    assert ("none of its possible scales is there" in text) is (dtype == "F8_E4M3")


def tensor(name: str, dtype: str, shape: tuple[int, ...] = (4, 16)) -> Tensor:
    return Tensor(TensorInfo(name, dtype, shape, 0, 0), "f")


@pytest.mark.parametrize(
    ("reason", "quantized", "dtype", "wanted"),
    [
        ("router", False, "F64", "router"),
        ("router", True, "F64", "router"),
        (None, True, "F64", "unquantized in the source"),
        (None, True, "U8", None),
        (None, False, "F64", None),
    ],
)
def test_why_a_matrix_is_kept(reason: str | None, quantized: bool, dtype: str, wanted: str | None) -> None:
    """The width is asked for too. U8 are the codes of a layout, whose scales are not there."""
    asked = []

    def told(module: str, columns: int) -> str | None:
        asked.append((module, columns))
        return reason

    given = {"a": tensor("a.weight", dtype)}
    if wanted is None:
        with pytest.raises(CheckpointError):
            keep_unreadable(given, told, quantized)
    else:
        assert keep_unreadable(given, told, quantized) == {"a": wanted}
    assert asked == [("a", 16)]
    assert keep_unreadable({}, told, quantized) == {}


def test_messages_of_matrices_that_cannot_be_kept() -> None:
    known = "Known: BF16, F16, F32, " + ", ".join(sorted(storage.name for storage in all_storages()))
    form = "of shape [4, 16] is a weight in a form that no reader knows."
    keep = "copy it as it is with --keep a"
    for dtype, text in (
        ("F64", f"a.weight: F64 {form} Save it as BF16 or F32 first, or {keep}. {known}"),
        ("I64", f"a.weight: I64 {form} Integers are no linear layer: {keep}. {known}"),
        ("F8_E5M2", f"a.weight: F8_E5M2 {form} Save it as BF16 or F32 first, or {keep}. {known}"),
    ):
        assert unreadable_text(tensor("a.weight", dtype), "a") == text
    assert unreadable_text(tensor("a.weight_packed", "I64")) == f"a.weight_packed: I64 {form} {known}"
    codes = unreadable_text(tensor("a.weight_packed", "U8"), "a")
    assert codes == (
        "a.weight_packed is quantized (U8), but none of its possible scales is there: a.weight_scale; fetch what is "
        f"missing, or {keep}"
    )
    assert unreadable_text(tensor("a.weight_packed", "U8")) == codes.split(";")[0]


@pytest.mark.parametrize(
    ("others", "wanted"), [((), ""), (("b",), "1 more are like it: b"), (("b", "c"), "2 more are like it: b, c")]
)
def test_several_are_named(others: tuple[str, ...], wanted: str) -> None:
    given = {name: tensor(f"{name}.weight", "F64") for name in ("a", *others)}
    with pytest.raises(CheckpointError) as caught:
        keep_unreadable(given, lambda module, columns: None, False)
    first = unreadable_text(given["a"], "a")
    assert str(caught.value) == (f"{first}. {wanted}" if wanted else first)
