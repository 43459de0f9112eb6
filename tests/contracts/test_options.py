"""Options of contracts: unknown names raise an error that lists the known ones; repr shows the changed options."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte import InputError, UnknownNameError, UnsupportedError, contracts
from halfbyte.contracts.options import changed, check_choice, check_name, error_name

NAMES = sorted(contracts.CONTRACTS)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_option_lists_the_known(name: str) -> None:
    make = contracts.CONTRACTS[name]
    known = ", ".join(sorted(make.__kwdefaults__ or ["none"]))
    with pytest.raises(UnknownNameError, match=rf"^unknown option of {name} 'colour'; known: {known}$"):
        make(colour="red")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("torchao", {"scaling_mode": "round"}, "scaling_mode of torchao 'round'; known: ceil, even, floor, rceil"),
        ("torchao", {"mode": "fp4"}, "mode of torchao 'fp4'; known: .*nvfp4"),
        ("compressed_tensors", {"minmax": "fp64"}, "minmax of compressed_tensors 'fp64'; known: fp32, input dtype"),
        ("compressed_tensors", {"mode": "mx"}, "mode of compressed_tensors 'mx'; known: mxfp4, nvfp4"),
        ("modelopt", {"mode": "min"}, "mode of modelopt 'min'; known: four_over_six, fp8_sweep, fp8_sweep_kernel, max"),
        ("fouroversix", {"rule": "static_5"}, "rule of fouroversix 'static_5'; known: abs_max, mae, mse, static_4"),
        ("fouroversix", {"dtype": "fp4"}, "dtype of fouroversix 'fp4'; known: mxfp4, nvfp4"),
        ("flashinfer", {"mode": "fast"}, "mode of flashinfer 'fast'; known: 4over6, ref, te"),
        ("flashinfer", {"mode": "4over6", "err_mode": "MAX"}, "4over6 error mode 'MAX'; known: MAE, MSE"),
        ("flashinfer", {"mode": "4over6", "e4m3_max": 240}, "e4m3_max is 448 or 256, not 240"),
        ("vllm", {"mode": "te"}, "mode of vllm 'te'; known: ref"),
        ("gguf", {"mode": "q4"}, "mode of gguf 'q4'; known: NVFP4.fp32_to_ue4m3, mxfp4"),
        ("qwantize", {"mode": "nvfp4"}, "mode of qwantize 'nvfp4'; known: mxfp4/naive, "),
        ("transformers", {"mode": "mx"}, "mode of transformers 'mx'; known: convert_moe_packed_tensors"),
        ("transformers", {"dtype": "fp8"}, "dtype of transformers 'fp8'; known: bf16, fp16, fp32"),
        ("miles", {"env": {"NVTE": "1"}}, "environment variable of miles 'NVTE'; known: NVTE_NVFP4_4OVER6"),
        ("transformer_engine", {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 1}, "e4m3_max is 448 or 256, not 1"),
    ],
)
def test_unknown_values_list_the_known(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        contracts.CONTRACTS[name](**options)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("transformer_engine", {"with_rht": True}, "with_rht needs columnwise=True"),
        ("flashinfer", {"mode": "te", "global_scale": 2.0}, "global_scale and ue8m0 belong to .* 'ref'"),
        ("flashinfer", {"mode": "4over6", "ue8m0": True}, "global_scale and ue8m0 belong to .* 'ref'"),
        ("flashinfer", {"per_token": True}, "mode 'ref' has no per_token form"),
        ("transformer_engine", {"tile": (16,)}, r"^tile is a pair such as \(1, 16\) or \(16, 16\), not \(16,\)$"),
        ("transformer_engine", {"tile": (1, 16, 1)}, "tile is a pair"),
        ("modelopt", {"k_max": 3}, "^k_max belongs to the mode quantize_mxfp4_to_nvfp4_lossless$"),
        ("modelopt", {"mode": "quantize_mxfp4_to_nvfp4", "k_max": 3}, "k_max belongs to the mode"),
    ],
)
def test_combinations_without_meaning(name: str, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        contracts.CONTRACTS[name](**options)


@pytest.mark.parametrize("name", NAMES)
def test_repr_of_defaults_is_the_bare_call(name: str) -> None:
    assert repr(contracts.CONTRACTS[name]()) == f"{name}()"


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("torchao", {"scaling_mode": "rceil", "two_level": True}, "torchao(scaling_mode='rceil')"),
        ("torchao", {"two_level": False}, "torchao(two_level=False)"),
        ("modelopt", {"mode": "max"}, "modelopt(mode='max')"),
        ("vllm", {"global_scale": 2.5}, "vllm(global_scale=2.5)"),
        ("flashinfer", {"mode": "te", "per_token": True}, "flashinfer(mode='te', per_token=True)"),
        ("fouroversix", {"rule": "mse", "block_2d": True}, "fouroversix(rule='mse', block_2d=True)"),
        ("compressed_tensors", {"minmax": "fp32"}, "compressed_tensors(minmax='fp32')"),
        ("transformer_engine", {"nvfp4_use_4over6": True}, "transformer_engine(nvfp4_use_4over6=True)"),
    ],
)
def test_repr_shows_what_was_changed(name: str, options: dict[str, Any], shown: str) -> None:
    contract = contracts.CONTRACTS[name](**options)
    assert repr(contract) == shown
    assert eval(shown, vars(contracts)) == contract  # the repr makes the same contract again


def test_changed_keeps_only_the_options_that_differ() -> None:
    given = {"two_level": False, "scaling_mode": "floor", "rules": {}}
    assert changed(contracts.torchao, given) == (("two_level", False),)


def test_error_name_takes_either_case() -> None:
    assert [error_name(mode) for mode in ("MAE", "mse", "Mse")] == ["mae", "mse", "mse"]


def test_checks_pass_in_silence() -> None:
    check_choice("never raised", True)
    check_name("kind", "a", ("a", "b"))


def test_modes_restrict_the_formats() -> None:
    for name, mode, formats in (
        ("compressed_tensors", "mxfp4", ["mxfp4"]),
        ("qwantize", "nvfp4/naive", ["nvfp4"]),
        ("gguf", "mxfp4", ["mxfp4"]),
        ("torchao", "nvfp4", ["nvfp4"]),
    ):
        assert list(contracts.CONTRACTS[name](mode=mode).rules) == formats


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("two", "^global_scale must be a number, not 'two'$"),
        ({}, "^global_scale must be a number, not {}$"),
        ([1.0, 2.0], r"^global_scale must be one number, not an array of shape \(2,\)$"),
        (0, "^global_scale must be positive and finite, not 0$"),
        (-1.0, "^global_scale must be positive and finite, not -1.0$"),
        (float("inf"), "^global_scale must be positive and finite, not inf$"),
        (float("nan"), "^global_scale must be positive and finite, not nan$"),
    ],
)
@pytest.mark.parametrize("name", ["flashinfer", "vllm"])
def test_a_global_scale_is_a_positive_number(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        contracts.CONTRACTS[name](global_scale=value)
