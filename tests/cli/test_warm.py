"""`halfbyte warm`: what it compiles, that it finds it again, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.backends.gpu import operand, survey, usual_calls
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.dispatch import OWN, TENSOR, VALUE, quantization
from halfbyte.backends.gpu.launch import Matrix
from halfbyte.backends.gpu.warm import USUAL
from halfbyte.cli import app
from halfbyte.request import resolve


def test_what_is_compiled_once_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    arguments = ["warm", "--arch", "sm_90", "--format", "mxfp8", "--jobs", "1"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert f"cache folder: {tmp_path}" in first.output
    assert "sm_90  mxfp8 ocp amax bf16: 1 kernels, 1 compiled" in first.output
    assert "sm_90: 2 kernels compiled in" in first.output
    again = CliRunner().invoke(app, arguments)
    assert "mxfp8 ocp decoded to bf16: 1 kernels, all there" in again.output
    assert "sm_90: 0 kernels compiled in" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no CUDA device here; name a compute capability, such as --arch sm_90"),
        (["--arch", "hopper"], "unknown architecture 'hopper'"),
        (["--arch", "sm_80"], "unknown architecture 'sm_80': give one such as sm_90, sm_89 or newer"),
        (["--arch", "sm_90", "--format", "fp4"], "unknown format 'fp4'; known: "),
        (["--arch", "sm_90", "--dtype", "int8"], "unknown dtype 'int8'; known: bf16, fp16, fp32"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["warm", *arguments])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_kernels_are_those_that_a_card_launches(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4, whose programs need no tables on the card: every kernel of every source of an amax is among them."""
    monkeypatch.setattr(survey, "headroom_on", lambda headroom, device: torch.zeros(len(headroom)))  # no card here
    monkeypatch.setattr(operand, "capability_of", lambda index: (int(architecture[3:]) // 10, 0))
    calls = {call.title: call.kernels for call in usual_calls(architecture, ["nvfp4"], ["bf16", "fp32"])}
    for format, contract, method in USUAL:
        for dtype in ("bf16", "fp32") if format == "nvfp4" else ():
            request = resolve(format, contract, method, dtype=dtype, device="cuda")
            kernel = choose(request)
            assert isinstance(kernel, ChosenKernel)
            for rows, whose in ((1, OWN), (300, OWN), (4, VALUE), (4, TENSOR)):
                matrix = Matrix(rows, 64, 8, contiguous=True)
                made = quantization(kernel, request, matrix, rows, False, whose, torch.device("cuda", 0))
                missing = set(made.program.kernels()) - set(calls[f"{format} {contract} {request.method.name} {dtype}"])
                assert not missing
