"""The errors of a part of a tensor under several headrooms, for callers that see a tensor or group in parts.

`headrooms` gives the candidates, `survey_part` the sums of each part, `merged` adds them, and `best` chooses
(backends/headroom.py). `quantize` then gets the raised amax as `global_amax`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.headroom import survey
from halfbyte.backends.headroom import Total
from halfbyte.errors import UnsupportedError
from halfbyte.request import Request


def survey_part(
    x: npt.NDArray[Any], request: Request, amax: np.float32, candidates: tuple[float, ...]
) -> tuple[Total, ...]:
    """T_h of each candidate over a (rows, K) matrix, up to a number that all candidates share.

    amax: the largest magnitude of all that share the scale. By the compiled search if it is installed.
    """
    transform = request.contract.transform
    if transform.hadamard or transform.columnwise:
        raise UnsupportedError(f"{request.contract} transforms its operand: a part of it cannot be surveyed")
    below = -x.shape[1] % request.format.block
    whole = np.require(np.pad(x, ((0, 0), (0, below))) if below else x, requirements=["C", "A"])
    return survey(whole, np.array([amax], np.float32), request, candidates)[0]
