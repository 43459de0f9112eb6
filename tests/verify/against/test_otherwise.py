"""Checkpoints by GPTQ: nothing is reported of intact ones, with or without a manifest, and damage is."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.header import read_header
from halfbyte.formats import E4M3
from halfbyte.statistics import LinearStatistics, write_statistics
from halfbyte.verify import verify
from halfbyte.verify.against.measure import Measured
from halfbyte.verify.against.otherwise import distant_blocks, distant_rows, holds_its_source, is_off_by_a_factor
from halfbyte.verify.nearest import Encoded
from halfbyte.verify.problems import WeightError
from halfbyte.verify.values import Matrix
from tests.checkpoint.toy import llama, write_checkpoint
from tests.verify.matrices import matrix

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


# --- limits, on matrices of a few numbers ---


@pytest.mark.parametrize(
    ("errors", "distant"),
    [
        ([0.1, 0.1, 0.1, 0.5, 0.51], [4]),
        ([0.2, 0.2, 0.2, 0.8, 0.81], [4]),
        ([0.2, 0.2, np.nan, 0.2, np.inf], [2, 4]),
        ([0.0, 0.0, 0.5], []),
        ([np.nan, np.nan, 0.1], []),
    ],
)
def test_rows_far_from_the_median(errors: list[float], distant: list[int]) -> None:
    """More than a half, and more than four times the median."""
    found = Measured(WeightError("w", "nvfp4", (len(errors), 16), 0.1, 0.1), np.array(errors))
    assert distant_rows(found) == distant


@pytest.mark.parametrize(("times", "held"), [(0.5, False), (0.51, True), (1.49, True), (1.5, False), (-1, False)])
def test_a_row_that_holds_its_source_once(times: float, held: bool) -> None:
    source = np.array([[9, 9, 9, 9], [1, 2, 0, 2]], np.float32)
    beside = np.array([2, 0, 7, -1], np.float32)  # at right angles
    mine = matrix("w", np.stack([source[0], np.float32(times) * source[1] + beside]))
    assert holds_its_source(1, mine, matrix("w", source)) is held
    small = matrix("w", np.float32(2.0**-10) * mine.read(0, 2)), matrix("w", np.float32(2.0**-10) * source)
    assert holds_its_source(1, *small) is held
    assert not holds_its_source(1, mine, matrix("w", 0 * source))


def blocks(codes: int, rows: int = 4, columns: int = 160, scale: float = 2.0) -> tuple[Encoded, Matrix]:
    """A matrix with one code everywhere under a scale of 1 and a tensor scale."""
    bytes_ = np.full((rows, columns // 16), 0x38, np.uint8)
    packed = np.full((rows, columns // 2), codes * 17, np.uint8)
    stored = Encoded(packed, bytes_, E4M3.values[bytes_], scale, E4M3)

    def encoded(start: int, stop: int) -> Encoded:
        part = slice(start, stop)
        return Encoded(packed[part], bytes_[part], stored.scales[part], scale, E4M3)

    return stored, matrix("w", np.zeros((rows, columns)), encoded=encoded)


@pytest.mark.parametrize("chunk", [160, 320, 1 << 21])
@pytest.mark.parametrize(("steps", "told"), [(3.0, False), (3.01, True)])
def test_blocks_off_by_three_steps(monkeypatch: pytest.MonkeyPatch, steps: float, told: bool, chunk: int) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    _, mine = blocks(2)
    source = np.full((4, 160), 2, np.float32)
    source[2, 32:48] += np.float32(2 * steps)
    found = [(row, block, round(off, 3)) for row, block, off, _ in distant_blocks(mine, matrix("w", source))]
    assert found == ([(2, 2, steps)] if told else [])
    source[2, 32:48] = np.nan
    assert list(distant_blocks(mine, matrix("w", source))) == []
    assert list(distant_blocks(matrix("w", source), matrix("w", source))) == []


def test_the_source_counts_no_farther_than_codes_reach() -> None:
    """Code 3 (1.5) is 4.5 steps from anything beyond 6."""
    _, mine = blocks(3)
    source = np.full((4, 160), 3, np.float32)
    source[1, 0:16], source[3, 16:32] = 1e6, -1e6
    found = [(row, block, off) for row, block, off, _ in distant_blocks(mine, matrix("w", source))]
    assert found == [(1, 0, 4.5), (3, 1, 7.5)]


@pytest.mark.parametrize(("usual", "told"), [(0.87, True), (0.89, False)])
def test_blocks_far_from_the_rest_of_their_row(usual: float, told: bool) -> None:
    """3.5 steps are more than four times 0.87."""
    _, mine = blocks(2)
    source = np.full((4, 160), 2, np.float32)
    source[2, :96] += np.float32(2 * usual)  # six of ten blocks: the median of the row
    source[2, 144:] += 7
    assert [place[:2] for place in distant_blocks(mine, matrix("w", source))] == ([(2, 9)] if told else [])
    source[:, :] = 2
    source[:, 16:32] += np.float32(2 * usual)  # more than one in ten of the weight
    source[:2, 48:64] += np.float32(2 * usual)
    source[2, 144:] += 7
    assert [place[:2] for place in distant_blocks(mine, matrix("w", source))] == ([(2, 9)] if told else [])


@pytest.mark.parametrize(
    ("factor", "least", "off"),
    [
        (1.1, 0.09, True),
        (1.1, 0.11, False),
        (0.9, 0.09, True),
        (0.9, 0.11, False),
        (1.5, 0.5, False),
        (1.0, 0.0, False),
    ],
)
@pytest.mark.parametrize("chunk", [160, 1 << 21])
def test_the_middle_block_misses_a_factor(
    monkeypatch: pytest.MonkeyPatch, factor: float, least: float, off: bool, chunk: int
) -> None:
    """Whatever a few blocks say, and numbers that the scale clips."""
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    _, mine = blocks(4)
    source = np.full((4, 160), 4 * factor, np.float32)
    source[:, 0] = 1e3
    source[3] = 0.1
    assert is_off_by_a_factor(mine, matrix("w", source), least) is off
    assert not is_off_by_a_factor(matrix("w", source), matrix("w", source), least)


def test_both_ways_of_asking_for_a_factor_must_agree() -> None:
    """Errors beside what the codes say make one factor larger and the other smaller than 1."""
    stored, mine = blocks(4)
    source = np.full((4, 160), 4, np.float32)
    source[:, ::2] += 2
    source[:, 1::2] -= 2
    assert not is_off_by_a_factor(mine, matrix("w", source), 0.02)
    source *= np.float32(0.9)  # 0.9, and 1.25 times that
    assert not is_off_by_a_factor(mine, matrix("w", source), 0.02)
    source *= np.float32(1.2)
    assert is_off_by_a_factor(mine, matrix("w", source), 0.02)
    assert stored.block == 16


def test_numbers_that_a_scale_clips_are_left_out() -> None:
    """6 steps and more: of those, the codes tell nothing."""
    _, mine = blocks(7)
    source = np.full((4, 160), 11, np.float32)
    source[:, ::2] = 12
    assert is_off_by_a_factor(mine, matrix("w", source), 0.08)
    assert not is_off_by_a_factor(mine, matrix("w", source), 0.09)
