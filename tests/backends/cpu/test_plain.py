"""Plain bfloat16 kernels on every amax, and on every magnitude that a block with some scale byte can hold."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends.cpu.structs import as_array
from halfbyte.backends.cpu.tables_mx import IRREGULAR, build_mx_tables
from halfbyte.contracts.spec import MXRule
from halfbyte.formats import E2M1
from halfbyte.testing import assert_same_bits
from tests.backends.cases import Matrix
from tests.backends.cpu.test_tables import INFINITY, nvfp4
from tests.backends.test_bits import ISA_NAMES

CASES = {
    "transformer_engine": ("nvfp4", contracts.transformer_engine(), 16, 3.71875),
    "transformer_engine, blocks of 32": ("nvfp4", contracts.transformer_engine(), 32, 0.8),
    "modelopt": ("nvfp4", contracts.modelopt(), 16, 2688.0),
    "compressed_tensors": ("nvfp4", contracts.compressed_tensors(), 16, 0.0137),
    "torchao": ("nvfp4", contracts.torchao(), 16, 1.9),
    "fouroversix, whose codes wrap": ("nvfp4", contracts.fouroversix(), 16, 0.3),
    "qwantize": ("nvfp4", contracts.qwantize(), 16, None),
    "ocp": ("mxfp4", contracts.ocp(), 32, None),
    "modelopt, MX of 16": ("mxfp4", contracts.modelopt(), 16, None),
    "gguf": ("mxfp4", contracts.gguf(), 32, None),
}


def with_signs(bits: Matrix) -> Matrix:
    """bfloat16 numbers from magnitude bits; every second number is negative."""
    signs = np.where(np.arange(bits.size).reshape(bits.shape) % 2, 0x8000, 0)
    return (bits | signs).astype(np.uint16).view(ml_dtypes.bfloat16)


@functools.cache
def operand(block: int, largest: int) -> Matrix:
    """A block for every amax up to `largest`, and blocks with all magnitudes below some amaxes.

    The kernel scales sixteen blocks at once if all their amaxes allow it. So the blocks come in order and shuffled.
    """
    generator = np.random.default_rng(block)
    amaxes = np.arange(largest)
    blocks = generator.integers(0, amaxes[:, None] + 1, (largest, block))
    blocks[np.arange(largest), generator.integers(0, block, largest)] = amaxes
    parts = [blocks, blocks[generator.permutation(largest)]]
    for amax in range(block, largest, 131):  # each time at another place in the binade
        low = max(0, amax - 1400)  # ten binades and more: below them every code is zero
        span = np.resize(np.arange(low, amax + 1), (-(-(amax + 1 - low) // (block - 1)), block - 1))
        parts.append(np.concatenate([np.full((len(span), 1), amax), span], axis=1))
    return with_signs(np.concatenate(parts))


@functools.cache
def expected(name: str) -> tuple[Matrix, hb.QuantizedTensor]:
    format, contract, block, amax = CASES[name]
    x = operand(block, INFINITY["bf16"])
    return x, hb.quantize(x, format, contract, block=block, global_amax=amax, backend="reference")


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("name", CASES)
def test_every_amax_and_what_it_leads_to(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa)
    format, contract, block, amax = CASES[name]
    x, wanted = expected(name)
    got = hb.quantize(x, format, contract, block=block, global_amax=amax, backend="cpu")
    assert_same_bits(got.scales, wanted.scales)
    assert_same_bits(got.codes, wanted.codes)


@pytest.mark.parametrize("name", ["transformer_engine()", "modelopt()", "compressed_tensors()", "vllm()"])
def test_steps_describe_fourteen_binades_of_scales(name: str) -> None:
    """Otherwise the kernel that takes sixteen amaxes at once would not run."""
    _, _, tables = nvfp4(name, "bf16", 3.71875)
    first, last, offset, shift = steps = as_array(tables.steps, np.uint16)[8:].astype(np.int64)
    ahead = as_array(tables.steps, np.uint8)[:16].astype(np.int64)
    assert last - first >= 14 * 128, steps
    amax = np.arange(first, last + 1)
    byte = ((amax + offset + 256 * ahead[0] + ahead[amax >> 3 & 15]) & 0xFFFF) >> shift
    assert_same_bits(byte.astype(np.uint8), as_array(tables.lut, np.uint8)[first : last + 1])


def test_steps_describe_powers_of_two() -> None:
    rule = contracts.ocp().rules["mxfp4"]
    assert isinstance(rule, MXRule)
    tables = build_mx_tables(rule, E2M1, "bf16")
    first, last, _, shift = as_array(tables.steps, np.uint16)[8:].astype(np.int64)
    assert last - first > 230 * 128
    assert shift == 7
    assert (as_array(tables.lut, np.uint8)[first : last + 1] != IRREGULAR).all()
