"""What cast refuses, and that each message names the tensor, the rule and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import verbatim
from halfbyte.casting.api import TARGETS
from halfbyte.casting.rows import POWER_DECODES, decodes_powers
from halfbyte.contracts import Contract, exponents
from halfbyte.contracts.peers.gguf import decode_scale_halved
from halfbyte.formats import E2M1, E8M0
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source
from tests.samples import gaussian


@pytest.fixture
def q() -> hb.QuantizedTensor:
    tensor: hb.QuantizedTensor = random_source(np.random.default_rng(0), 20)
    return tensor


def test_nan_scale_is_refused_by_name(q: hb.QuantizedTensor) -> None:
    scales = np.asarray(q.scales).copy()
    scales[3, 1] = 255
    broken = hb.QuantizedTensor(q.format, q.shape, q.codes, scales, None, None, q.contract)
    with pytest.raises(hb.InputError, match=r"layers\.0\.w1 of shape \(8, 128\): 1 of 32 E8M0 scale bytes are 255"):
        hb.cast(broken, "nvfp4", name="layers.0.w1")
    with pytest.raises(hb.InputError, match="row 3, block 1"):
        hb.cast(broken, "nvfp4", contract=hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4_lossless"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "magic"}, "unknown algorithm 'magic'; known: hybrid, optimal, requantize, verbatim"),
        ({"algorithm": "verbatim", "m": "left"}, "unknown m 'left'; known: midpoint, search"),
        ({"m": "search"}, "only algorithm='verbatim' takes m"),
        ({"share": "row"}, "unknown share 'row'; known: expert, tensor"),
        ({"share": "expert"}, r"share='expert' needs a stack .* shape \(8, 128\); use share='tensor'"),
        ({"contract": "qwantize"}, "stores no NVFP4 global scale"),
        ({"contract": "ocp"}, "contract ocp has no nvfp4"),
        ({"contract": "nobody"}, "unknown contract 'nobody'"),
    ],
)
def test_options(q: hb.QuantizedTensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.cast(q, "nvfp4", **options)


def test_targets(q: hb.QuantizedTensor) -> None:
    with pytest.raises(hb.UnknownNameError, match="unknown target of a cast 'int4'; known: bf16"):
        hb.cast(q, "int4")
    with pytest.raises(hb.UnsupportedError, match="no cast from mxfp4 to mxfp4; it takes nvfp4"):
        hb.cast(q, "mxfp4")
    with pytest.raises(hb.UnsupportedError, match="no cast from mxfp8 to nvfp4; it takes mxfp4"):
        hb.cast(hb.quantize(gaussian(2, 32), "mxfp8"), "nvfp4")
    with pytest.raises(hb.UnsupportedError, match="has no algorithm to choose"):
        hb.cast(q, "bfloat16", algorithm="optimal")
    with pytest.raises(hb.UnsupportedError, match="no global scale to share"):
        hb.cast([q, q], TARGETS["bf16"])
    with pytest.raises(hb.UnsupportedError, match="blocks of 16, not 32"):
        hb.cast(q, hb.get_format("nvfp4", block=32))


def test_lists(q: hb.QuantizedTensor) -> None:
    with pytest.raises(hb.InputError, match="a list of them that is not empty"):
        hb.cast([], "nvfp4")
    stacks = [source(np.zeros((n, 2, 1)), np.ones((n, 2, 32))) for n in (2, 3)]
    with pytest.raises(hb.InputError, match="the same number of experts, not 2 and 3"):
        hb.cast(stacks, "nvfp4", share="expert")


def test_a_contract_that_cannot_hold_the_scale() -> None:
    """compressed-tensors stores 1/g, which is 2^135 for the smallest blocks."""
    tiny = source(np.full((1, 1), -127), np.full((1, 32), 7))
    with pytest.raises(
        hb.UnsupportedError, match=r"float32 cannot hold for a global scale of .* stores the multiplier"
    ):
        hb.cast(tiny, "nvfp4", contract="compressed_tensors")


def test_nvfp4_with_nan_scales_does_not_go_to_mxfp4() -> None:
    q = hb.quantize(np.zeros((1, 32), np.float32), "nvfp4", "modelopt")
    with pytest.raises(hb.InputError, match=r"w of shape \(1, 32\) decodes to NaN or Inf near row 0"):
        hb.cast(q, "mxfp4", name="w")
    with pytest.raises(hb.UnknownNameError, match="algorithm of nvfp4 to mxfp4 'hybrid'; known: optimal, requantize"):
        hb.cast(hb.quantize(gaussian(1, 32), "nvfp4"), "mxfp4", algorithm="hybrid")


def test_a_peer_cast_has_no_other_algorithm(q: hb.QuantizedTensor) -> None:
    contract = hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4")
    with pytest.raises(hb.UnsupportedError, match="is a cast itself; leave algorithm out"):
        hb.cast(q, "nvfp4", algorithm="optimal", contract=contract)
    with pytest.raises(hb.UnsupportedError, match="k_max belongs to the mode"):
        hb.contracts.modelopt(k_max=3)


# --- what is called by the name of a format, and is another ---

E1M2 = dataclasses.replace(E2M1, name="e1m2", exponent_bits=1, mantissa_bits=2)
E2M3 = dataclasses.replace(E2M1, name="e2m3", mantissa_bits=3)
SCALE = dataclasses.replace(E8M0, name="e8m0 by 2", bias=126)


def doubled(values: Any, byte: Any) -> Any:
    """q·2^(byte−126)"""
    return 2 * exponents.decode_e8m0(values, byte)


def with_decode(decode: Any) -> Contract:
    ocp = hb.contracts.ocp()
    return dataclasses.replace(ocp, rules={"mxfp4": dataclasses.replace(ocp.rules["mxfp4"], decode=decode)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": E1M2}, r"another element \(e1m2\)"),
        ({"element": E2M3}, r"another element \(e2m3\)"),
        ({"scale": SCALE}, r"another scale \(e8m0 by 2\)"),
        ({"has_global": True}, "a global scale"),
    ],
)
def test_a_source_that_only_has_the_name_of_mxfp4(changes: dict[str, Any], message: str) -> None:
    other = dataclasses.replace(hb.get_format("mxfp4"), **changes)
    codes = np.ones((8, 32 // other.codes_per_byte), np.uint8)
    q = hb.QuantizedTensor(other, (8, 32), codes, np.full((8, 1), 127, np.uint8), None, None, hb.contracts.ocp())
    for algorithm in ("optimal", "requantize"):
        with pytest.raises(hb.UnsupportedError, match=f"w: its format is called mxfp4 but has {message}.*bfloat16"):
            hb.cast(q, "nvfp4", algorithm, name="w")


@pytest.mark.parametrize("block", [8, 48, 64])
@pytest.mark.parametrize(("name", "target"), [("mxfp4", "nvfp4"), ("nvfp4", "mxfp4")])
def test_a_source_with_other_blocks(name: str, target: str, block: int) -> None:
    format = dataclasses.replace(hb.get_format(name), block=block)
    q = hb.quantize(gaussian(2, 192), format)
    with pytest.raises(hb.UnsupportedError, match=f"w: .* takes blocks of 16 or 32, not {block}; cast it to bfloat16"):
        hb.cast(q, target, name="w")
    assert hb.cast(q, "bfloat16")[1].blocks == 2 * 192 // block


@pytest.mark.parametrize("decode", [doubled, decode_scale_halved])
def test_a_source_that_decodes_otherwise(q: hb.QuantizedTensor, decode: Any) -> None:
    other = dataclasses.replace(q, contract=with_decode(decode))
    with pytest.raises(hb.UnsupportedError, match=r"w: contract ocp\(\) does not decode mxfp4 as .*bfloat16"):
        hb.cast(other, "nvfp4", name="w")
    with pytest.raises(hb.UnsupportedError, match=r"w\[1\]: contract"):
        hb.cast([q, other], "nvfp4", name="w")


def test_every_contract_that_has_mxfp4_decodes_powers() -> None:
    """The list of decodings in rows.py covers all of them, and each gives q·2^(byte−127)."""
    contracts = [make() for make in hb.contracts.CONTRACTS.values()]
    found = [contract for contract in contracts if "mxfp4" in contract.rules]
    assert len(found) > 5
    for contract in found:
        assert decodes_powers(contract), contract
    byte = np.arange(255, dtype=np.uint8)[:, None]
    with np.errstate(over="ignore"):
        wanted = np.ldexp(E2M1.values.astype(np.float64), byte.astype(int) - 127).astype(np.float32)
        for decode in POWER_DECODES:
            assert_same_bits(np.broadcast_to(decode(E2M1.values[None], byte), wanted.shape), wanted)


def test_a_result_that_decodes_otherwise(q: hb.QuantizedTensor) -> None:
    nvfp4 = hb.quantize(gaussian(2, 64), "nvfp4")
    with pytest.raises(hb.UnsupportedError, match=r"w: .*by which 'optimal' chooses; take algorithm='requantize'"):
        hb.cast(nvfp4, "mxfp4", contract=with_decode(doubled), name="w")
    torchao = hb.contracts.torchao()
    rule: Any = torchao.rules["nvfp4"]
    rule = dataclasses.replace(rule, decode=lambda q, scale, stored, top: 2 * q * (scale * stored))
    with pytest.raises(hb.UnsupportedError, match="decodes NVFP4 by a formula of its own"):
        hb.cast(q, "nvfp4", contract=dataclasses.replace(torchao, rules={"nvfp4": rule}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": E1M2}, r"another element \(e1m2\)"),
        ({"scale": E8M0}, r"another scale \(e8m0\)"),
        ({"has_global": False}, "no global scale"),
        ({"name": "bf16"}, "unknown target format of a cast 'bf16'; known: mxfp4, nvfp4"),
    ],
)
def test_a_target_that_only_has_the_name_of_nvfp4(q: hb.QuantizedTensor, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.cast(q, dataclasses.replace(hb.get_format("nvfp4"), **changes))


def test_real_targets_may_be_given_as_formats(q: hb.QuantizedTensor) -> None:
    result, _ = hb.cast(q, hb.get_format("nvfp4"))
    assert_same_bits(result.codes, hb.cast(q, "nvfp4")[0].codes)
    assert hb.cast(result, hb.get_format("mxfp4"))[0].format == hb.get_format("mxfp4")
    with pytest.raises(hb.UnsupportedError, match="a cast to mxfp4 has blocks of 32, not 16"):
        hb.cast(result, hb.get_format("mxfp4", block=16))


@pytest.mark.parametrize("given", [None, 3, np.float32(1), np.zeros((2, 2), np.float32), "w"])
def test_what_is_no_quantized_tensor(q: hb.QuantizedTensor, given: Any) -> None:
    for target in ("nvfp4", "mxfp4", "bfloat16"):
        with pytest.raises(hb.InputError, match="w: cast takes a QuantizedTensor"):
            hb.cast(given, target, name="w")
    with pytest.raises(hb.InputError, match="w: out must be a QuantizedTensor to write into, not int"):
        hb.cast(q, "nvfp4", name="w", out=3)  # type: ignore[call-overload]


def test_partners_without_rows() -> None:
    """One tensor without rows is fine (tests/test_no_rows.py); as a partner it has no share in a scale."""
    full = hb.quantize(gaussian(2, 32), "mxfp4")
    empty = dataclasses.replace(full, shape=(0, 32), codes=full.codes[:0], scales=full.scales[:0])
    with pytest.raises(hb.InputError, match=r"w\[1\] of shape \(0, 32\) has no rows, so .* cast it by itself$"):
        hb.cast([full, empty], "nvfp4", name="w")
    assert hb.cast([empty], "nvfp4")[0][0].shape == (0, 32)


# --- out ---


@pytest.mark.parametrize("width", [128, 48, 41])
@pytest.mark.parametrize("spread", [3, 25])
@pytest.mark.parametrize("algorithm", ["optimal", "hybrid", "verbatim", "requantize"])
def test_out_is_overwritten_with_the_same_bytes(spread: int, algorithm: str, width: int) -> None:
    q = random_source(np.random.default_rng(1), spread, (8, width))
    wanted, report = hb.cast(q, "nvfp4", algorithm=algorithm)
    out = hb.quantize(gaussian(8, width), "nvfp4")
    result, same = hb.cast(q, "nvfp4", algorithm=algorithm, out=out)
    assert result.codes is out.codes
    assert result.scales is out.scales
    assert_same_bits(result.codes, wanted.codes)
    assert_same_bits(result.scales, wanted.scales)
    assert_same_bits(hb.dequantize(result), hb.dequantize(wanted))
    assert same == report


@pytest.mark.parametrize("width", [128, 48])
def test_kept_codes_are_written_into_out_at_once(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """That saves the memory of a second copy."""
    rooms = []
    real = verbatim.keep_and_count

    def keep(rows: Any, m: int, out: Any, *rest: Any) -> Any:
        rooms.append(out)
        return real(rows, m, out, *rest)

    monkeypatch.setattr(verbatim, "keep_and_count", keep)
    out = hb.quantize(gaussian(8, width), "nvfp4")
    hb.cast(random_source(np.random.default_rng(1), 3, (8, width)), "nvfp4", out=out)
    (room,) = rooms
    assert np.shares_memory(room[0], np.asarray(out.codes))
    assert np.shares_memory(room[1], np.asarray(out.scales))


def test_out_for_a_stack_of_experts() -> None:
    q = random_source(np.random.default_rng(2), 30, (3, 4, 64))
    wanted, _ = hb.cast(q, "nvfp4", share="expert")
    out = hb.quantize(gaussian(3, 4, 64), "nvfp4")
    result, _ = hb.cast(q, "nvfp4", share="expert", out=out)
    assert result.codes is out.codes
    assert_same_bits(hb.dequantize(result), hb.dequantize(wanted))


def test_out_that_does_not_fit_is_refused(q: hb.QuantizedTensor) -> None:
    with pytest.raises(
        hb.InputError, match=r"out holds nvfp4 of shape \(8, 64\), but the result is nvfp4 of \(8, 128\)"
    ):
        hb.cast(q, "nvfp4", out=hb.quantize(gaussian(8, 64), "nvfp4"))
    with pytest.raises(hb.InputError, match="out holds mxfp4"):
        hb.cast(q, "nvfp4", out=hb.quantize(gaussian(8, 128), "mxfp4"))
    out = hb.quantize(gaussian(8, 128), "nvfp4")
    with pytest.raises(hb.InputError, match="out takes one tensor, not a list of 2"):
        hb.cast([q, q], "nvfp4", out=out)
    overlapping = dataclasses.replace(out, codes=q.codes)
    with pytest.raises(hb.InputError, match="out overlaps the source"):
        hb.cast(q, "nvfp4", out=overlapping)
    frozen = np.asarray(out.scales).copy()
    frozen.flags.writeable = False
    with pytest.raises(hb.InputError, match="contiguous, writable"):
        hb.cast(q, "nvfp4", out=dataclasses.replace(out, scales=frozen))
    with pytest.raises(hb.UnsupportedError, match="a cast to bfloat16 takes no out"):
        hb.cast(q, "bfloat16", out=out)


@pytest.mark.parametrize(
    ("k", "code", "inf"),
    [(125, 7, False), (126, 5, False), (126, 6, True), (127, 3, False), (127, 4, True), (127, 12, True)],
)
@pytest.mark.parametrize("place", [2, 31])
def test_a_source_that_decodes_to_inf_is_not_quantized_again(k: int, code: int, inf: bool, place: int) -> None:
    """A single element is enough."""
    some = np.zeros(32, int)
    some[place] = code
    q = source(np.array([[0], [k]]), np.stack([np.ones(32, int), some]))
    assert np.isinf(np.asarray(hb.dequantize(q))).any() == inf
    if inf:
        message = r"layer\.w of shape \(2, 32\) decodes to Inf in 1 blocks, the first in row 1; .*algorithm='optimal'"
        with pytest.raises(hb.InputError, match=message):
            hb.cast(q, "nvfp4", algorithm="requantize", name="layer.w")
    else:
        hb.cast(q, "nvfp4", algorithm="requantize", name="layer.w")
    assert np.isinf(np.asarray(hb.dequantize(hb.cast(q, "nvfp4")[0]))).any() == inf
