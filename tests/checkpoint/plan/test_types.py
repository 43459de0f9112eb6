"""A plan by hand: what its parts count, what its fingerprints depend on, and the JSON of it, whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint.io.views import SourceMatrix, View
from halfbyte.checkpoint.plan import types
from halfbyte.checkpoint.plan.select import Rules
from halfbyte.checkpoint.plan.types import (
    Calibrated,
    Copy,
    Factors,
    Options,
    Output,
    Plan,
    Shard,
    Solved,
    SourceFile,
    Unit,
    place,
)
from halfbyte.contracts import get_contract
from halfbyte.errors import InputError
from halfbyte.formats import get_format
from halfbyte.layouts.description import Part
from halfbyte.methods import Gptq
from halfbyte.smoothing import Link, Smoothing


def source(file: str, offset: int, rows: int, columns: int) -> SourceMatrix:
    return SourceMatrix("float", rows, columns, View(f"{file} {offset}", file, "BF16", offset, rows, columns, columns))


def unit(module: str, group: int, at: int, *sources: SourceMatrix) -> Unit:
    parts = (Part(f"{module}.weight", "U8", (2, 8), "codes"), Part(f"{module}.weight_scale", "U8", (2, 1), "scales"))
    return Unit(module, "quantize", sources, (Output(parts[0], at, at + 16), Output(parts[1], at + 16, at + 18)), group)


NORM = Copy("a", 200, Output(Part("norm", "F32", (3,), "values"), 100, 112))
FIRST = Shard("a", b"header a", 152, (NORM,), (unit("q", 0, 112, source("a", 8, 2, 16)), unit("o", -1, 130)))
SECOND = Shard("b", b"header b", 118, (), (unit("k", 0, 100, source("b", 8, 2, 16), source("c", 8, 2, 16)),))
PLAN = Plan(
    source=Path("model"),
    files=(SourceFile("a", 1000, 1, "aa"), SourceFile("b", 500, 2, "bb"), SourceFile("c", 7, 3, "cc")),
    side_files=("tokenizer.json",),
    format=get_format("nvfp4"),
    contract=get_contract("modelopt", get_format("nvfp4")),
    method="amax",
    repairs=True,
    layout="modelopt",
    activations="none",
    shards=(FIRST, SECOND),
    groups=(("q", "k"), ("o",)),
    kept={"head": "output head"},
    dropped={"old": "no use"},
    left_out={"x.gguf": "another form"},
    notes=("a note",),
    json_files={"config.json": {"a": 1, "b": 2}},
)
SMOOTHING = Smoothing((Link("norm", ("q",), True, np.ones(3, np.int8)),))
CALIBRATED = Calibrated(Path("stats"), "gptq", Gptq(), "digest", 5, {"q": ("q",)}, {"k": "no token reached it"})
SOLVED = Solved(Path("solved"), "gptq", "digest", {"q": ("q",)})


def test_what_options_are_by_default() -> None:
    """What these say without a word decides bytes, or what code is run."""
    given = {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}
    assert given.pop("rules") == Rules(False, (), (), 0, 0)
    assert given == {
        "to": "nvfp4", "layout": "modelopt", "method": None, "contract": None, "activations": None, "ignore": (),
        "modules_from_model": False, "trust_remote_code": False, "statistics": None, "strict_statistics": False,
        "solved": None, "smoothing": None,
    }  # fmt: skip


def test_an_empty_name_to_ignore_is_refused() -> None:
    assert Options(ignore=("a", "b")).ignore == ("a", "b")
    message = "--ignore needs a name; an empty one would exclude every module in some readers"
    with pytest.raises(InputError) as caught:
        Options(ignore=("a", ""))
    assert str(caught.value) == message


def test_what_a_plan_counts() -> None:
    assert [one.module for one in PLAN.units] == ["q", "o", "k"]
    assert [one.source_bytes for one in PLAN.units] == [64, 0, 128]
    assert (PLAN.source_bytes, PLAN.output_bytes) == (1507, 270)
    assert PLAN.shared == [("q", "k")]
    assert NORM.output.bytes == 12
    assert [output.part.name for output in FIRST.outputs] == [
        "norm", "q.weight", "q.weight_scale", "o.weight", "o.weight_scale"
    ]  # fmt: skip


def test_outputs_come_in_the_order_of_the_file() -> None:
    """Empty ones, which share a place with the next, before it; those of one place by name."""
    spots = [("c", 4, 8), ("b", 4, 4), ("a", 4, 4), ("d", 0, 4)]
    outputs = [Output(Part(name, "U8", (stop - start,), "values"), start, stop) for name, start, stop in spots]
    shard = Shard("s", b"", 8, tuple(Copy("f", 0, output) for output in outputs), ())
    assert [output.part.name for output in shard.outputs] == ["d", "a", "b", "c"]


def test_the_method_of_calibrated_modules_in_words() -> None:
    assert str(CALIBRATED) == str(Gptq())
    assert str(replace(CALIBRATED, kind="hessian")) == "Hessian"
    assert str(replace(CALIBRATED, kind="hessian", codes="descent")) == "Hessian(codes='descent')"


OTHER = PLAN.contract and replace(PLAN.contract, name="other")


def with_unit(plan: Plan, shard: int, number: int, **changes: Any) -> Plan:
    """The plan with another unit in place of one."""
    units = list(plan.shards[shard].units)
    units[number] = replace(units[number], **changes)
    return with_shard(plan, shard, units=tuple(units))


def with_shard(plan: Plan, number: int, **changes: Any) -> Plan:
    shards = list(plan.shards)
    shards[number] = replace(shards[number], **changes)
    return replace(plan, shards=tuple(shards))


def with_file(plan: Plan, number: int, **changes: Any) -> Plan:
    files = list(plan.files)
    files[number] = replace(files[number], **changes)
    return replace(plan, files=tuple(files))


CHANGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    # change → what gets another fingerprint: the whole, the first shard, the second
    "nothing": (lambda plan: plan, "---"),
    "where the source is": (lambda plan: replace(plan, source=Path("other")), "---"),
    "the order of keys": (lambda plan: replace(plan, json_files={"config.json": {"b": 2, "a": 1}}), "---"),
    "notes": (lambda plan: replace(plan, notes=()), "---"),
    "JSON": (lambda plan: replace(plan, json_files={"config.json": {"a": 1, "b": 3}}), "x--"),
    "side files": (lambda plan: replace(plan, side_files=()), "x--"),
    "format": (lambda plan: replace(plan, format=get_format("mxfp4")), "xxx"),
    "no format": (lambda plan: replace(plan, format=None), "xxx"),
    "contract": (lambda plan: replace(plan, contract=OTHER), "xxx"),
    "no contract": (lambda plan: replace(plan, contract=None), "xxx"),
    "method": (lambda plan: replace(plan, method="optimal"), "xxx"),
    "layout": (lambda plan: replace(plan, layout="gpt-oss"), "xxx"),
    "activations": (lambda plan: replace(plan, activations="unit"), "xxx"),
    "repairs": (lambda plan: replace(plan, repairs=False), "-xx"),
    "calibrated": (lambda plan: replace(plan, calibrated=CALIBRATED), "xxx"),
    "solved": (lambda plan: replace(plan, solved=SOLVED), "xxx"),
    "smoothed": (lambda plan: replace(plan, smoothing=SMOOTHING), "xxx"),
    "a header of the source": (lambda plan: with_file(plan, 0, header="ab"), "xxx"),
    "a file that the first shard has only by its group": (lambda plan: with_file(plan, 2, size=8), "xxx"),
    "when a file was changed": (lambda plan: with_file(plan, 1, modified=9), "-xx"),
    "a shard's name": (lambda plan: with_shard(plan, 0, name="z"), "xx-"),
    "a shard's header": (lambda plan: with_shard(plan, 0, header=b"header z"), "xx-"),
    "what is copied": (lambda plan: with_shard(plan, 0, copies=(replace(NORM, offset=300),)), "-x-"),
    "an input scale": (lambda plan: with_unit(plan, 1, 0, input_scale=1.0), "x-x"),
    "an act": (lambda plan: with_unit(plan, 0, 0, action="cast"), "-xx"),
    "an act of no group": (lambda plan: with_unit(plan, 0, 1, action="cast"), "-x-"),
    "where outputs lie": (lambda plan: with_unit(plan, 0, 1, outputs=()), "-x-"),
    "a source of the group": (lambda plan: with_unit(plan, 1, 0, sources=(source("b", 9, 2, 16),)), "-xx"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_fingerprints_depend_on(name: str) -> None:
    change, wanted = CHANGES[name]
    before, after = PLAN, change(PLAN)
    same = [
        before.fingerprint == after.fingerprint,
        *(before.shard_fingerprint(before.shards[i]) == after.shard_fingerprint(after.shards[i]) for i in range(2)),
    ]
    assert "".join("-" if one else "x" for one in same) == wanted


def test_when_statistics_were_changed_counts_for_shards() -> None:
    before = replace(PLAN, calibrated=CALIBRATED)
    after = replace(PLAN, calibrated=replace(CALIBRATED, modified=6))
    assert before.fingerprint == after.fingerprint
    assert before.shard_fingerprint(FIRST) != after.shard_fingerprint(FIRST)


def test_units_of_no_group_share_nothing() -> None:
    """The group -1 is no group: what one of them is made of does not change the shard of another."""
    alone = with_unit(PLAN, 1, 0, group=-1)
    other = with_unit(alone, 1, 0, sources=())
    assert alone.shard_fingerprint(alone.shards[0]) == other.shard_fingerprint(other.shards[0])


def test_the_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals and manifests hold it: it changes when they do."""
    assert types.VERSION == 1
    whole, shard = PLAN.fingerprint, PLAN.shard_fingerprint(FIRST)
    monkeypatch.setattr(types, "VERSION", 2)
    assert replace(PLAN).fingerprint != whole
    assert PLAN.shard_fingerprint(FIRST) != shard


def test_choices_in_words() -> None:
    own = {
        "to": "nvfp4", "layout": "modelopt", "contract": repr(PLAN.contract), "method": "amax", "activations": "none"
    }  # fmt: skip
    assert PLAN.choices == own
    assert replace(PLAN, method=None).choices == own | {"method": ""}
    assert replace(PLAN, format=None, contract=None).choices == own | {"to": "bf16", "contract": ""}
    gptq = {"method": str(Gptq()), "statistics": "digest"}
    assert replace(PLAN, calibrated=CALIBRATED).choices == own | gptq
    assert replace(PLAN, solved=SOLVED).choices == own | {"method": "gptq", "solved": "digest"}
    assert replace(PLAN, smoothing=SMOOTHING).choices == own | {"smoothing": SMOOTHING.digest}
    on_gpu = replace(PLAN, calibrated=replace(CALIBRATED, device="H200"))
    assert on_gpu.choices == own | gptq | {"device": "H200"}
    by_gpu = replace(PLAN, solved=replace(SOLVED, device="H200"))
    assert by_gpu.choices == own | {"method": "gptq", "solved": "digest", "device": "H200"}


def test_a_plan_as_json() -> None:
    def tensor(name: str, dtype: str, shape: list[int], offsets: list[int], act: str) -> dict[str, object]:
        return {"name": name, "dtype": dtype, "shape": shape, "offsets": offsets, "act": act}

    wanted = {
        "version": 1,
        "source": "model",
        "files": [
            {"name": "a", "size": 1000, "modified": 1, "header": "aa"},
            {"name": "b", "size": 500, "modified": 2, "header": "bb"},
            {"name": "c", "size": 7, "modified": 3, "header": "cc"},
        ],
        "side_files": ["tokenizer.json"],
        **PLAN.choices,
        "fingerprint": PLAN.fingerprint,
        "source_bytes": 1507,
        "output_bytes": 270,
        "shards": [
            {
                "name": "a",
                "bytes": 152,
                "tensors": [
                    tensor("norm", "F32", [3], [100, 112], "copy"),
                    tensor("q.weight", "U8", [2, 8], [112, 128], "quantize"),
                    tensor("q.weight_scale", "U8", [2, 1], [128, 130], "quantize"),
                    tensor("o.weight", "U8", [2, 8], [130, 146], "quantize"),
                    tensor("o.weight_scale", "U8", [2, 1], [146, 148], "quantize"),
                ],
            },
            {
                "name": "b",
                "bytes": 118,
                "tensors": [
                    tensor("k.weight", "U8", [2, 8], [100, 116], "quantize"),
                    tensor("k.weight_scale", "U8", [2, 1], [116, 118], "quantize"),
                ],
            },
        ],
        "shared_scales": [["q", "k"]],
        "kept": {"head": "output head"},
        "dropped": {"old": "no use"},
        "left_out": {"x.gguf": "another form"},
        "notes": ["a note"],
    }
    assert json.loads(json.dumps(PLAN.as_json())) == wanted
    calibrated = replace(PLAN, calibrated=CALIBRATED).as_json()
    assert calibrated["without_statistics"] == {"k": "no token reached it"}
    assert set(calibrated) - set(wanted) == {"without_statistics", "statistics"}


def test_factors_are_none_by_default() -> None:
    assert Factors() == Factors(b"", b"")


def test_wide_elements_come_first() -> None:
    """Every tensor starts at a multiple of its element; among equals the order stays."""
    dtypes = (
        "U8", "I8", "BOOL", "F8_E4M3", "F16", "BF16", "I16", "U16", "F32", "I32", "U32", "F64", "I64", "U64", "C64"
    )  # fmt: skip
    parts = [Part(dtype.lower(), dtype, (3,), "values") for dtype in dtypes]
    header, placed, size = place(parts, {"format": "pt"})
    begin = len(header)
    assert (begin % 8, size - begin) == (0, 4 * 3 + 4 * 6 + 3 * 12 + 4 * 24)
    assert [(name, output.start - begin, output.stop - begin) for name, output in placed.items()] == [
        ("f64", 0, 24), ("i64", 24, 48), ("u64", 48, 72), ("c64", 72, 96), ("f32", 96, 108), ("i32", 108, 120),
        ("u32", 120, 132), ("f16", 132, 138), ("bf16", 138, 144), ("i16", 144, 150), ("u16", 150, 156),
        ("u8", 156, 159), ("i8", 159, 162), ("bool", 162, 165), ("f8_e4m3", 165, 168),
    ]  # fmt: skip
    groups = ("f64 i64 u64 c64", "f32 i32 u32", "f16 bf16 i16 u16", "u8 i8 bool f8_e4m3")
    backwards = [name for group in groups for name in reversed(group.split())]
    assert list(place(parts[::-1], {})[1]) == backwards
    described = json.loads(header[8:])
    assert described.pop("__metadata__") == {"format": "pt"}
    assert {name: tuple(entry["data_offsets"]) for name, entry in described.items()} == {
        name: (output.start - begin, output.stop - begin) for name, output in placed.items()
    }
