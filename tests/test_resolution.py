"""Names, instances and presets: how quantize() finds the contract and the method."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.contracts.hadamard import rotate
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(8, 64) * np.float32(3)


def same(a: hb.QuantizedTensor, b: hb.QuantizedTensor) -> None:
    assert_same_bits(a.codes, b.codes)
    assert_same_bits(a.scales, b.scales)
    assert a.method == b.method


def test_default_contracts() -> None:
    assert repr(hb.quantize(X, "nvfp4").contract) == "transformer_engine()"
    assert repr(hb.quantize(X, "mxfp4").contract) == "ocp()"
    assert repr(hb.quantize(X, "mxfp8").contract) == "ocp()"


def test_contract_by_name_and_by_instance() -> None:
    same(hb.quantize(X, "nvfp4", "torchao"), hb.quantize(X, "nvfp4", contracts.torchao()))
    one = hb.quantize(X, "nvfp4", contracts.torchao(two_level=False))
    assert not np.array_equal(to_numpy(one.scales), to_numpy(hb.quantize(X, "nvfp4", "torchao").scales))


def test_positional_order_of_the_arguments() -> None:
    """The public signature: x, format, contract, method, block, tile, scaling, global_amax, backend."""
    q = hb.quantize(X, "nvfp4", "transformer_engine", "amax", 16, (1, 16), "tensor", 7.0, "reference")
    assert to_numpy(q.stored_scale).item() == 7.0  # type: ignore[arg-type]


def test_method_by_name_and_by_instance() -> None:
    same(hb.quantize(X, "nvfp4", method="amax"), hb.quantize(X, "nvfp4", method=hb.Amax()))
    same(hb.quantize(X, "nvfp4"), hb.quantize(X, "nvfp4", method="amax"))
    same(hb.quantize(X, "nvfp4", method="four_six"), hb.quantize(X, "nvfp4", method=hb.FourSix()))


def test_four_six_by_name_takes_the_contract_s_own_options() -> None:
    """fouroversix and Model-Optimizer default to 256 and squares; TransformerEngine defaults to 448 and magnitudes."""
    for contract, options in (
        ("transformer_engine", hb.FourSix("mae", 448)),
        ("miles", hb.FourSix("mae", 256)),
        ("fouroversix", hb.FourSix("mse", 256)),
        ("modelopt", hb.FourSix("mse", 256)),
    ):
        q = hb.quantize(X, "nvfp4", contract, "four_six")
        assert q.method == options
        same(q, hb.quantize(X, "nvfp4", contract, options))


PRESETS: list[tuple[Any, str, Any]] = [
    (contracts.transformer_engine(nvfp4_use_4over6=True), "transformer_engine", hb.FourSix()),
    (
        contracts.transformer_engine(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE", nvfp4_e4m3_max=256),
        "transformer_engine",
        hb.FourSix("mse", 256),
    ),
    (
        contracts.transformer_engine(nvfp4_use_4over6=True, nvfp4_4over6_err_use_fast_math=True),
        "transformer_engine",
        hb.FourSix(fast_error=True),
    ),
    (contracts.transformer_engine(nvfp4_e4m3_max=256), "transformer_engine", hb.Amax()),  # ignored without 4over6
    (contracts.fouroversix(rule="mae"), "fouroversix", hb.FourSix("mae", 256)),
    (contracts.fouroversix(rule="abs_max"), "fouroversix", hb.FourSix("abs_max", 256)),
    (contracts.modelopt(mode="four_over_six"), "modelopt", hb.FourSix("mse", 256)),
    (contracts.modelopt(mode="fp8_sweep"), "modelopt", hb.Sweep()),
    (contracts.modelopt(mode="fp8_sweep_kernel"), "modelopt", hb.Sweep(fused=True)),
    (contracts.miles(env={"NVTE_NVFP4_4OVER6": "all"}), "miles", hb.FourSix("mae", 256)),
    (
        contracts.miles(
            env={
                "NVTE_NVFP4_4OVER6": "weights",
                "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
                "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
            }
        ),
        "miles",
        hb.FourSix("mse", 448),
    ),
    (contracts.miles(env={"NVTE_NVFP4_4OVER6": "activations"}), "miles", hb.Amax()),
]


@pytest.mark.parametrize(("preset", "name", "method"), PRESETS, ids=[repr(preset) for preset, _, _ in PRESETS])
def test_presets_equal_the_method_given(preset: Any, name: str, method: Any) -> None:
    a, b = hb.quantize(X, "nvfp4", preset), hb.quantize(X, "nvfp4", name, method)
    same(a, b)
    assert_same_bits(to_numpy(a.stored_scale), to_numpy(b.stored_scale))  # type: ignore[arg-type]
    assert_same_bits(hb.dequantize(a), hb.dequantize(b))


def test_a_method_given_overrides_the_preset() -> None:
    preset = contracts.transformer_engine(nvfp4_use_4over6=True)
    same(hb.quantize(X, "nvfp4", preset, "amax"), hb.quantize(X, "nvfp4", method="amax"))


def test_every_variant_of_four_six_is_another_result() -> None:
    """Sparse small integers bring the two candidates close together. If two results agree, an option is ignored."""
    rng = np.random.default_rng(5)
    x = (rng.integers(-6, 7, (12, 64, 256)) * (rng.random((12, 64, 256)) < 0.2)).astype(np.float32)
    x *= rng.uniform(0.5, 1.5, (12, 1, 1)).astype(np.float32)
    options = itertools.product(("mae", "mse"), (448, 256), (False, True))
    variants = [hb.FourSix(error, e4m3_max, fast) for error, e4m3_max, fast in options]  # type: ignore[arg-type]
    scales = {b"".join(to_numpy(hb.quantize(one, "nvfp4", method=m).scales).tobytes() for one in x) for m in variants}
    assert len(scales) == len(variants) == 8


def test_transforms_are_applied_before() -> None:
    """columnwise quantizes the transpose; with_rht also rotates it before."""
    x = gaussian(32, 48)
    columnwise = hb.quantize(x, "nvfp4", contracts.transformer_engine(columnwise=True))
    assert columnwise.shape == (48, 32)
    same(columnwise, hb.quantize(np.ascontiguousarray(x.T), "nvfp4"))
    rotated = hb.quantize(x, "nvfp4", contracts.transformer_engine(columnwise=True, with_rht=True))
    assert rotated.shape == (48, 32)
    same(rotated, hb.quantize(rotate(np.ascontiguousarray(x.T), "fp32", True), "nvfp4"))
    same(
        hb.quantize(x, "nvfp4", contracts.fouroversix(transpose=True)),
        hb.quantize(np.ascontiguousarray(x.T), "nvfp4", "fouroversix"),
    )


def test_options_that_move_no_bit() -> None:
    same(hb.quantize(X, "nvfp4", contracts.torchao(swizzled=True)), hb.quantize(X, "nvfp4", "torchao"))
    same(hb.quantize(X, "nvfp4", contracts.fouroversix(dequant=True)), hb.quantize(X, "nvfp4", "fouroversix"))
    same(hb.quantize(X, "nvfp4", contracts.torchao(mode="nvfp4")), hb.quantize(X, "nvfp4", "torchao"))
