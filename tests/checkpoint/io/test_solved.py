"""Folders of solved weights: written, read back in parts, and refused with the whole reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from halfbyte.checkpoint.io.solved import SolvedFolder, SolvedWeight, write_solved
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import get_format

NVFP4, MXFP4 = get_format("nvfp4"), get_format("mxfp4")
CONTRACT = get_contract("modelopt", NVFP4)
CODES = np.arange(48, dtype=np.uint8).reshape(3, 16)
SCALES = np.arange(6, dtype=np.uint8).reshape(3, 2)
WEIGHT = SolvedWeight(CODES, SCALES, np.float32(2.5))
SAID = {"version": "1", "format": "nvfp4", "contract": repr(CONTRACT), "method": "gptq"}


def folder(path: Path) -> SolvedFolder:
    write_solved(path / "deep" / "er" / "a.safetensors", {"q.weight": WEIGHT}, NVFP4, CONTRACT, "gptq")
    return SolvedFolder(path / "deep" / "er")


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SolvedFolder(path)
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    solved = folder(tmp_path)
    assert solved.said == {key: SAID[key] for key in ("format", "contract", "method")}
    assert ("q.weight" in solved, "k.weight" in solved) == (True, False)
    codes, scales = solved.rows("q.weight", (3, 32), 1, 3, NVFP4)
    assert (codes.tolist(), scales.tolist()) == (CODES[1:].tolist(), SCALES[1:].tolist())
    codes, scales = solved.rows("q.weight", (3, 32), 0, 0, NVFP4)
    assert (codes.shape, scales.shape) == ((0, 16), (0, 2))
    assert solved.amax("q.weight") == np.float32(2.5)
    solved.check(NVFP4, CONTRACT)
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["a.safetensors"], "no temporary file stays"
    with safe_open(tmp_path / "deep" / "er" / "a.safetensors", "np") as opened:
        assert json.loads(opened.metadata()["halfbyte_solved"]) == SAID


def test_a_weight_needs_both_codes_and_scales(tmp_path: Path) -> None:
    save_file({"a.codes": CODES, "b.scales": SCALES}, tmp_path / "x.safetensors", {"halfbyte_solved": json.dumps(SAID)})
    solved = SolvedFolder(tmp_path)
    assert ("a" in solved, "b" in solved) == (False, False)


def test_without_a_tensor_scale_there_is_no_amax(tmp_path: Path) -> None:
    write_solved(tmp_path / "a.safetensors", {"q": SolvedWeight(CODES, SCALES, None)}, MXFP4, CONTRACT, "gptq")
    with pytest.raises(CheckpointError) as caught:
        SolvedFolder(tmp_path).amax("q")
    assert str(caught.value) == f"{tmp_path} has no q.global_amax, which a tensor scale needs"


def test_an_amax_is_one_number(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"q.global_amax": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "x.safetensors", {"halfbyte_solved": json.dumps(SAID)})
    with pytest.raises(CheckpointError) as caught:
        SolvedFolder(tmp_path).amax("q")
    assert str(caught.value) == f"{tmp_path}: q.global_amax has 2 numbers, expected one"


@pytest.mark.parametrize("shape", [(3, 64), (2, 32)])
def test_another_shape(tmp_path: Path, shape: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError) as caught:
        folder(tmp_path).rows("q.weight", shape, 0, 0, NVFP4)
    assert str(caught.value) == (
        f"{tmp_path}/deep/er: q.weight.codes is U8 of shape (3, 16); a weight of shape {shape} needs U8 of shape "
        f"{(shape[0], shape[1] // 2)}"
    )


def test_another_dtype_or_shape_of_scales(tmp_path: Path) -> None:
    for scales, is_ in ((SCALES.astype(np.int8), "I8 of shape (3, 2)"), (SCALES[:, :1], "U8 of shape (3, 1)")):
        tensors = {"q.codes": CODES, "q.scales": np.ascontiguousarray(scales)}
        save_file(tensors, tmp_path / "x.safetensors", {"halfbyte_solved": json.dumps(SAID)})
        with pytest.raises(CheckpointError) as caught:
            SolvedFolder(tmp_path).rows("q", (3, 32), 0, 3, NVFP4)
        wanted = "a weight of shape (3, 32) needs U8 of shape (3, 2)"
        assert str(caught.value) == f"{tmp_path}: q.scales is {is_}; {wanted}"


def test_another_format_or_contract(tmp_path: Path) -> None:
    solved = folder(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        solved.check(MXFP4, CONTRACT)
    assert str(caught.value) == f"{tmp_path}/deep/er: solved for format nvfp4, but this conversion has mxfp4"
    other = replace(CONTRACT, name="other")
    with pytest.raises(CheckpointError) as caught:
        solved.check(NVFP4, other)
    assert (
        str(caught.value) == f"{tmp_path}/deep/er: solved for contract {CONTRACT!r}, but this conversion has {other!r}"
    )


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path} holds no solved weights: no safetensors file is in it"
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no")
    assert refused(path) == f"{path} holds no solved weights: no safetensors file is in it"
    assert refused(tmp_path).startswith(f"{path}: cannot be read as safetensors: ")
    for metadata in ({}, {"halfbyte_solved": "{"}, {"halfbyte_solved": "[]"}, {"halfbyte_solved": '{"version": "1"}'}):
        save_file({"q.codes": CODES}, path, metadata)
        reason = "is no file of solved weights: its metadata has no usable halfbyte_solved"
        assert refused(tmp_path) == f"{path} {reason}"
    for headroom in ("x", "null", "[1,", '["a"]', "2", "[]", "[0.5]"):
        save_file({"q.codes": CODES}, path, {"halfbyte_solved": json.dumps(SAID | {"headroom": headroom})})
        assert refused(tmp_path) == f"{path} {reason}"
    save_file({"q.codes": CODES}, path, {"halfbyte_solved": json.dumps(SAID | {"version": "2"})})
    assert refused(tmp_path) == f"{path}: solved weights of version 2; this halfbyte reads version 1"


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    write_solved(tmp_path / "a.safetensors", {"q": WEIGHT}, NVFP4, CONTRACT, "gptq")
    write_solved(tmp_path / "b.safetensors", {"q": WEIGHT}, NVFP4, CONTRACT, "gptq")
    assert refused(tmp_path) == f"{tmp_path}: q.codes is in both a.safetensors and b.safetensors"
    write_solved(tmp_path / "b.safetensors", {"k": WEIGHT}, NVFP4, CONTRACT, "hessian")
    first, second = ({key: SAID[key] for key in ("format", "contract")} | {"method": m} for m in ("gptq", "hessian"))
    assert refused(tmp_path) == f"{tmp_path}: b.safetensors was solved for {second}, a.safetensors for {first}"


def test_the_digest_is_that_of_names_and_bytes(tmp_path: Path) -> None:
    for name, weight in (("a", WEIGHT), ("b", WEIGHT), ("c", WEIGHT._replace(codes=CODES + 1))):
        write_solved(tmp_path / name / "x.safetensors", {"q": weight}, NVFP4, CONTRACT, "gptq")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "y.safetensors").write_bytes((tmp_path / "a" / "x.safetensors").read_bytes())
    a, b, c, d = (SolvedFolder(tmp_path / name).digest for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
