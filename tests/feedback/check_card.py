"""Error feedback on a GPU beside the compiled kernel: codes, errors and times. `python -m tests.feedback.check_card`.

The same factor gives the same bits on both; so does a second run.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.feedback import prepare
from halfbyte.testing import assert_same_bits
from tests.feedback.problems import layer

SHAPES = ((64, 96), (200, 576), (1000, 1536))
CONTRACTS = {"nvfp4": ("transformer_engine", "modelopt", "compressed_tensors", "torchao"), "mxfp4": ("ocp", "torchao")}


def check(format: str, contract: str, rows: int, width: int, cross: bool) -> None:
    given = layer(rows=rows, width=width, tokens=2 * width, spread=0.5)
    block = hb.get_format(format).block
    factor = prepare(given.second_moment, block, cross_moment=given.cross_moment if cross else None)
    slow = hb.gptq(given.weight, factor, format, contract)
    weight = torch.from_numpy(given.weight).cuda()
    fast = hb.gptq(weight, factor, format, contract)
    again = hb.gptq(given.weight, factor, format, contract, device="cuda")
    assert isinstance(fast.codes, torch.Tensor)
    assert fast.codes.is_cuda
    assert isinstance(again.codes, np.ndarray)
    assert_same_bits(again.codes, fast.codes)
    assert_same_bits(again.scales, fast.scales)
    if slow.global_scale is not None and fast.global_scale is not None:
        assert_same_bits(fast.global_scale, slow.global_scale)
    assert_same_bits(fast.codes, torch.as_tensor(slow.codes).cuda())
    assert_same_bits(fast.scales, torch.as_tensor(slow.scales).cuda())
    errors = [given.output_error(to_numpy(hb.dequantize(q))) for q in (slow, fast)]
    print(f"{format} {contract} {rows}x{width} cross={cross}: the same bits, error {errors[0]:.6f}")
    assert errors[0] == errors[1]


def speed() -> None:
    for rows, width in ((1536, 576), (576, 1536), (4096, 4096), (14336, 4096), (4096, 14336)):
        x = torch.randn(2 * width, width, device="cuda") * torch.exp(torch.randn(width, device="cuda"))
        h = (x.T @ x / len(x)).cpu().numpy()
        began = time.perf_counter()
        factor = prepare((h + h.T) / 2, 16, device="cuda")
        prepared = time.perf_counter() - began
        weight = torch.randn(rows, width, device="cuda") * 0.02
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            hb.gptq(weight, factor, "nvfp4")
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        listed = ", ".join(f"{t:.3f}" for t in times)
        print(f"{rows}x{width}: prepare {prepared:.2f} s, solve {listed} s")


def main() -> None:
    for format, contracts in CONTRACTS.items():
        for contract in contracts:
            check(format, contract, *SHAPES[0], cross=False)
        for shape in SHAPES[1:]:
            check(format, contracts[0], *shape, cross=True)
    speed()
    print("all as they should be")


if __name__ == "__main__":
    main()
