"""Errors of rounding as a GPU sums them, by Triton's interpreter, beside those of the CPU. A program of its own: it
needs TRITON_INTERPRET=1 before Triton is imported."""

from __future__ import annotations

import numpy as np

from halfbyte.calibration.rounding_errors import DeviceErrors, HostErrors
from halfbyte.contracts import get_contract
from halfbyte.formats import get_format
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.strict_interpreter import set_up


def main() -> None:
    rng = np.random.default_rng(0)
    for name, contract, rows, width in (("nvfp4", "modelopt", 37, 48), ("mxfp4", "ocp", 16, 64)):
        format = get_format(name)
        values = (rng.standard_normal((rows, width)) * np.exp(2 * rng.standard_normal(width))).astype(np.float32)
        largest = np.abs(values).max(axis=0)
        for weights in (None, np.exp(rng.standard_normal((rows, 1)))):
            host = HostErrors(values, largest, weights, format, get_contract(contract, format))
            device = DeviceErrors(host, "cpu")
            for _ in range(2):
                exponents = rng.integers(-8, 9, width).astype(np.int8)
                assert_same_bits(device(exponents), host(exponents))
    print("the same bits")


if __name__ == "__main__":
    set_up()
    main()
