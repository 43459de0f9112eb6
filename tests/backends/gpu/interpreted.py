"""Kernels under Triton's interpreter against the reference.

    TRITON_INTERPRET=1 python -m tests.backends.gpu.interpreted

The interpreter is chosen when kernels are imported, so this needs a process of its own. It is slow: the vectors are
small, and every kernel and every branch of it meets some.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte import contracts, online
from halfbyte.arrays import like, to_numpy
from halfbyte.checkpoint import Options, Rules
from halfbyte.codec.element import encode
from halfbyte.formats import E4M3
from halfbyte.layouts.swizzle import swizzle
from halfbyte.online_batch import Batches
from halfbyte.online_plan import decided
from halfbyte.testing import assert_same_bits
from tests.backends.cases import Matrix, hessian, make_input, weights
from tests.backends.gpu.strict_interpreter import set_up

HERE = torch.empty(0)
PLAIN = [
    contracts.transformer_engine(),
    contracts.modelopt(),
    contracts.compressed_tensors(),
    contracts.torchao(),
    contracts.fouroversix(),
    contracts.qwantize(),
    contracts.flashinfer(),
    contracts.vllm(),
]
MX = [contracts.ocp(), contracts.torchao(mode="mx", scaling_mode="rceil"), contracts.modelopt(), contracts.gguf()]


def small(name: str, dtype: str, rows: int = 3, columns: int = 64) -> Matrix:
    return np.ascontiguousarray(make_input(name, dtype)[:rows, :columns])


def compare(x: Matrix, format: str, contract: hb.contracts.Contract, method: hb.methods.Method | None = None) -> int:
    """Quantize and decode both ways."""
    got = hb.quantize(like(x, HERE), format, contract, method, backend="gpu")
    expected = hb.quantize(x, format, contract, method, backend="reference")
    for part in ("scales", "codes", "global_scale", "stored_scale"):
        mine, wanted = getattr(got, part), getattr(expected, part)
        assert (mine is None) == (wanted is None), part
        if wanted is not None:
            assert_same_bits(mine, wanted, any_nan=True)
    for dtype in ("bfloat16", "float32"):
        decoded = hb.dequantize(got, dtype, backend="gpu")
        assert_same_bits(decoded, hb.dequantize(expected, dtype, backend="reference"), any_nan=True)
    return 1


def decoded_bytes(format: str, contract: hb.contracts.Contract) -> int:
    """Every scale byte under many codes, decoded to each dtype: by powers of two, or by a table (gguf has no NaN)."""
    spec, generator = hb.get_format(format), np.random.default_rng(1)
    codes = generator.integers(0, 256, (8, 1024 // spec.codes_per_byte)).astype(np.uint8)
    scales = np.arange(256, dtype=np.uint8).reshape(8, 32)
    given, here = (
        hb.QuantizedTensor(spec, (8, 1024), packed, bytes_, None, None, contract, hb.Amax())
        for packed, bytes_ in ((codes, scales), (like(codes, HERE), like(scales, HERE)))
    )
    for dtype in ("bfloat16", "float16", "float32"):
        decoded = hb.dequantize(here, dtype, backend="gpu")
        assert_same_bits(decoded, hb.dequantize(given, dtype, backend="reference"), any_nan=True)
    return 1


def comparisons() -> Iterator[int]:
    for index, contract in enumerate(PLAIN):
        for number, name in enumerate(("gauss", "nonfinite", "ties", "zero blocks")):
            yield compare(small(name, ("bf16", "fp16", "fp32")[(index + number) % 3]), "nvfp4", contract)
    for index, contract in enumerate(MX):
        for number, name in enumerate(("wide", "bits")):
            yield compare(small(name, ("bf16", "fp32", "fp16")[(index + number) % 3]), "mxfp4", contract)
    yield decoded_bytes("mxfp4", contracts.ocp())
    yield decoded_bytes("mxfp4", contracts.gguf())
    yield decoded_bytes("mxfp8", contracts.ocp())
    yield compare(small("wide", "bf16"), "mxfp8", contracts.ocp())
    yield compare(small("nonfinite", "fp32"), "mxfp8", contracts.torchao(mode="mx"))
    te = contracts.transformer_engine()
    for name, method in (("gauss", hb.FourSix("mae", 448)), ("ties", hb.FourSix("mse", 256, True))):
        yield compare(small(name, "bf16"), "nvfp4", te, method)
        yield compare(small(name, "fp32"), "nvfp4", contracts.transformer_engine(row_scaled_nvfp4=True), method)
        yield compare(small(name, "fp16", 17, 32), "nvfp4", contracts.transformer_engine(tile=(16, 16)), method)
    yield compare(small("2**61", "bf16"), "nvfp4", te, hb.FourSix("mae", 448))  # beyond the short formulas
    yield compare(small("gauss", "fp32"), "nvfp4", contracts.fouroversix(rule="mse"))
    yield compare(small("gauss", "bf16", 2, 32), "nvfp4", te, hb.Optimal())
    yield compare(small("gauss", "fp32", 1, 16), "nvfp4", contracts.modelopt(), hb.Optimal())
    yield compare(small("gauss", "bf16", 1, 16), "nvfp4", te, hb.Optimal(weights(16) + np.float32(1)))
    yield compare(small("gauss", "bf16", 2, 16), "nvfp4", te, hb.Hessian(hessian(16)))
    yield from several()
    yield from amaxes()
    yield from synced()
    yield from synced_partners_of_other_shapes()


def several() -> Iterator[int]:
    """Experts, lists, swizzled scales, the cast."""
    x = torch.from_numpy(small("gauss", "fp32", 6, 64)).to(torch.bfloat16).reshape(3, 2, 64)
    for given in (x, [part.clone() for part in x]):
        assert_same_bits(gpu.amaxes(given), x.abs().amax(dim=(1, 2)).float())
        for got, part in zip(gpu.quantize_experts(given), x, strict=True):
            expected = hb.quantize(to_numpy(part), "nvfp4", backend="reference")
            assert_same_bits(to_numpy(got.codes), to_numpy(expected.codes))
            assert_same_bits(to_numpy(got.scales), to_numpy(expected.scales))
            yield 1
    flat = x.reshape(6, 64)
    plain = hb.quantize(to_numpy(flat), "nvfp4", backend="reference")
    assert_same_bits(to_numpy(gpu.quantize_swizzled(flat)[1]), swizzle(to_numpy(plain.scales)))
    yield 1
    scales = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    codes = torch.arange(16 * 256, dtype=torch.int32).to(torch.uint8).reshape(16, 256)
    out, bytes_, outside = gpu.cast_scales(codes, scales, 127)
    exponent = np.arange(256) - 127
    powers = encode(np.ldexp(np.float32(1), np.clip(exponent, -30, 30)).astype(np.float32), E4M3)
    assert_same_bits(out, codes)
    assert_same_bits(to_numpy(bytes_).reshape(-1), np.repeat(np.where(exponent < -9, 0, powers).astype(np.uint8), 2))
    assert outside.tolist() == [int((exponent > 8).sum()), int((exponent < -9).sum())]
    yield 1


def amaxes() -> Iterator[int]:
    """Given as a number or in a tensor; the operand's own in rows that lie apart; one for all of a list; many parts."""
    x = torch.from_numpy(small("gauss", "fp32", 6, 64)).to(torch.bfloat16)
    given = hb.quantize(to_numpy(x), "nvfp4", global_amax=9.5, backend="reference")
    apart = torch.zeros(6, 96, dtype=torch.bfloat16)[:, :64].copy_(x)
    own = hb.quantize(to_numpy(x), "nvfp4", backend="reference")
    large = torch.zeros(4, 8192, dtype=torch.float32)
    large[3, 8000] = -77.0
    parts = hb.quantize(to_numpy(large), "nvfp4", backend="reference")
    for got, expected in (
        (hb.quantize(x, "nvfp4", global_amax=9.5, backend="gpu"), given),
        (hb.quantize(x, "nvfp4", global_amax=torch.tensor(9.5), backend="gpu"), given),
        (hb.quantize(apart, "nvfp4", backend="gpu"), own),
        (hb.quantize(large, "nvfp4", backend="gpu"), parts),
    ):
        for part in ("codes", "scales", "global_scale", "stored_scale"):
            assert_same_bits(to_numpy(getattr(got, part)), to_numpy(getattr(expected, part)))
        yield 1
    shared = gpu.quantize_experts([x[:2].clone(), x[2:].clone() * 3], shared=True)
    assert all(float(q.stored_scale) == 3 * float(x[2:].abs().max()) for q in shared if q.stored_scale is not None)
    yield 1


def synced() -> Iterator[int]:
    """Weight sync in batches, as a card does it: shared, zero and tiny amaxes, other layouts."""
    names = [
        f"layers.0.mlp.experts.{at}.{end}.weight" for at in range(2) for end in ("gate_proj", "up_proj", "down_proj")
    ]
    shapes: list[tuple[int, ...]] = [(2, 32), (2, 32), (3, 16)] * 2
    source = torch.from_numpy(small("gauss", "fp32", 8, 64)).reshape(-1)
    pairs: list[online.Named] = [
        (name, source[at : at + math.prod(shape)].reshape(shape).to(torch.bfloat16) * (at + 1))
        for at, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    torch.as_tensor(pairs[2][1]).zero_()
    torch.as_tensor(pairs[5][1]).fill_(1e-38)
    for options in (
        Options(method="amax"), Options(), Options(contract="transformer_engine", method="amax"),
        Options(layout="compressed-tensors", contract="compressed_tensors", method="amax", activations="unit"),
    ):  # fmt: skip
        expected = dict(online.quantize_named(pairs, Rules(), online.Config(options)))
        sync = decided(tuple(names), shapes, Rules(), online.Config(options))
        assert sync.batches is not None
        assert [modules.share for modules in sync.batches] == [2, 1]
        tensors = [torch.as_tensor(x) for _, x in pairs]
        together = Batches(sync.batches, len(pairs), sync.target, torch.bfloat16, HERE.device)
        named = together(pairs, tensors, [x.data_ptr() for x in tensors])
        assert [name for name, _ in named] == list(expected)
        found: dict[str, Any] = dict(named)
        for name, value in expected.items():
            assert (value.shape, value.dtype) == (found[name].shape, found[name].dtype), name
            assert_same_bits(to_numpy(found[name]), to_numpy(value))
        yield 1


def synced_partners_of_other_shapes() -> Iterator[int]:
    """q, k and v of grouped attention: one scale, one headroom, other numbers of rows. The weights are uniform."""
    heads = {"q_proj": 6, "k_proj": 2, "v_proj": 3}
    names = tuple(f"layers.{layer}.self_attn.{end}.weight" for layer in range(2) for end in heads)
    generator = torch.Generator().manual_seed(0)
    pairs: list[online.Named] = [
        (name, (torch.rand(rows, 32, generator=generator) * 2 - 1).to(torch.bfloat16))
        for name, rows in zip(names, [*heads.values()] * 2, strict=True)
    ]
    config = online.Config(Options(layout="compressed-tensors"))
    expected = dict(online.quantize_named(pairs, Rules(), config))
    tensors = [torch.as_tensor(x) for _, x in pairs]
    sync = decided(names, [tuple(x.shape) for x in tensors], Rules(), config)
    assert sync.batches is not None
    assert [modules.share for modules in sync.batches] == [3]
    together = Batches(sync.batches, len(pairs), sync.target, torch.bfloat16, HERE.device)
    found = dict(together(pairs, tensors, [x.data_ptr() for x in tensors]))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_same_bits(to_numpy(found[name]), to_numpy(value))
    yield 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_up()
    print(sum(comparisons()), "comparisons")
    sys.exit(0)
