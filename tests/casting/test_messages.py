"""What casts refuse, as whole sentences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.formats import E2M1
from tests.casting.sources import random_source, source

Q = random_source(np.random.default_rng(0), 3, (2, 32))
STACK = random_source(np.random.default_rng(0), 3, (2, 4, 32))
NVFP4 = hb.quantize(np.ones((2, 32), np.float32), "nvfp4")
INF = source(np.array([[0, 0], [126, 127]]), np.concatenate([np.full((2, 32), 1), np.full((2, 32), 7)], axis=1))
WAY_OUT = "cast it to bfloat16, which takes any format, and quantize the result"
OTHER = dataclasses.replace(hb.get_format("mxfp4"), element=dataclasses.replace(E2M1, name="e"), has_global=True)
ODD = hb.QuantizedTensor(OTHER, (2, 32), Q.codes, Q.scales, None, None, Q.contract)


def out(shape: tuple[int, ...] = (2, 32), **changes: Any) -> hb.QuantizedTensor:
    return dataclasses.replace(hb.quantize(np.ones(shape, np.float32), "nvfp4"), **changes)


def frozen(x: Any) -> Any:
    copy = np.array(x)
    copy.flags.writeable = False
    return copy


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "a cast to mxfp4 takes no out": (NVFP4, "mxfp4", {"out": out()}),
    "a cast to bfloat16 takes no out": (Q, "bf16", {"out": out()}),
    "w: out must be a QuantizedTensor to write into, not int": (Q, "nvfp4", {"out": 3}),
    "e: out must be a QuantizedTensor to write into, not list": (Q[:0], "nvfp4", {"out": [], "name": "e"}),
    "mxfp4 has no global scale to share: cast the tensors one by one, without share": (
        NVFP4, "mxfp4", {"share": "expert"},
    ),
    "bfloat16 has no global scale to share: cast the tensors one by one, without share": ([Q, Q], "bf16", {}),
    "a cast to bfloat16 decodes; it has no algorithm to choose": (Q, "bf16", {"algorithm": "optimal"}),
    "m is chosen by the algorithm; only algorithm='verbatim' takes m": (Q, "nvfp4", {"m": "search"}),
    "w: cast takes a QuantizedTensor, or a list of them that is not empty": ([], "nvfp4", {}),
    f"w: no cast from mxfp4 to mxfp4; it takes nvfp4; {WAY_OUT}": (Q, "mxfp4", {}),
    f"w[1]: no cast from nvfp4 to nvfp4; it takes mxfp4; {WAY_OUT}": ([Q, NVFP4], "nvfp4", {}),
    f"w: its format is called mxfp4 but has another element (e) and a global scale, which no cast to nvfp4 takes; "
    f"{WAY_OUT}": (
        ODD, "nvfp4", {},
    ),
    "w: share='expert' needs a stack (experts, rows, columns), but tensor 1 has shape (2, 32); use share='tensor'": (
        [STACK, Q], "nvfp4", {"share": "expert"},
    ),
    "w: partners need the same number of experts, not 2 and 1": ([STACK, STACK[:1]], "nvfp4", {"share": "expert"}),
    "w: out takes one tensor, not a list of 2; cast them without out": ([Q, Q], "nvfp4", {"out": out()}),
    "w: out holds nvfp4 of shape (2, 64), but the result is nvfp4 of (2, 32)": (Q, "nvfp4", {"out": out((2, 64))}),
    "w: out holds mxfp4 of shape (2, 32), but the result is nvfp4 of (2, 32)": (Q, "nvfp4", {"out": Q}),
    "w: out must be contiguous, writable, on the CPU, and of the source's kind of array": (
        Q, "nvfp4", {"out": out(codes=frozen(out().codes))},
    ),
    "w: out overlaps the source": (Q, "nvfp4", {"out": out(codes=np.asarray(Q.codes))}),
    "w of shape (2, 64) decodes to Inf in 1 blocks, the first in row 1; 'requantize' would make the whole tensor NaN: "
    "take algorithm='optimal', which keeps Inf, or repair it": (INF, "nvfp4", {"algorithm": "requantize"}),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_what_is_refused(message: str) -> None:
    q, target, options = CASES[message]
    with pytest.raises(hb.HalfbyteError) as caught:
        hb.cast(q, target, **{"name": "w", **options})
    assert str(caught.value) == message


def test_a_target_of_the_right_name() -> None:
    for changes, message in (
        (
            {"element": dataclasses.replace(E2M1, name="e")},
            "the target is called nvfp4 but has another element (e); for another format, cast to bfloat16 and quantize "
            "the result",
        ),
        ({"block": 32}, "a cast to nvfp4 has blocks of 16, not 32"),
    ):
        with pytest.raises(hb.UnsupportedError) as caught:
            hb.cast(Q, dataclasses.replace(hb.get_format("nvfp4"), **changes))
        assert str(caught.value) == message


def test_values_that_mxfp4_does_not_have() -> None:
    scales = np.asarray(NVFP4.scales).copy()
    scales[1, 0] = 0x7F
    with pytest.raises(hb.InputError) as caught:
        hb.cast(dataclasses.replace(NVFP4, scales=scales), "mxfp4", name="w")
    assert str(caught.value) == (
        "w of shape (2, 32) decodes to NaN or Inf near row 0; MXFP4 has neither: repair it first"
    )


def test_inf_is_found_from_the_first_exponent_that_has_it() -> None:
    """6·2^125 is finite; 6·2^126 is not, and neither is 4·2^126."""
    for k, magnitude, inf in ((125, 7, False), (126, 7, True), (126, 6, True), (126, 5, False), (127, 4, True)):
        q = source(np.array([[k]]), np.full((1, 32), magnitude))
        if inf:
            with pytest.raises(hb.InputError, match=r"decodes to Inf in 1 blocks, the first in row 0;"):
                hb.cast(q, "nvfp4", "requantize")
        else:
            assert hb.cast(q, "nvfp4", "requantize")[1].blocks == 1
