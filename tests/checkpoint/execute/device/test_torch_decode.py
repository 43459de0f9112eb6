"""Encoded rows decoded by torch have the bits of the CPU's decoder, wherever the rows are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.checkpoint import Options, make_plan
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import decode_rows, read_row_scales, read_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import read_rows
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.card import convert_checks
from tests.checkpoint.test_sources import DOWN, SCALES, fp8
from tests.checkpoint.toy import write_checkpoint

torch = pytest.importorskip("torch")


def check(source: Path, options: Options) -> int:
    """Decode every source in ranges of rows, both ways. Returns how many were compared."""
    from halfbyte.checkpoint.execute.device.torch_decode import decode

    plan = make_plan(source, options)
    files = Files({file.name: str(plan.source / file.name) for file in plan.files})
    compared = 0
    for unit in plan.units:
        for matrix in unit.sources:
            scales = read_scales(files, matrix)
            for start, stop in ((0, matrix.rows), (0, 1), (3, 130), (127, 129), (100, matrix.rows)):
                arena = Arena(1 << 25)
                raw = read_rows(files, matrix.weight, start, stop, arena)
                expected = decode_rows(matrix, raw, start, scales, arena, files)
                rows = read_row_scales(files, matrix, start, stop, scales, arena)
                out = torch.full((stop - start, matrix.columns), 7.0, dtype=torch.float32)
                flat = torch.from_numpy(raw.reshape(-1)), torch.from_numpy(rows.array.reshape(-1).view(np.uint8))
                decode(matrix, *flat, rows, out)
                assert_same_bits(out.numpy(), expected)
                compared += 1
    files.close()
    return compared


@pytest.mark.parametrize("kind", SCALES)
def test_fp8(tmp_path: Path, kind: str) -> None:
    """All grids of scales, with partial blocks at both edges."""
    suffix, scale, _ = SCALES[kind]
    tensors: dict[str, npt.NDArray[np.generic]] = {f"{DOWN}.weight": fp8(0, 200, 272), f"{DOWN}.{suffix}": scale}
    source = write_checkpoint(tmp_path / "s", tensors, {"quantization_config": {"quant_method": "fp8"}})
    assert check(source, Options()) == 5


@pytest.mark.parametrize(("kind", "to"), [("int4", "nvfp4"), ("nvfp4", "mxfp4"), ("fp8 tensor", "nvfp4")])
def test_other_kinds(tmp_path: Path, kind: str, to: str) -> None:
    make, config = convert_checks.SOURCES[kind]
    convert_checks.write(tmp_path / "s", make(), config)
    assert check(tmp_path / "s", Options(to=to, layout="compressed-tensors")) == 15
