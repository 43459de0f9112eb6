"""Windows of tokens from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.calibration.tokens import read_windows
from halfbyte.errors import InputError


def write(path: Path, count: int = 25) -> Path:
    tokens = np.arange(count)
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.astype(f"<u{int(path.suffix[2:]) // 8}").tobytes())
    return path


@pytest.mark.parametrize("suffix", [".npy", ".u16", ".u32"])
def test_files_of_tokens(tmp_path: Path, suffix: str) -> None:
    found = read_windows(tmp_path, tokens=write(tmp_path / f"t{suffix}"), length=8, skip=2)
    assert found.tokens.tolist() == [list(range(2, 10)), list(range(10, 18))]
    assert read_windows(tmp_path, tokens=tmp_path / f"t{suffix}", length=8, windows=1).tokens.shape == (1, 8)


def test_a_text_is_cut_by_the_models_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("a b a b b c")
    found = read_windows(tmp_path, tmp_path / "text", length=3)
    assert found.tokens.tolist() == [[0, 1, 0], [1, 1, 2]]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npy")
    with pytest.raises(InputError, match="either --text or --tokens"):
        read_windows(tmp_path)
    with pytest.raises(InputError, match=r"25 tokens, 20 of them skipped: not one window of 8"):
        read_windows(tmp_path, tokens=path, length=8, skip=20)
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        read_windows(tmp_path, path)
    with pytest.raises(InputError, match="cannot be read"):
        read_windows(tmp_path, tokens=tmp_path / "none.npy")
    (tmp_path / "odd.u32").write_bytes(b"12345")
    with pytest.raises(InputError, match="5 bytes are no whole number of u32 tokens"):
        read_windows(tmp_path, tokens=tmp_path / "odd.u32")
    np.save(tmp_path / "f.npy", np.zeros(9))
    with pytest.raises(InputError, match="tokens must be integers, not float64"):
        read_windows(tmp_path, tokens=tmp_path / "f.npy")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some words")
    with pytest.raises(InputError, match="nowhere is not there, or is no directory"):
        read_windows(tmp_path / "nowhere", text=tmp_path / "text")
