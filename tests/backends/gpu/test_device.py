"""What the GPU backend does before a card is needed: refusals, tables, operators, the runner's exit code."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
import halfbyte.torch_ops
from halfbyte import contracts
from halfbyte.backends import BACKENDS, choose_backend
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.mx_tables import mx_table
from halfbyte.backends.protocol import Reason
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.formats import E2M1
from halfbyte.on_device import _check_apart, _check_out, device_of
from halfbyte.testing import assert_same_bits
from tests.backends.cases import every_case, make_input
from tests.backends.gpu import run_card

ROOT = Path(__file__).parents[3]
X = torch.linspace(-1, 1, 64).reshape(2, 32)
REQUEST = hb.backends.Request(
    hb.get_format("nvfp4"), contracts.transformer_engine(), hb.Amax(), (1, 16), "tensor", "bf16", device="cuda"
)


@pytest.mark.parametrize("name", ["gpu", "triton"])
@pytest.mark.parametrize(
    ("x", "message"), [(X, r"not on 'cpu'; move the tensor with \.cuda"), (X.numpy(), "not numpy arrays")]
)
def test_named_backend_refuses_what_is_not_on_a_card(x: torch.Tensor, message: str, name: str) -> None:
    with pytest.raises(hb.UnsupportedError, match=f"backend gpu cannot do this: .*{message}"):
        hb.quantize(x, "nvfp4", backend=name)


def test_decoding_is_refused_likewise() -> None:
    q = hb.quantize(X, "nvfp4")
    with pytest.raises(hb.UnsupportedError, match="CUDA device"):
        hb.dequantize(q, backend="gpu")


def test_cuda_requests_go_to_the_gpu_and_others_do_not() -> None:
    for name in ("auto", "gpu", "triton"):
        assert choose_backend(name, REQUEST) is BACKENDS["gpu"]
    assert not choose_backend("cpu", REQUEST).takes_tensors
    assert not choose_backend("auto", dataclasses.replace(REQUEST, device="cpu")).takes_tensors
    assert (device_of(X), device_of(X.numpy())) == ("cpu", "numpy")


def test_every_case_has_a_kernel() -> None:
    cases = every_case()
    assert {type(choose(case.request())) for case in cases} == {ChosenKernel}
    assert {case.contract.name for case in cases} == set(contracts.CONTRACTS) - {"transformers"}
    assert {case.method for case in cases} >= {"optimal", "weighted", "hessian", "descent"}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (hb.Optimal(np.ones(16, np.float32)), "knows no weights"),
        (hb.Hessian(np.eye(16, dtype=np.float32)[None], codes="descent"), "has nearest codes only"),
        (hb.Optimal(), None),
        (hb.Hessian(np.eye(16, dtype=np.float32)[None]), None),
    ],
)
def test_a_search_of_a_peer_takes_what_the_peer_has(method: hb.methods.Method, reason: str | None) -> None:
    """What the peer has not is refused by the reference as well, which "auto" then asks."""
    contract = contracts.qwantize(mode="nvfp4/optimal")
    found = choose(dataclasses.replace(REQUEST, contract=contract, method=method))
    assert isinstance(found, ChosenKernel) == (reason is None)
    if reason is not None:
        assert reason in str(found)
        with pytest.raises(hb.UnsupportedError):
            hb.quantize(X[:, :16], "nvfp4", contract, method)


def test_searches_that_no_kernel_knows_are_named() -> None:
    """A contract made by hand may bring functions of its own."""

    def keep(blocks: F32, naive: U8, method: hb.methods.Method) -> U8:
        return naive

    searching = contracts.qwantize(mode="nvfp4/optimal")
    rule = searching.rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    mine = dataclasses.replace(searching, rules={"nvfp4": dataclasses.replace(rule, scale_search=keep)})
    request = dataclasses.replace(REQUEST, contract=mine, method=hb.Optimal())
    assert "no GPU kernel knows the contract's scale search" in _refusal(request)
    rule = contracts.modelopt(mode="fp8_sweep").rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    mine = dataclasses.replace(mine, rules={"nvfp4": dataclasses.replace(rule, block_search=None)})
    request = dataclasses.replace(REQUEST, contract=mine, method=hb.Sweep())
    assert _refusal(request) == "method sweep has no GPU kernel here"


def _refusal(request: hb.backends.Request) -> str:
    found = choose(request)
    assert isinstance(found, Reason)
    return str(found)


def test_experts_of_a_transposing_contract_are_refused() -> None:
    with pytest.raises(hb.UnsupportedError, match="quantizes the transpose"):
        gpu.quantize_experts(X.reshape(2, 1, 32), contracts.transformer_engine(columnwise=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("contract", [contracts.ocp(), contracts.torchao(mode="mx"), contracts.gguf()], ids=repr)
def test_mx_tables_hold_the_rule(contract: contracts.Contract, dtype: str) -> None:
    rule = contract.rules["mxfp4"]
    assert isinstance(rule, MXRule)
    table = mx_table(rule, E2M1, dtype)
    x = np.abs(np.concatenate([make_input(name, dtype).reshape(-1) for name in ("bits", "wide", "subnormal")]))
    x = x[~np.isnan(x.astype(np.float32))]
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.int64)
    entry = bits
    if dtype == "fp32":
        bucket = bits >> 16
        entry = np.where(bits < 65536, 65536 + bits, 2 * bucket + (bits >= table.split[bucket]))
    with np.errstate(all="ignore"):
        byte, scale = rule.scale(x.astype(np.float32), dtype if rule.statistics == "input" else "fp32", E2M1)
        constant = scale if rule.nearest is not None else np.float32(1) / scale
    assert_same_bits(table.bytes[entry], byte)
    assert_same_bits(table.constants[entry], constant.astype(np.float32), any_nan=True)


def test_outputs_that_overlap_or_lie_elsewhere_are_refused() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    _check_apart(memory[:128], memory[128:], "the input")
    with pytest.raises(hb.InputError, match="out overlaps the input"):
        _check_apart(memory[:129], memory[128:], "the input")
    q = hb.quantize(X, "nvfp4")
    host = hb.quantize(X.numpy(), "nvfp4")
    with pytest.raises(hb.InputError, match="as a numpy array, but x is on cpu"):
        _check_out(host, X, REQUEST, (2, 32))
    strided = dataclasses.replace(q, codes=torch.zeros(2, 32, dtype=torch.uint8)[:, ::2])
    with pytest.raises(hb.InputError, match=r"out\.codes must be contiguous"):
        _check_out(strided, X, REQUEST, (2, 32))
    unaligned = dataclasses.replace(q, codes=memory[1:33].view(2, 16))
    with pytest.raises(hb.InputError, match="no multiple of 16"):
        _check_out(unaligned, X, REQUEST, (2, 32))
    with pytest.raises(hb.InputError, match=r"of shape \(2, 32\), but the result is nvfp4 of \(4, 32\)"):
        _check_out(q, X, REQUEST, (4, 32))


def test_experts_need_a_card() -> None:
    with pytest.raises(hb.UnsupportedError, match="CUDA device"):
        gpu.quantize_experts(X.reshape(2, 1, 32))
    with pytest.raises(hb.InputError, match=r"tensor 1 of shape .* needs a last axis that is a multiple of 16"):
        gpu.amaxes([X, X[:, :8]])


def test_operators_trace_and_agree() -> None:
    """On the CPU the operators take the same road; fake tensors have the shapes of the real ones."""
    arguments = (X, "nvfp4", "transformer_engine", "four_six:mae:448")
    torch.library.opcheck(torch.ops.halfbyte.quantize.default, arguments)
    codes, scales, multiplier, stored = torch.ops.halfbyte.quantize(*arguments)
    expected = hb.quantize(X, "nvfp4", method=hb.FourSix())
    assert_same_bits(codes, expected.codes)
    assert_same_bits(scales, expected.scales)
    back = torch.ops.halfbyte.dequantize(
        codes, scales, stored, 32, "nvfp4", "transformer_engine", torch.float32, "four_six:mae:448"
    )
    assert_same_bits(back, hb.dequantize(expected))
    assert multiplier.shape == ()
    empty = torch.ops.halfbyte.quantize(X, "mxfp4", "ocp")
    assert [part.numel() for part in empty[2:]] == [0, 0]
    with pytest.raises(hb.UnknownNameError, match="unknown method 'best'; known: amax"):
        torch.ops.halfbyte.quantize(X, "nvfp4", "transformer_engine", "best")
    assert halfbyte.torch_ops.quantize is not None


def test_runner_fails_without_a_card() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.gpu.run_card"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, torch.cuda.is_available()) == (1, False)
    assert "no CUDA device" in done.stderr


def test_the_work_for_a_card_can_be_listed() -> None:
    listed = run_card.tasks("", full=False, with_checks=True, part=(0, 1), deadline=1.0)
    assert {task.kind for task in listed} == {"search", "check", "golden", "matrix"}
