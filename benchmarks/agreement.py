"""How often the fast error of 4over6 picks the same scale as the strict error: TransformerEngine's study, on a GPU.

    python -m benchmarks.agreement

It prints the share of equal E4M3 scale bytes on normal data of 98304 x 7168, for tensor and row scaling, 1-D blocks and
16x16 tiles, E4M3 maximum 448 and 256, bfloat16 and float16, MAE and MSE. The data are torch's for a fixed seed on the
card. Exit status 1: some share is 99.9 % or less.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch

import halfbyte as hb
from halfbyte.contracts.spec import Scaling
from halfbyte.methods.four_six import BlockError

ROWS, WIDTH = 98304, 7168
SEED = 0
WANTED = 0.999
WAYS: tuple[tuple[tuple[int, int], Scaling], ...] = (((1, 16), "tensor"), ((16, 16), "tensor"), ((1, 16), "row"))
ERRORS: tuple[BlockError, ...] = ("mae", "mse")


def share(x: torch.Tensor, error: BlockError, top: int, tile: tuple[int, int], scaling: Scaling) -> float:
    """Share of blocks for which both errors choose the same scale byte."""
    strict, fast = (
        hb.quantize(x, "nvfp4", method=hb.FourSix(error, top, quick), tile=tile, scaling=scaling, backend="gpu")
        for quick in (False, True)
    )
    equal = strict.scales == fast.scales
    if not isinstance(equal, torch.Tensor):
        raise TypeError("tensors on a card give tensors")
    return float(equal.double().mean())


def main() -> int:
    rows, width = (int(value) for value in sys.argv[1].split("x")) if len(sys.argv) > 1 else (ROWS, WIDTH)
    lines, shares = [], []
    for dtype in (torch.bfloat16, torch.float16):
        generator = torch.Generator("cuda").manual_seed(SEED)
        x = torch.empty(rows, width, dtype=dtype, device="cuda")
        for start in range(0, rows, 16384):
            x[start : start + 16384].normal_(generator=generator)
        for (tile, scaling), top, error in itertools.product(WAYS, (448, 256), ERRORS):
            found = share(x, error, top, tile, scaling)
            shares.append(found)
            name = str(dtype).removeprefix("torch.")
            lines.append({"dtype": name, "tile": tile, "scaling": scaling, "top": top, "error": error, "share": found})
            print(f"{name:>9} {scaling:>7} {tile[0]:>2}x16 {top} {error.upper()} {found:.5%}", flush=True)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(lines, indent=1))
    return 0 if min(shares) > WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
