"""Error feedback by the Triton kernels as Triton's interpreter runs them on the CPU. A program of its own: it needs
TRITON_INTERPRET=1 before Triton is imported. Raises unless codes and scales are those of the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import halfbyte as hb
from halfbyte.backends.gpu import Held, raised_on_device, solve_feedback, unserved_feedback
from halfbyte.backends.gpu import feedback as on_gpu
from halfbyte.backends.headroom import by_squared_error
from halfbyte.feedback import prepare, request_for
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.strict_interpreter import set_up
from tests.feedback.problems import layer

CASES = (("nvfp4", "modelopt", 48), ("mxfp4", "ocp", 64))


def main() -> None:
    on_gpu.BATCH = 32  # so that few columns are several batches
    for format, contract, width in CASES:
        given = layer(rows=3, width=width, spread=0.3)
        block = hb.get_format(format).block
        factor = prepare(given.second_moment, block, cross_moment=given.cross_moment)
        amax = np.array([np.abs(given.weight).max()], np.float32) if format == "nvfp4" else None
        request = replace(request_for(format, contract), method=factor.feedback.objective, device="cpu")
        reason = unserved_feedback(request)
        if reason is not None:
            raise SystemExit(f"{format} {contract}: {reason}")
        if amax is not None:
            amax = raised_on_device(torch.from_numpy(given.weight), by_squared_error(request, None), amax)
            assert amax[0] > np.abs(given.weight).max()
        parts = solve_feedback(torch.from_numpy(given.weight), request, factor.feedback, amax)
        slow = hb.gptq(given.weight, factor, format, contract, backend="reference")
        assert_same_bits(parts.codes.numpy(), slow.codes)
        assert_same_bits(parts.scales.numpy(), slow.scales)
        print(f"{format} {contract}: the same bits")
        held = prepare(given.second_moment, block, cross_moment=given.cross_moment, device="cpu").feedback
        assert isinstance(held, Held)
        assert_same_bits(held.order.numpy(), factor.feedback.order)
        close = np.allclose(held.factor.numpy(), factor.feedback.factor, rtol=1e-5, atol=1e-7)
        print(f"a factor made by torch is {'close' if close else 'another'}")


if __name__ == "__main__":
    set_up()
    main()
