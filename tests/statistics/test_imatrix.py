"""llama.cpp's imatrix files, both formats, as diagonals."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from halfbyte.errors import InputError
from halfbyte.statistics import merge_statistics, open_statistics
from halfbyte.testing import assert_same_bits


def old_file(path: Path, entries: dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]], calls: int) -> Path:
    data = struct.pack("<i", len(entries))
    for name, means in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(means))
        data += (means * calls).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", calls, 4) + b"text")
    return path


MEANS = np.arange(1, 33, dtype=np.float32)


def test_the_old_format(tmp_path: Path) -> None:
    found = open_statistics(old_file(tmp_path / "m.dat", {"blk.1.attn_q.weight": MEANS, "blk.1.rope.weight": MEANS}, 8))
    assert found.names == ["model.layers.1.self_attn.q_proj"]
    one = found.get("model.layers.1.self_attn.q_proj", 32)
    assert one is not None
    assert one.diagonal is not None
    assert_same_bits(one.diagonal, MEANS)
    assert (one.tokens, one.second_moment) == (8, None)


def test_the_gguf_format(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "imatrix")
    sums = np.stack([MEANS * 10, MEANS * 0, MEANS * 30])
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", sums)
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.array([[10], [0], [30]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_statistics(path)
    assert found.names == [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in (0, 2)]  # 1 saw no token
    one = found.get("model.layers.0.mlp.experts.2.up_proj")
    assert one is not None
    assert one.diagonal is not None
    assert_same_bits(one.diagonal, MEANS)
    assert one.tokens == 30


def test_imatrices_merge(tmp_path: Path) -> None:
    a = old_file(tmp_path / "a.dat", {"blk.0.ffn_down.weight": MEANS}, 10)
    b = old_file(tmp_path / "b.dat", {"blk.0.ffn_down.weight": 5 * MEANS}, 30)
    one = merge_statistics([a, b], tmp_path / "c").get("model.layers.0.mlp.down_proj")
    assert one is not None
    assert one.diagonal is not None
    assert_same_bits(one.diagonal, 4 * MEANS)


@pytest.mark.parametrize("size", [0, 3, 20, 60])
def test_a_cut_file_is_refused(tmp_path: Path, size: int) -> None:
    path = old_file(tmp_path / "m.dat", {"blk.1.attn_q.weight": MEANS}, 8)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match="cut"):
        open_statistics(path)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match="not an imatrix file"):
        open_statistics(path)


def test_an_imatrix_of_no_token_says_so(tmp_path: Path) -> None:
    path = old_file(tmp_path / "m.dat", {"blk.1.attn_q.weight": MEANS}, 0)
    with pytest.raises(InputError, match="every count of its linear layers is 0"):
        open_statistics(path)
    with pytest.raises(InputError, match="no entry whose name is that of a linear layer"):
        open_statistics(old_file(path, {"blk.1.rope.weight": MEANS}, 8))
