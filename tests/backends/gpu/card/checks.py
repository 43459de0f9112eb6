"""What only a card can show. Every check returns how many comparisons it made, and raises where one fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte.arrays import to_numpy
from halfbyte.backends.gpu import batch as gpu_batch
from halfbyte.layouts.swizzle import swizzle
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.card.short_forms import try_short_forms

PARTS = ("codes", "scales", "global_scale", "stored_scale")


def same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor, rows: slice = slice(None)) -> int:
    """Compare codes, scales and tensor-level numbers."""
    for part in PARTS:
        mine, wanted = getattr(got, part), getattr(expected, part)
        if wanted is None:
            assert mine is None, part
        elif part in ("codes", "scales"):
            assert_same_bits(to_numpy(mine)[rows], to_numpy(wanted))
        else:
            assert_same_bits(mine, wanted)
    return 1


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def short_divisions() -> int:
    """All 2**23 significands through the short forms of 1/x, x/6, x/2688 and x/1536."""
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    try_short_forms[((1 << 23) // 1024,)](out, B=1024, enable_fp_fusion=False)
    assert out.tolist() == [0, 0, 0, 0], out.tolist()
    return 4


METHODS = [hb.Amax(), hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), hb.Optimal(headroom=1)]
"""Methods whose scale follows from the amax, so that the reference can quantize some rows with it."""


def real_sizes() -> int:
    """Matrices of ordinary size, compared in full with the compiled CPU or reference backend on some rows."""
    done = 0
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        x = normal(512, 4096, dtype=dtype, seed=seed)
        x[7] *= 50
        x[9, :640] *= 1e-3
        amax = float(x.abs().max())
        for method in METHODS:
            got = hb.quantize(x, "nvfp4", method=method, backend="gpu")
            for rows in (slice(0, 16), slice(300, 308)):
                expected = hb.quantize(x[rows].cpu(), "nvfp4", method=method, global_amax=amax, backend="reference")
                done += same(got, expected, rows)
    return done


def huge() -> int:
    """More than 2**31 elements, compared on slices at the start, around 2**31 and at the end."""
    rows, width = 300_032, 7168
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 50_000):
        x[start : start + 50_000] = normal(min(50_000, rows - start), width, seed=start)
    amax = float(hb_amax(x))
    done = 0
    middle = (1 << 31) // width
    for method in METHODS:
        got = hb.quantize(x, "nvfp4", method=method, backend="gpu")
        for rows_ in (slice(0, 8), slice(middle - 4, middle + 4), slice(rows - 8, rows)):
            expected = hb.quantize(x[rows_].cpu(), "nvfp4", method=method, global_amax=amax, backend="reference")
            done += same(got, expected, rows_)
    for rows_ in (slice(0, 4), slice(middle - 2, middle + 2), slice(rows - 4, rows)):
        decoded = to_numpy(hb.dequantize(got, "bf16", backend="gpu")[rows_])
        expected = hb.quantize(x[rows_].cpu(), "nvfp4", method=METHODS[-1], global_amax=amax, backend="reference")
        assert_same_bits(decoded, to_numpy(hb.dequantize(expected, "bf16", backend="reference")))
        done += 1
    return done


def hb_amax(x: torch.Tensor) -> torch.Tensor:
    return gpu.amaxes(x.unsqueeze(0))[0]


def amaxes() -> int:
    """Against torch, on 3-D tensors and lists; NaN wins."""
    done = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = normal(5, 64, 208, dtype=dtype)
        x[3, 10, 100] = float("nan")
        expected = x.abs().amax(dim=(1, 2)).float()
        for given in (x, [part.clone() for part in x]):
            got = gpu.amaxes(given)
            assert got[3].isnan()
            assert_same_bits(got[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
            done += 1
    return done


def experts() -> int:
    """A 3-D weight, and a list of tensors of several sizes: each expert equals what it gives alone."""
    done = 0
    x = normal(7, 48, 352)
    several = [normal(rows, width, seed=rows) for rows, width in ((3, 16), (100, 512), (16, 7168), (1, 32))]
    for method in METHODS:
        for shared in (False, True):
            for given in (x, list(x.clone().unbind()), several):
                if isinstance(given, list):
                    given = [part.clone() for part in given]
                amax = max(float(part.abs().max()) for part in given) if shared else None
                for got, part in zip(gpu.quantize_experts(given, method=method, shared=shared), given, strict=True):
                    expected = hb.quantize(part.cpu(), "nvfp4", method=method, global_amax=amax, backend="reference")
                    done += same(got, expected)
    return done


def memory() -> int:
    """Strided rows, transposed and unaligned input, given outputs: the same bits as from a plain copy."""
    done = 0
    base = normal(64, 1024)
    views = [base[:, :512], base[::2], base[:, 16:528], base[:, 5:517], base.T[:512, :64], base[3:, :96]]
    for method in METHODS:
        for view in views:
            expected = hb.quantize(view.contiguous().clone(), "nvfp4", method=method, backend="gpu")
            done += same(hb.quantize(view, "nvfp4", method=method, backend="gpu"), expected)
            out = hb.quantize(torch.zeros_like(view.contiguous()), "nvfp4", method=method, backend="gpu")
            got = hb.quantize(view, "nvfp4", method=method, backend="gpu", out=out)
            assert got.codes is out.codes
            done += same(got, expected)
    return done


def swizzled() -> int:
    """Scale bytes in tiles equal the tiles of the plain ones."""
    done = 0
    for rows, width in ((128, 64), (130, 80), (1, 16), (300, 2064)):
        x = normal(rows, width)
        plain = hb.quantize(x, "nvfp4", backend="gpu")
        codes, scales, _ = gpu.quantize_swizzled(x)
        assert_same_bits(codes, plain.codes)
        assert_same_bits(to_numpy(scales), swizzle(to_numpy(plain.scales)))
        done += 1
    return done


def graphs() -> int:
    """Captured once, replayed on other data: no host synchronisation in between."""
    done = 0
    x = normal(256, 1024)
    for method in METHODS:
        out = hb.quantize(x, "nvfp4", method=method)
        values = torch.empty_like(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = hb.quantize(x, "nvfp4", method=method, out=out)
            hb.dequantize(captured, "bf16", out=values)
        x.copy_(normal(256, 1024, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        expected = hb.quantize(x.clone(), "nvfp4", method=method)
        done += same(captured, expected)
        assert_same_bits(values, hb.dequantize(expected, "bf16"))
        done += 1
    return done


def compiled() -> int:
    """The operators under torch.compile, without a graph break."""
    import halfbyte.torch_ops

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        codes, scales, _, stored = torch.ops.halfbyte.quantize(y, "nvfp4", "transformer_engine", "four_six:mae:448")
        back = torch.ops.halfbyte.dequantize(
            codes, scales, stored, y.shape[-1], "nvfp4", "transformer_engine", torch.bfloat16, "four_six:mae:448"
        )
        moved: torch.Tensor = back + 1
        return moved

    def whole(x: torch.Tensor, method: hb.methods.Method) -> tuple[hb.QuantizedTensor, torch.Tensor]:
        q = hb.quantize(x * 2, "nvfp4", method=method)
        return q, torch.as_tensor(hb.dequantize(q, "bfloat16")) + 1

    assert halfbyte.torch_ops.quantize is not None
    x = normal(64, 256)
    assert_same_bits(torch.compile(step, fullgraph=True)(x), step(x))
    done = 1
    for method in METHODS:
        torch._dynamo.reset()
        traced = torch.compile(whole, fullgraph=True, dynamic=True)
        for rows in (16, 48):
            (got, values), (expected, wanted) = traced(x[:rows], method), whole(x[:rows], method)
            done += same(got, expected)
            assert_same_bits(values, wanted)
    return done


def casts() -> int:
    """MXFP4 blocks as NVFP4: every scale byte, against powers of two in numpy."""
    from halfbyte.codec.element import encode
    from halfbyte.formats import E4M3

    done = 0
    generator = torch.Generator("cuda").manual_seed(0)
    large = gpu_batch.HINTED // 16 + 2 * 256  # blocks of a tensor that takes the other form of the kernel
    for blocks in (256, large):
        codes = torch.randint(0, 256, (blocks // 4, 16 * 4), generator=generator, device="cuda", dtype=torch.uint8)
        scales = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(blocks // 256).reshape(blocks // 4, 4)
        for anchor in (127, 119, 0, 254):
            out, bytes_, outside = gpu.cast_scales(codes, scales, anchor)
            exponent = np.arange(256) - anchor
            expected = encode(np.ldexp(np.float32(1), np.clip(exponent, -30, 30)).astype(np.float32), E4M3)
            expected = np.where(exponent < -9, 0, expected).astype(np.uint8)
            assert_same_bits(to_numpy(out), to_numpy(codes))
            assert_same_bits(to_numpy(bytes_).reshape(-1), np.tile(np.repeat(expected, 2), blocks // 256))
            counts = np.array([(exponent > 8).sum(), (exponent < -9).sum()]) * (blocks // 256)
            assert outside.tolist() == counts.tolist()
            done += 1
    return done


def refusal(attempt: Callable[[], object]) -> str:
    """The message with which an attempt is refused."""
    try:
        attempt()
    except hb.HalfbyteError as error:
        return str(error)
    return "nothing was refused"


def refusals() -> int:
    """Bad input is refused before anything is launched."""
    x = normal(32, 64)
    good = hb.quantize(x, "nvfp4")
    unaligned = torch.zeros(32 * 32 + 16, dtype=torch.uint8, device="cuda")[1 : 32 * 32 + 1].view(32, 32)
    inside = x.view(torch.uint8).view(-1)[: 32 * 32].view(32, 32)

    def with_codes(codes: torch.Tensor) -> hb.QuantizedTensor:
        return dataclasses.replace(good, codes=codes)

    attempts: list[tuple[Callable[[], object], str]] = [
        (lambda: hb.quantize(x.cpu(), "nvfp4", backend="gpu"), "CUDA device"),
        (lambda: hb.quantize(x.cpu().float().numpy(), "nvfp4", backend="gpu"), "not numpy"),
        (lambda: hb.quantize(x.int(), "nvfp4", backend="gpu"), "dtype"),
        (lambda: hb.quantize(x, "nvfp4", out=with_codes(torch.zeros(32, 32, dtype=torch.uint8))), "is on cpu"),
        (lambda: hb.quantize(x, "nvfp4", out=with_codes(unaligned)), "multiple of 16"),
        (lambda: hb.quantize(x, "nvfp4", out=with_codes(inside)), "overlaps"),
        (lambda: hb.quantize(x, "nvfp4", global_amax=torch.ones(3, device="cuda")), "has 3 values"),
        (lambda: gpu.quantize_experts([x, x.float()]), "tensor 1"),
        (lambda: gpu.quantize_experts([x[:, 8:24]]), "contiguous"),
        (lambda: gpu.quantize_experts(x), "3-D"),
    ]
    for attempt, message in attempts:
        refused = refusal(attempt)
        assert message in refused, f"{message!r} was expected, not {refused!r}"
    return len(attempts)


CHECKS: dict[str, Callable[[], int]] = {
    check.__name__: check
    for check in (
        short_divisions,
        real_sizes,
        amaxes,
        experts,
        memory,
        swizzled,
        graphs,
        compiled,
        casts,
        refusals,
        huge,
    )
}
