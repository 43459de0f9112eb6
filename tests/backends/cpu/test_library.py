"""The compiled library apart from its kernels: threads, strides, build flags, instruction sets, a missing library."""

from __future__ import annotations

import ctypes
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.backends.cpu import library as cpu_library
from halfbyte.backends.cpu.library import ISAS, choose_isa, load_library, over_ranges, pointer
from halfbyte.backends.cpu.structs import STRUCTURES
from halfbyte.backends.threads import thread_count
from halfbyte.testing import assert_same_bits
from tests.backends.cases import Case, make_input, served_cases
from tests.samples import E2M1_VALUES, F32, f32, float8, gaussian

ROOT = Path(__file__).parents[3]


def library() -> ctypes.CDLL:
    loaded = load_library()
    assert loaded is not None, "the compiled kernels are missing"
    return loaded


def assert_same(a: hb.QuantizedTensor, b: hb.QuantizedTensor) -> None:
    for part in ("codes", "scales", "stored_scale", "global_scale"):
        left, right = getattr(a, part), getattr(b, part)
        assert (left is None) == (right is None)
        if right is not None:
            assert_same_bits(to_numpy(left), to_numpy(right))


# --- threads ---


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 102])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_ranges_cover_every_item_once_in_order(count: int, workers: int) -> None:
    ranges = over_ranges(lambda start, stop: (start, stop), count, cpu_library.RANGE_BYTES, workers)
    assert len(ranges) == min(workers, count)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(count))


def test_small_work_stays_on_one_thread() -> None:
    seen = over_ranges(lambda start, stop: threading.get_ident(), 100, 10, 7)
    assert seen == [threading.get_ident()]


SPLIT = [case for case in served_cases() if case.method in ("amax", "mae 448", "mse 256 fast", "weighted", "optimal")]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_threads_never_change_a_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges have only a few blocks, so that every range has a remainder and several ranges have irregular blocks."""
    monkeypatch.setattr(cpu_library, "RANGE_BYTES", 64)
    for name in ("block scales", "nonfinite") if case.method == "amax" else ("block scales",):
        x = make_input(name, "bf16")
        monkeypatch.setenv("HALFBYTE_THREADS", "1")
        one = case.quantize(x, "cpu")
        for count in ("2", "3", "7"):
            monkeypatch.setenv("HALFBYTE_THREADS", count)
            assert_same(case.quantize(x, "cpu"), one)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_never_change_a_bit_of_a_large_tensor(threads: int) -> None:
    x = gaussian(509, 1040)
    x[100:103] = 0
    for method in (hb.Amax(), hb.FourSix()):
        one, many = (hb.quantize(x, "nvfp4", method=method, backend="cpu", threads=n) for n in (1, threads))
        assert_same(many, one)
        for dtype in ("float32", "bfloat16"):
            assert_same_bits(hb.dequantize(many, dtype, threads=threads), hb.dequantize(one, dtype, threads=1))
    assert_same(hb.quantize(x, "mxfp8", threads=threads), hb.quantize(x, "mxfp8", backend="reference"))


def test_threads_by_argument_then_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", "5")
    assert (thread_count(), thread_count(3)) == (5, 3)
    monkeypatch.delenv("HALFBYTE_THREADS")
    assert thread_count() >= 1


@pytest.mark.parametrize("bad", ["0", "-1", "two", "1.5", ""])
def test_a_bad_number_of_threads_in_the_environment(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", bad)
    with pytest.raises(hb.InputError, match=f"threads must be a whole number of at least 1, not {bad!r}"):
        hb.quantize(gaussian(2, 16), "nvfp4", backend="cpu")


@pytest.mark.parametrize("bad", [0, -3, 1.5, "two", [2]])
def test_a_bad_number_of_threads_as_an_argument(bad: Any) -> None:
    with pytest.raises(
        hb.InputError, match="threads must be a whole number of at least 1, not " + re.escape(repr(bad))
    ):
        hb.quantize(gaussian(2, 16), "nvfp4", backend="cpu", threads=bad)


# --- addresses and strides ---


def laid_out(kind: str, x: Any) -> Any:
    """The same numbers at other addresses."""
    match kind:
        case "transposed":
            return np.ascontiguousarray(x.T).T
        case "fortran":
            return np.asfortranarray(x)
        case "every other column":
            return np.stack([x, -x], axis=-1).reshape(x.shape[0], -1)[:, ::2]
        case "rows of a wider matrix":
            return np.concatenate([x, x], axis=1)[:, : x.shape[1]]
        case "backwards":
            return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
        case "read-only":
            copy = x.copy()
            copy.setflags(write=False)
            return copy
        case "unaligned":
            raw = np.zeros(x.nbytes + 1, np.uint8)
            raw[1:] = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
            return raw[1:].view(x.dtype).reshape(x.shape)
    raise KeyError(kind)


KINDS = ["transposed", "fortran", "every other column", "rows of a wider matrix", "backwards", "read-only", "unaligned"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_change_no_bit(kind: str, dtype: str) -> None:
    x = make_input("block scales", dtype)
    there = laid_out(kind, x)
    assert_same_bits(np.ascontiguousarray(there), x)
    before = there.copy()
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        expected = hb.quantize(x, format, backend="reference")
        assert_same(hb.quantize(there, format, backend="cpu"), expected)
    for method in (hb.FourSix(), hb.Optimal()):
        assert_same(hb.quantize(there, "nvfp4", method=method, backend="cpu"),
                    hb.quantize(x, "nvfp4", method=method, backend="reference"))  # fmt: skip
    assert_same_bits(there, before)


def test_a_broadcast_row() -> None:
    row = gaussian(64)
    assert_same(
        hb.quantize(np.broadcast_to(row, (5, 64)), "nvfp4", backend="cpu"),
        hb.quantize(np.tile(row, (5, 1)), "nvfp4", backend="reference"),
    )


def test_leading_axes_of_a_strided_tensor() -> None:
    x = gaussian(4, 3, 2, 32).transpose(2, 0, 1, 3)[:, ::-1]
    got = hb.quantize(x, "nvfp4", backend="cpu")
    assert to_numpy(got.codes).shape == (2, 4, 3, 16)
    assert_same(got, hb.quantize(x.copy(), "nvfp4", backend="reference"))


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8", "i4"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(hb.InputError, match="cannot quantize dtype"):
        hb.quantize(np.ones((2, 16), dtype), "nvfp4", backend="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors(dtype: torch.dtype) -> None:
    x = torch.from_numpy(gaussian(32, 48)).to(dtype)
    for tensor in (x, x.T.contiguous().T, x[::2], x.clone().requires_grad_()):
        same = to_numpy(tensor.contiguous())
        got = hb.quantize(tensor, "nvfp4", backend="cpu")
        assert isinstance(got.codes, torch.Tensor)
        assert_same(got, hb.quantize(same, "nvfp4", backend="reference"))
        values = hb.dequantize(got, dtype, "cpu")
        assert isinstance(values, torch.Tensor)
        assert values.dtype == dtype
        assert_same_bits(values, hb.dequantize(got, dtype, "reference"))


def test_pointers_of_strided_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="only contiguous arrays"):
        pointer(np.zeros((4, 4))[:, ::2])


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_strided_codes_and_scales_decode_alike(part: str) -> None:
    q = hb.quantize(gaussian(8, 64), "nvfp4", backend="reference")
    expected = hb.dequantize(q, backend="reference")
    parts: dict[str, Any] = {"codes": q.codes, "scales": q.scales}
    for kind in ("transposed", "every other column", "backwards"):
        parts[part] = laid_out(kind, to_numpy(getattr(q, part)))
        strided = hb.QuantizedTensor(q.format, q.shape, **parts, global_scale=q.global_scale,
                                     stored_scale=q.stored_scale, contract=q.contract)  # fmt: skip
        assert_same_bits(hb.dequantize(strided, backend="cpu"), expected)


@pytest.mark.parametrize(
    ("part", "dtype"), [("codes", "i8"), ("scales", "u4"), ("scales", ml_dtypes.float8_e4m3fn), ("stored_scale", "f8")]
)
def test_parts_of_another_dtype_are_refused_or_read_right(part: str, dtype: Any) -> None:
    """A kernel that reads eight bytes instead of one would get wrong numbers, or read beyond the end."""
    q = hb.quantize(gaussian(8, 64), "nvfp4", backend="reference")
    parts: dict[str, Any] = {name: to_numpy(getattr(q, name)) for name in ("codes", "scales", "stored_scale")}
    given = parts[part]
    parts[part] = given.view(dtype) if given.itemsize == np.dtype(dtype).itemsize else given.astype(dtype)
    try:
        other = hb.QuantizedTensor(q.format, q.shape, **parts, global_scale=q.global_scale, contract=q.contract)
        got = hb.dequantize(other, backend="cpu")
    except hb.InputError:
        return
    assert_same_bits(got, hb.dequantize(q, backend="reference"))


# --- how it was built ---

FORBIDDEN = ["-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-freciprocal-math",
             "-ffinite-math-only", "-march=native", "-ffp-contract=fast", "-ffp-contract=on"]  # fmt: skip


def test_the_library_was_built_without_contraction_and_fast_math() -> None:
    flags = library().hb_build_flags().decode().split()
    assert "-ffp-contract=off" in flags
    assert "-fno-fast-math" in flags
    assert not set(flags) & set(FORBIDDEN)


def test_the_build_gives_these_flags_to_every_file() -> None:
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines()
    code = "\n".join(line.split("#")[0] for line in lines)
    assert "-ffp-contract=off" in (re.search(r"set\(HB_FLAGS ([^)]*)\)", code) or [""])[0]
    assert not [flag for flag in FORBIDDEN if flag in code]
    for target in re.findall(r"add_library\((\S+)", code):
        assert re.search(rf"target_compile_options\({re.escape(target)} PRIVATE \${{HB_FLAGS}}", code), target


def test_the_library_runs_where_manylinux_2_17_does() -> None:
    """The tag that CONTRIBUTING.md promises for wheels: symbols of the system's libraries no newer than these."""
    newest = {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7)}
    path = cpu_library.library_path()
    assert path is not None
    needed = {
        (kind.decode(), tuple(map(int, version.split(b"."))))
        for kind, version in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_([\d.]+)(?=\0)", path.read_bytes())
    }
    assert ("GLIBC", (2, 14)) in needed or ("GLIBC", (2, 17)) in needed, "the symbols' versions were not found"
    assert {(kind, version) for kind, version in needed if version > newest[kind]} == set()


def test_products_are_rounded_before_they_are_added() -> None:
    a, c = np.float32(1 + 2.0**-12), np.float32(-1)
    fused = np.float32(np.float64(a) * np.float64(a) + np.float64(c))  # exact before the only rounding
    twice = np.float32(np.float32(a * a) + c)
    assert fused != twice
    multiply_add = library().hb_multiply_add
    assert np.float32(multiply_add(*(ctypes.c_float(float(value)) for value in (a, a, c)))) == twice


def objective(x: F32, weights: F32, scale: F32, *, fused: bool) -> F32:
    """Weighted squared error of blocks (n, 16) with one scale each; each step rounds once (fused) or twice."""
    grid = np.array(E2M1_VALUES, np.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    q = np.copysign(grid[np.searchsorted(middles, np.abs(x / scale[:, None]))], x).astype(np.float32)
    total = np.zeros(x.shape[0], np.float32)
    for i in range(16):
        if fused:
            d = (q[:, i].astype(np.float64) * scale - x[:, i]).astype(np.float32)
            total = (weights[:, i].astype(np.float64) * (d * d) + total).astype(np.float32)
        else:
            d = q[:, i] * scale - x[:, i]
            total = total + weights[:, i] * (d * d)
    return total


def balanced_weights(x: F32, one: F32, two: F32) -> tuple[F32, Any]:
    """Weights for which two scales have the same error except for rounding, and the blocks that have such weights."""
    weights = np.random.default_rng(4).uniform(0.5, 1, x.shape).astype(np.float32)
    largest, others = np.zeros_like(weights), weights.copy()
    largest[:, 0], others[:, 0] = 1, 0
    d1, d2, e1, e2 = (
        objective(x, w, scale, fused=False).astype(np.float64) for w in (largest, others) for scale in (one, two)
    )
    weight = (e2 - e1) / np.where(d1 == d2, np.nan, d1 - d2)  # e1 + w·d1 = e2 + w·d2
    usable = (weight > 0.5) & (weight < 2)
    weights[:, 0] = np.where(usable, weight, 1)
    return weights, usable


@pytest.mark.parametrize("isa", [name for name, number in ISAS.items() if number <= library().hb_best_isa()])
def test_no_kernel_contracts(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that balance two scales to the last bit, fused arithmetic would pick another scale in some blocks.

    hb_multiply_add is compiled without FMA instructions, so only the kernels themselves can show a contraction.
    """
    monkeypatch.setenv("HALFBYTE_ISA", isa)
    x = gaussian(4000, 16)
    row = np.concatenate([f32(2688, *[0.0] * 15), x.reshape(-1)])  # the first block makes the global scale 1
    low = to_numpy(hb.quantize(row, "nvfp4", method=hb.Optimal(headroom=1), backend="cpu").scales)[1:]
    one, two = float8(low, "e4m3"), float8(low + np.uint8(1), "e4m3")
    weights, usable = balanced_weights(x, one, two)
    twice, once = (
        objective(x, weights, two, fused=fused) < objective(x, weights, one, fused=fused) for fused in (False, True)
    )
    telling = usable & (twice != once)
    method = hb.Optimal(np.concatenate([np.ones(16, np.float32), weights.reshape(-1)]), headroom=1)
    got, expected = (hb.quantize(row, "nvfp4", method=method, backend=name) for name in ("cpu", "reference"))
    assert_same(got, expected)
    chosen = to_numpy(expected.scales)[1:]
    telling &= chosen == np.where(twice, low + 1, low)  # no third scale is better
    assert telling.sum() >= 20, f"only {telling.sum()} blocks would show a contraction"


# --- which instruction set ---


class OldMachine:
    """A library on a machine with AVX2 at most."""

    @staticmethod
    def hb_best_isa() -> int:
        return 1


def test_an_unknown_instruction_set_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", "sse9")
    with pytest.raises(hb.UnknownNameError, match="HALFBYTE_ISA 'sse9'; known: avx2, avx512, portable"):
        hb.quantize(gaussian(2, 16), "nvfp4", backend="cpu")


def test_an_instruction_set_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = OldMachine()
    monkeypatch.setenv("HALFBYTE_ISA", "avx512")
    with pytest.raises(hb.InputError, match="HALFBYTE_ISA=avx512, but this machine does not have it"):
        choose_isa(old)
    monkeypatch.setenv("HALFBYTE_ISA", "portable")
    assert choose_isa(old) == 0
    monkeypatch.delenv("HALFBYTE_ISA")
    assert choose_isa(old) == 1


# --- no library, or another one ---


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_library, "library_path", lambda: None)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_without_a_library_the_reference_serves_and_says_so_once() -> None:
    x = gaussian(4, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [hb.quantize(x, "nvfp4") for _ in range(3)]
        values = [hb.dequantize(q) for q in results]
    assert [str(warning.message) for warning in caught] == [
        "halfbyte runs its slow numpy reference: the compiled kernels are missing, because no C++ compiler was there "
        "when it was installed. Install one (or a wheel) and reinstall halfbyte."
    ]
    assert [warning.category for warning in caught] == [RuntimeWarning]
    expected = hb.quantize(x, "nvfp4", backend="reference")
    assert_same(results[-1], expected)
    assert_same_bits(values[-1], hb.dequantize(expected, backend="reference"))


@pytest.mark.usefixtures("without_library")
@pytest.mark.filterwarnings("ignore:halfbyte runs its slow")
def test_without_a_library_the_backend_named_cpu_raises() -> None:
    with pytest.raises(
        hb.UnsupportedError, match=r"backend cpu cannot do this: the compiled kernels are not installed"
    ):
        hb.quantize(gaussian(2, 16), "nvfp4", backend="cpu")
    q = hb.quantize(gaussian(2, 16), "nvfp4")
    with pytest.raises(hb.UnsupportedError, match="the compiled kernels are not installed"):
        hb.dequantize(q, backend="cpu")


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_library_from_other_sources_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*STRUCTURES[name]._fields_, ("more", ctypes.c_int32)]

    monkeypatch.setitem(STRUCTURES, name, Longer)
    with pytest.raises(
        ImportError, match=r"libhalfbyte_cpu.* was built from other sources than this package; reinstall"
    ):
        load_library.__wrapped__()
