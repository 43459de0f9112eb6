"""Checkpoints by GPTQ: nothing is reported of intact ones, with or without a manifest, and damage is."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.header import read_header
from halfbyte.statistics import LinearStatistics, write_statistics
from halfbyte.verify import verify
from tests.checkpoint.toy import llama, write_checkpoint

WEIGHT = "model.layers.1.mlp.down_proj"
ROWS, WIDTH = 128, 256
RESOURCES = Resources(workers=1, max_memory=1 << 28, sync=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its conversion. Some inputs hardly count, and their weights are large: scales clip them, and errors
    of theirs are passed on."""
    folder = tmp_path_factory.mktemp("gptq")
    tensors = llama(hidden=ROWS, inner=WIDTH)
    generator = np.random.default_rng(4)
    known = {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or ".layers." not in name:
            continue
        width = weight.shape[1]
        sizes = np.exp(generator.standard_normal(width))
        sizes[::29] = 1e-3
        larger = weight.astype(np.float32)
        larger[::3, ::29] *= 8
        tensors[name] = larger.astype(ml_dtypes.bfloat16)
        x = generator.standard_normal((2 * width, width)) @ generator.standard_normal((width, width)) * sizes
        moment = (x.T @ x / len(x)).astype(np.float32)
        known[name.removesuffix(".weight")] = LinearStatistics(
            len(x), width, 1.0, second_moment=(moment + moment.T) / 2
        )
    write_statistics(folder / "stats" / "a.safetensors", known)
    source = write_checkpoint(folder / "source", tensors)
    run(make_plan(source, Options(method="gptq", statistics=folder / "stats")), folder / "made", RESOURCES)
    return folder / "made", source


def changed(made: Path, folder: Path, manifest: bool = False) -> Path:
    """A copy, without its manifest."""
    folder.mkdir()
    for file in made.iterdir():
        if manifest or file.name != "halfbyte.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def part(folder: Path, name: str) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of a tensor, to be changed in place."""
    for file in folder.glob("*.safetensors"):
        tensors = read_header(file).tensors
        if name in tensors:
            info = tensors[name]
            rows = info.shape[0] if len(info.shape) > 1 else 1
            return np.memmap(file, np.uint8, "r+", info.start, (rows, info.bytes // rows))
    raise KeyError(name)


def told(path: Path, source: Path) -> list[tuple[str, str, str]]:
    found = verify(path, source).problems
    return [(problem.rule, problem.name, problem.text) for problem in found if problem.level == "error"]


@pytest.mark.parametrize("manifest", [True, False])
def test_an_intact_checkpoint_has_no_problems(made: tuple[Path, Path], tmp_path: Path, manifest: bool) -> None:
    report = verify(changed(made[0], tmp_path / "c", manifest), made[1])
    assert [problem.text for problem in report.problems if problem.level == "error"] == []
    (said,) = [problem.text for problem in report.problems if problem.rule == "rounding"]
    assert "most rows have codes that are not the nearest to the source (and 13 more weights)" in said


def test_a_zeroed_row(made: tuple[Path, Path], tmp_path: Path) -> None:
    path = changed(made[0], tmp_path / "c")
    part(path, f"{WEIGHT}.weight")[17] = 0
    assert told(path, made[1]) == [("row", WEIGHT, "row 17: relative error 1; it decodes to 0")]


def test_swapped_rows(made: tuple[Path, Path], tmp_path: Path) -> None:
    path = changed(made[0], tmp_path / "c")
    for name in (f"{WEIGHT}.weight", f"{WEIGHT}.weight_scale"):
        rows = part(path, name)
        rows[[5, 41]] = rows[[41, 5]]
    first, second = told(path, made[1])
    assert first[:2] == second[:2] == ("row", WEIGHT)
    assert first[2].startswith("row 5: ")
    assert first[2].endswith("it holds the values of row 41 of the source")
    assert second[2].endswith("it holds the values of row 5 of the source")


@pytest.mark.parametrize("factor", [0.93, 1.07])
def test_a_tensor_scale_that_is_off(made: tuple[Path, Path], tmp_path: Path, factor: float) -> None:
    path = changed(made[0], tmp_path / "c")
    part(path, f"{WEIGHT}.weight_scale_2").reshape(-1).view(np.float32)[:] *= np.float32(factor)
    ((rule, name, text),) = told(path, made[1])
    assert (rule, name) == ("values", WEIGHT)
    assert "the tensor scale is off by" in text


def test_a_scale_with_a_flipped_exponent(made: tuple[Path, Path], tmp_path: Path) -> None:
    path = changed(made[0], tmp_path / "c")
    part(path, f"{WEIGHT}.weight_scale")[20, 3] ^= 64
    assert told(path, made[1]) == []
    (problem,) = [problem for problem in verify(path, made[1]).problems if problem.name == WEIGHT]
    assert (problem.level, problem.rule) == ("warning", "block")
    assert problem.text.startswith("row 20, columns 48 to 63: off by ")


def test_any_flipped_bit_with_a_manifest(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing but the hash tells it."""
    path = changed(made[0], tmp_path / "c", manifest=True)
    part(path, f"{WEIGHT}.weight")[20, 3] ^= 1
    ((rule, name, _),) = told(path, made[1])
    assert (rule, name) == ("manifest", f"{WEIGHT}.weight")
