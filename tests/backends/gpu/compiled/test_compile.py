"""Every kernel builds for Hopper and Blackwell without a card, and its PTX holds what was promised."""

from __future__ import annotations

import re

import pytest

from tests.backends.gpu.compiled.builds import BUILDS, CAPABILITIES, HESSIAN, Build, compile_for

HARDWARE_FP4 = ("nvfp4", "nvfp4 float32", "nvfp4 tiles", "4over6", "4over6 fast", "4over6 tiles")
"""Kernels whose codes come from the FP4 conversion on Blackwell."""

SEPARATE = ("nvfp4 wrapping", "dequantize float32", "dequantize mxfp4", "mxfp8", "mxfp4 nearest", "amax")
"""Kernels without a fused operation of their own: any in their PTX would be the compiler's, and another bit."""


def fused(ptx: str) -> int:
    """Fused single-precision operations; a division brings its own, which are no contraction."""
    return len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32", ptx))


def check(name: str, capability: int) -> None:
    """The kernel builds, loses no subnormal numbers, and has the conversions that it should have."""
    compiled = compile_for(BUILDS[name], capability)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert f".target sm_{capability}" in ptx
    estimates = ptx.replace("rcp.approx.ftz.f32", "").replace("sqrt.approx.ftz.f32", "")  # refined, or bounds only
    assert ".ftz" not in estimates, "subnormal numbers would be lost"
    if name in HARDWARE_FP4:
        assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == (capability >= 100)
    if name == "mxfp8":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    if name in SEPARATE:
        assert fused(ptx) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", BUILDS)
def test_builds(name: str, capability: int) -> None:
    check(name, capability)


def test_products_and_sums_of_a_quadratic_form_stay_apart() -> None:
    """136 products are added in turn; with contraction on, the compiler would fuse them: so the test can fail."""
    build = Build(BUILDS["hessian"].kernel, {**HESSIAN, "WRAPS": True, "TIE": 1}, 1)
    assert fused(compile_for(build, 90).asm["ptx"]) == 0
    small = Build(BUILDS["nvfp4 wrapping"].kernel, BUILDS["nvfp4 wrapping"].constants)
    assert fused(compile_for(small, 90).asm["ptx"]) == 0


def test_contraction_would_be_seen() -> None:
    build = BUILDS["nvfp4 wrapping"]
    assert fused(compile_for(build, 90, fuse=True).asm["ptx"]) > fused(compile_for(build, 90).asm["ptx"])
