"""How often the fast error of 4over6 picks the same scale as the strict error: TransformerEngine's study.

    python -m benchmarks.agreement [--seed 0] [--shape 98304x7168] [--device cpu]

It prints the share of equal E4M3 scale bytes on normal data, for tensor and row scaling, 1-D blocks and 16x16 tiles,
E4M3 maximum 448 and 256, bfloat16 and float16, MAE and MSE. The data are torch's on the CPU for the seed, and every
backend gives the same bits, so the device should not change a share. Exit status 1: some share is 99.9 % or less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

import halfbyte as hb
from halfbyte.contracts.spec import Scaling
from halfbyte.methods.four_six import BlockError

SHAPE = "98304x7168"
SEED = 0
WANTED = 0.999
WAYS: tuple[tuple[tuple[int, int], Scaling], ...] = (((1, 16), "tensor"), ((16, 16), "tensor"), ((1, 16), "row"))
ERRORS: tuple[BlockError, ...] = ("mae", "mse")


def data(rows: int, width: int, dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    """Normal numbers of torch's CPU generator, on a device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(rows, width, dtype=dtype, device=device)
    for start in range(0, rows, 4096):
        size = (min(4096, rows - start), width)
        x[start : start + 4096] = torch.empty(size, dtype=dtype).normal_(generator=generator)
    return x


def share(x: torch.Tensor, error: BlockError, top: int, tile: tuple[int, int], scaling: Scaling) -> float:
    """Share of blocks for which both errors choose the same scale byte."""
    strict, fast = (
        hb.quantize(x, "nvfp4", method=hb.FourSix(error, top, quick), tile=tile, scaling=scaling).scales
        for quick in (False, True)
    )
    if not isinstance(strict, torch.Tensor) or not isinstance(fast, torch.Tensor):
        raise TypeError("a tensor gives tensors")
    return int((strict == fast).sum()) / strict.numel()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of torch's CPU generator")
    parser.add_argument("--shape", default=SHAPE, help="rows x columns")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="write the shares here")
    options = parser.parse_args(arguments)
    rows, width = (int(value) for value in options.shape.split("x"))
    print(f"seed {options.seed}, normal data of {rows} x {width}, torch {torch.__version__}, on {options.device}")
    lines, shares = [], []
    for dtype in (torch.bfloat16, torch.float16):
        x = data(rows, width, dtype, options.seed, options.device)
        for (tile, scaling), top, error in itertools.product(WAYS, (448, 256), ERRORS):
            found = share(x, error, top, tile, scaling)
            shares.append(found)
            name = str(dtype).removeprefix("torch.")
            lines.append({"dtype": name, "tile": tile, "scaling": scaling, "top": top, "error": error, "share": found})
            print(f"{name:>9} {scaling:>7} {tile[0]:>2}x16 {top} {error.upper()} {found:.5%}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"seed": options.seed, "shape": [rows, width], "shares": lines}, indent=1))
    return 0 if min(shares) > WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
