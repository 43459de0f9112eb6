"""backend= reaches every part of a cast: the reference runs no compiled code, unknown names are refused, bits agree."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends import ALIASES
from halfbyte.backends.cpu.repack import has_kernels
from halfbyte.casting.api import ALGORITHMS
from tests.casting.sources import random_source, source

SPREADS = (3, 17, 18, 25, 60)
PEERS = ("quantize_mxfp4_to_nvfp4", "quantize_mxfp4_to_nvfp4_lossless")


def every_cast(backend: str) -> Iterator[tuple[str, hb.QuantizedTensor | np.ndarray, hb.CastReport]]:
    """Casts of every kind: (what it is, result, report)."""
    for spread in SPREADS:
        for shape in ((6, 96), (3, 41), (2, 4, 64)):
            q = random_source(np.random.default_rng(spread), spread, shape)
            for algorithm in ALGORITHMS:
                yield f"{spread} {shape} {algorithm}", *hb.cast(q, "nvfp4", algorithm, backend=backend)
            if shape[-1] % 32 == 0:
                for mode in PEERS:
                    contract = hb.contracts.modelopt(mode=mode)
                    yield f"{spread} {shape} {mode}", *hb.cast(q, "nvfp4", contract=contract, backend=backend)
            yield f"{spread} {shape} bfloat16", *hb.cast(q, "bfloat16", backend=backend)
        x = np.random.default_rng(spread).standard_normal((4, 64)).astype(np.float32)
        nvfp4 = hb.quantize(x, "nvfp4", backend="reference")
        for algorithm in ("optimal", "requantize"):
            yield f"to mxfp4 {algorithm}", *hb.cast(nvfp4, "mxfp4", algorithm, backend=backend)
    threes = source(np.array([[0, -18]]), np.resize(np.array([3, 5, 7, 11, 13, 15]), 64)[None])
    yield "3·2^m", *hb.cast(threes, "nvfp4", backend=backend)


def digests(backend: str) -> list[str]:
    """One line for each cast: what it is, and a hash of its bytes and its report."""
    lines = []
    for name, result, report in every_cast(backend):
        parts = [np.asarray(result)] if isinstance(result, np.ndarray) else [
            np.asarray(part)
            for part in (result.codes, result.scales, result.global_scale, result.stored_scale)
            if part is not None
        ]  # fmt: skip
        whole = hashlib.sha256(b"".join(part.tobytes() for part in parts) + str(report).encode()).hexdigest()
        lines.append(f"{name}: {whole}")
    return lines


PROGRAM = """
import ctypes

class Refused:
    def __init__(self, *arguments, **options):
        raise AssertionError("a compiled library was loaded")

import numpy, ml_dtypes, hypothesis
from tests.casting.test_backends import digests
ctypes.CDLL = Refused
print(*digests("reference"), sep="\\n")
"""


def test_the_reference_runs_no_compiled_code_and_gives_the_same_bits() -> None:
    assert has_kernels()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = digests("cpu")
    assert done.stdout.splitlines() == expected == digests("auto")


def test_the_proof_would_see_compiled_code() -> None:
    program = PROGRAM.replace('digests("reference")', 'digests("auto")')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "a compiled library was loaded" in done.stderr


@pytest.mark.parametrize("target", ["nvfp4", "bfloat16"])
def test_an_unknown_backend_is_refused(target: str) -> None:
    q = random_source(np.random.default_rng(0), 3)
    with pytest.raises(hb.UnknownNameError, match="unknown backend 'nobody'; known: auto, cpu, "):
        hb.cast(q, target, backend="nobody")


@pytest.mark.parametrize("backend", ["gpu", *ALIASES])
def test_a_device_backend_takes_no_numpy_arrays(backend: str) -> None:
    q = random_source(np.random.default_rng(0), 3)
    with pytest.raises(hb.HalfbyteError, match=rf"w: backend {backend} takes torch tensors .* choose backend='auto'"):
        hb.cast(q, "nvfp4", backend=backend, name="w")


def test_without_kernels_cpu_is_refused_and_auto_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    q = random_source(np.random.default_rng(0), 3)
    monkeypatch.setattr("halfbyte.backends.cpu.repack.has_kernels", lambda: False)
    with pytest.raises(hb.HalfbyteError, match="installed without its kernels; choose 'reference'"):
        hb.cast(q, "nvfp4", backend="cpu")
    assert hb.cast(q, "nvfp4")[1].label == "bit-exact"
