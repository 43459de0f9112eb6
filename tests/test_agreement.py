"""The study of 4over6's two errors: its data follow from the seed, and it says which seed it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import agreement
from halfbyte.testing import assert_same_bits, find_difference


def test_the_seed_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shares.json"
    status = agreement.main(["--seed", "3", "--shape", "64x256", "--device", "cpu", "--json", str(path)])
    assert capsys.readouterr().out.startswith("seed 3, normal data of 64 x 256")
    found = json.loads(path.read_text())
    assert (found["seed"], found["shape"], len(found["shares"])) == (3, [64, 256], 24)
    assert status == int(min(row["share"] for row in found["shares"]) <= agreement.WANTED)


def test_a_seed_gives_the_same_data_again_and_another_gives_others() -> None:
    one, again, other = (agreement.data(8, 32, torch.bfloat16, seed, "cpu") for seed in (1, 1, 2))
    assert_same_bits(one, again)
    assert find_difference(one, other) is not None
