"""The searches and the transform build for Hopper and Blackwell without a card, and fuse only what they ask for."""

from __future__ import annotations

import re

import pytest

from tests.backends.gpu.compiled.builds import CAPABILITIES, Build, compile_for
from tests.backends.gpu.compiled.search_builds import BUILDS, LONG

FUSED = {
    "sweep": 80,  # sixteen elements: three to round a tried one, two for its code
    "sweep fused": 80,
    "static 4over6": 128,
    "qwantize nvfp4 hessian": 256,  # the naive scale is measured with fused sums; candidates are not
    "survey": 96,  # two loops over scales, three for each element
    "survey float32 in rows": 96,
    "survey of all blocks": 64,  # two where the sign is rounded along
    "survey of a sample": 64,
    "survey after a sample": 96,
    "survey weighted": 64,
    "mxfp4 optimal": 336,  # three scales, five per element; two per code, and four where scale by scale is tried
    "mxfp4 optimal float32": 576,  # 32 elements; squares are added by themselves
}
"""Fused operations that a kernel asks for; none elsewhere."""


def fused(ptx: str) -> int:
    """Fused single-precision operations; Blackwell's come in pairs."""
    return len(re.findall(r"\bfma\.rn\.f32\b", ptx)) + 2 * len(re.findall(r"\bfma\.rn\.f32x2\b", ptx))


def check(build: Build, capability: int, expected: int) -> None:
    """The kernel builds, loses no subnormal numbers, and fuses as many operations as expected."""
    compiled = compile_for(build, capability)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert f".target sm_{capability}" in ptx
    assert ".ftz" not in ptx.replace("sqrt.approx.ftz.f32", ""), "subnormal numbers would be lost"  # bounds only
    assert fused(ptx) == expected


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", BUILDS)
def test_builds(name: str, capability: int) -> None:
    check(BUILDS[name], capability, FUSED.get(name, 0))


@pytest.mark.parametrize("name", LONG)
def test_blocks_of_32_through_a_hessian_build(name: str) -> None:
    check(LONG[name], 90, 0)


def test_contraction_would_be_seen() -> None:
    """With contraction the quarters of the transform would be fused with their sums."""
    assert fused(compile_for(BUILDS["transform float32"], 90, fuse=True).asm["ptx"]) > 0
