"""Error feedback by the Triton kernels as Triton's interpreter runs them on the CPU. A program of its own: it needs
TRITON_INTERPRET=1 before Triton is imported. Prints the share of codes and scales that are the reference's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import halfbyte as hb
from halfbyte.backends.gpu import solve_feedback, unserved_feedback
from halfbyte.feedback import prepare, request_for
from tests.feedback.problems import layer

CASES = (("nvfp4", "modelopt"), ("mxfp4", "ocp"))


def main() -> None:
    for format, contract in CASES:
        given = layer(rows=3, width=32 if format == "mxfp4" else 48, spread=0.3)
        factor = prepare(given.second_moment, hb.get_format(format).block, cross_moment=given.cross_moment)
        amax = np.array([np.abs(given.weight).max()], np.float32) if format == "nvfp4" else None
        request = replace(request_for(format, contract), method=factor.feedback.objective, device="cpu")
        reason = unserved_feedback(request, factor.feedback)
        if reason is not None:
            raise SystemExit(f"{format} {contract}: {reason}")
        parts = solve_feedback(torch.from_numpy(given.weight), request, factor.feedback, amax)
        slow = hb.gptq(given.weight, factor, format, contract, backend="reference")
        codes = float((parts.codes.numpy() == np.asarray(slow.codes)).mean())
        scales = float((parts.scales.numpy() == np.asarray(slow.scales)).mean())
        print(f"{format} {contract} {codes:.4f} {scales:.4f}")
        block = hb.get_format(format).block
        held = prepare(given.second_moment, block, cross_moment=given.cross_moment, device="cpu").feedback
        again = solve_feedback(torch.from_numpy(given.weight), request, held, amax)
        codes = float((again.codes == parts.codes).float().mean())
        print(f"{format} {contract} {codes:.4f} {float((again.scales == parts.scales).float().mean()):.4f}")


if __name__ == "__main__":
    main()
