"""Folders of statistics: what is written is read, and what cannot be statistics is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfbyte.errors import InputError
from halfbyte.statistics import LinearStatistics, merge_statistics, open_statistics, write_header, write_statistics
from halfbyte.testing import assert_same_bits

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def statistics(seed: int, tokens: int = 100, width: int = 32) -> LinearStatistics:
    x = np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)
    moment = (x.T @ x / tokens).astype(np.float32)
    return LinearStatistics(tokens, width, float(np.abs(x).max()), 2.5, moment, cross_moment=moment * np.float32(0.125))


def folder(path: Path, seed: int, tokens: int = 100, model: str = "m") -> Path:
    one = statistics(seed, tokens)
    write_statistics(path / "layer-00000.safetensors", {Q: one, K: one}, {K: Q})
    write_statistics(path / "layer-00001.safetensors", {"model.layers.1.mlp.up_proj": statistics(seed + 50, tokens)})
    write_header(path, {"model": {"fingerprint": model}})
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = open_statistics(folder(tmp_path / "a", 1))
    assert found.names == [Q, K, "model.layers.1.mlp.up_proj"]
    wanted, read = statistics(1), found.get(K, 32)
    assert read is not None
    assert wanted.second_moment is not None
    assert read.second_moment is not None
    assert_same_bits(read.second_moment, wanted.second_moment)
    assert (read.tokens, read.width, read.input_amax, read.input_range) == (100, 32, wanted.input_amax, 2.5)
    assert (read.blocks, read.diagonal) == (None, None)
    assert found.get("lm_head") is None
    assert found.header["model"] == {"fingerprint": "m"}


def test_a_shared_input_is_stored_once(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(folder(tmp_path / "a", 1) / "layer-00000.safetensors")
    assert sorted(tensors) == [f"{Q}.cross_moment", f"{Q}.second_moment"]


def test_blocks_and_diagonal_are_parts_of_the_whole() -> None:
    full = statistics(3)
    blocks, diagonal = full.block_moments(), full.mean_squares()
    assert blocks is not None
    assert diagonal is not None
    assert full.second_moment is not None
    assert_same_bits(blocks[1], np.ascontiguousarray(full.second_moment[16:, 16:]))
    assert_same_bits(diagonal, np.ascontiguousarray(np.diagonal(full.second_moment)))
    of_blocks = LinearStatistics(5, 32, 0.0, blocks=blocks).mean_squares()
    assert of_blocks is not None
    assert_same_bits(of_blocks, diagonal)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"second_moment": np.full((32, 32), np.nan, np.float32)}, "holds 1024 NaN or Inf"),
        ({"second_moment": np.zeros((32, 16), np.float32)}, "32 inputs need float32 of shape"),
        ({"diagonal": np.zeros(32)}, "diagonal is float64"),
        ({"diagonal": np.full(32, -1, np.float32)}, "a mean of squares is negative"),
        ({"input_amax": float("nan")}, "input_amax is nan"),
        ({"input_range": float("inf")}, "input_range is inf"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    bad = replace(statistics(1), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said):
        write_statistics(tmp_path / "a.safetensors", {Q: bad})
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_width_is_refused(tmp_path: Path) -> None:
    found = open_statistics(folder(tmp_path / "a", 1))
    with pytest.raises(InputError, match="those of 32 inputs, but its weight has 64; they belong to another model"):
        found.get(Q, 64)


def test_what_is_no_folder_of_statistics_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(InputError, match="is not there; `halfbyte calibrate"):
        open_statistics(tmp_path / "none")
    with pytest.raises(InputError, match="no safetensors file"):
        open_statistics(tmp_path)
    save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="is no file of statistics"):
        open_statistics(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        open_statistics(tmp_path)


def test_a_module_in_two_files_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", 1)
    write_statistics(path / "more.safetensors", {Q: statistics(2)})
    with pytest.raises(InputError, match=r"q_proj is in both layer-00000.safetensors and more.safetensors"):
        open_statistics(path)


def test_merged_means_are_weighted_by_tokens(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", 1, tokens=100), folder(tmp_path / "b", 2, tokens=300)
    merged = merge_statistics([a, b], tmp_path / "c").get(K)
    one, two = statistics(1, 100), statistics(2, 300)
    assert merged is not None
    assert (merged.tokens, merged.input_amax) == (400, max(one.input_amax, two.input_amax))
    assert one.second_moment is not None
    assert two.second_moment is not None
    assert merged.second_moment is not None
    mean = (100.0 * one.second_moment.astype(np.float64) + 300.0 * two.second_moment.astype(np.float64)) / 400
    assert_same_bits(merged.second_moment, mean.astype(np.float32))


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("full", "blocks", "blocks"), ("full", "diagonal", "diagonal"), ("blocks", "diagonal", "diagonal")],
)
def test_of_different_second_moments_what_all_know_is_merged(
    tmp_path: Path, first: str, second: str, kept: str
) -> None:
    """Runs with other --moments, an imatrix, or an expert that saw few tokens in one of the runs."""
    runs = {"a": (1, 100, first), "b": (2, 300, second)}
    for name, (seed, tokens, moments) in runs.items():
        one = statistics(seed, tokens)
        given = LinearStatistics(
            tokens,
            one.width,
            one.input_amax,
            second_moment=one.second_moment if moments == "full" else None,
            blocks=one.block_moments() if moments == "blocks" else None,
            diagonal=one.mean_squares() if moments == "diagonal" else None,
        )
        write_statistics(tmp_path / name / "x.safetensors", {K: given})
    merged = merge_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    whole = merge_statistics([folder(tmp_path / "d", 1, 100), folder(tmp_path / "e", 2, 300)], tmp_path / "f").get(K)
    found = merged.get(K)
    assert found is not None
    assert whole is not None
    assert merged.holds(K) == {kept}
    wanted = whole.block_moments() if kept == "blocks" else whole.mean_squares()
    assert wanted is not None
    assert_same_bits(getattr(found, kept), wanted)


def test_merging_gives_the_same_bytes_again(tmp_path: Path) -> None:
    parts = [folder(tmp_path / "a", 1), folder(tmp_path / "b", 2)]
    for name in ("c", "d"):
        merge_statistics(parts, tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "c").iterdir())
    assert files == ["merged-00000.safetensors", "statistics.json"]
    for file in files:
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()


def test_a_module_of_one_run_stays(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", 1), tmp_path / "b"
    write_statistics(b / "x.safetensors", {"lm_head": statistics(9)})
    merged = merge_statistics([a, b], tmp_path / "c")
    assert merged.names[-1] == "lm_head"
    assert merged.stored_as(K) == Q


def test_different_models_are_not_merged(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", 1), folder(tmp_path / "b", 2, model="other")
    with pytest.raises(InputError, match="of 2 different models"):
        merge_statistics([a, b], tmp_path / "c")
    with pytest.raises(InputError, match="is not empty"):
        merge_statistics([a], b)
