"""The cases of the bit-identity tests: contracts and their variants, methods, inputs. This file contains no test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends import Request
from halfbyte.backends.cpu.backend import Cpu
from halfbyte.contracts.spec import DecodeRule, NVFP4Rule, Scaling, Tile
from tests.samples import E2M1_VALUES, F32

Matrix = npt.NDArray[Any]

VARIANTS: list[hb.contracts.Contract] = [
    contracts.ocp(),
    contracts.transformer_engine(),
    contracts.transformer_engine(columnwise=True, with_rht=True),
    contracts.miles(),
    contracts.modelopt(),
    contracts.modelopt(mode="max"),
    contracts.compressed_tensors(),
    contracts.compressed_tensors(minmax="fp32"),
    contracts.torchao(),
    contracts.torchao(two_level=False, scaling_mode="even"),
    contracts.torchao(mode="mx", scaling_mode="ceil"),
    contracts.torchao(mode="mx", scaling_mode="rceil"),
    contracts.fouroversix(),
    contracts.fouroversix(rule="static_4"),
    contracts.qwantize(),
    contracts.flashinfer(),
    contracts.flashinfer(global_scale=448.0),
    contracts.flashinfer(mode="te"),
    contracts.flashinfer(mode="4over6"),
    contracts.flashinfer(mode="4over6", per_token=True),
    contracts.vllm(),
    contracts.vllm(global_scale=3e30),
    contracts.gguf(),
    contracts.transformers(),
]

PEER_VARIANTS: list[hb.contracts.Contract] = [
    contracts.fouroversix(),
    contracts.modelopt(),
    contracts.qwantize(mode="nvfp4/optimal"),
    contracts.qwantize(mode="mxfp4/optimal"),
    contracts.ocp(),
    contracts.gguf(),
]
"""Contracts that have their own searches, and variants that only the compiled backend runs."""

FOUR_SIX = [hb.FourSix(error, top, fast) for error in ("mae", "mse") for top in (448, 256) for fast in (False, True)]


@functools.cache
def weights(width: int) -> F32:
    """Weights over eight decades; a fifth of them are zero."""
    generator = np.random.default_rng(width)
    values = 10 ** generator.uniform(-4, 4, width) * (generator.random(width) > 0.2)
    return values.astype(np.float32)


@functools.cache
def hessian(width: int, block: int = 16) -> F32:
    """XᵀX of correlated activations, so that entries off the diagonal matter."""
    generator = np.random.default_rng(width)
    activations = generator.normal(size=(64, 6)) @ generator.normal(size=(6, width))
    noisy = (activations + 0.1 * generator.normal(size=(64, width))).astype(np.float32)
    return hb.hessian_from_activations(noisy, block)


METHODS: dict[str, Callable[..., hb.methods.Method]] = {
    "amax": lambda width, block=16: hb.Amax(),
    **{f"{m.error} {m.e4m3_max}{' fast' * m.fast_error}": lambda width, block=16, m=m: m for m in FOUR_SIX},
    "abs_max 256": lambda width, block=16: hb.FourSix("abs_max", 256),
    "sweep": lambda width, block=16: hb.Sweep(),
    "sweep fused": lambda width, block=16: hb.Sweep(fused=True),
    "optimal": lambda width, block=16: hb.Optimal(),
    "weighted": lambda width, block=16: hb.Optimal(weights(width)),
    "hessian": lambda width, block=16: hb.Hessian(hessian(width, block)),
    "descent": lambda width, block=16: hb.Hessian(hessian(width, block), codes="descent"),
}
"""Methods by label. Each function creates the method for a width and a block length."""

EXACT = ("optimal", "weighted", "hessian", "descent")


@dataclass(frozen=True)
class Case:
    """One way to quantize."""

    contract: hb.contracts.Contract
    format: str
    block: int
    method: str
    tile: Tile
    scaling: Scaling

    def __str__(self) -> str:
        extra = [f"block {self.block}"] if self.block != hb.get_format(self.format).block else []
        extra += ["tiles"] if self.tile[0] != 1 else []
        extra += ["rows"] if self.scaling == "row" else []
        return "-".join([repr(self.contract), self.format, self.method, *extra])

    def request(self, dtype: str = "fp32", width: int = 96) -> Request:
        return Request(
            format=hb.get_format(self.format, self.block),
            contract=self.contract,
            method=METHODS[self.method](width, self.block),
            tile=self.tile,
            scaling=self.scaling,
            dtype=dtype,
        )

    def quantize(self, x: Matrix, backend: str, global_amax: object = None) -> hb.QuantizedTensor:
        """Quantize a matrix. A contract that quantizes the transpose gets the transposed matrix."""
        return hb.quantize(
            np.ascontiguousarray(x.T) if self.contract.transform.columnwise else x,
            self.format,
            self.contract,
            METHODS[self.method](x.shape[1], self.block),
            block=self.block,
            tile=self.tile,
            scaling=self.scaling,
            global_amax=global_amax,
            backend=backend,
        )


def methods_of(rule: hb.contracts.NVFP4Rule | hb.contracts.MXRule) -> list[str]:
    """Labels of the methods that a rule defines."""
    found = ["amax", "optimal", "weighted", "hessian"]
    if isinstance(rule, NVFP4Rule) and rule.row_scaling:  # descent is the same for all: once is enough
        found.append("descent")
    if isinstance(rule, NVFP4Rule) and rule.four_six is not None:
        four_six = rule.four_six
        for method, label in zip(FOUR_SIX, list(METHODS)[1:9], strict=True):
            fast_fits = four_six.fast_error is not None or not method.fast_error
            if method.error in four_six.errors and method.e4m3_max in four_six.e4m3_maxes and fast_fits:
                found.append(label)
    return found


def every_case() -> list[Case]:
    """Every combination of contract, format, block, method, tile and scaling that the contract defines."""
    cases = []
    for contract in VARIANTS:
        for name, rule in contract.rules.items():
            if isinstance(rule, DecodeRule):
                continue
            blocks = hb.get_format(name).blocks if isinstance(rule, NVFP4Rule) else rule.blocks
            for block in blocks or hb.get_format(name).blocks:
                plain = (1, block)
                ways: list[tuple[Tile, Scaling]] = [(plain, contract.scaling)]
                if isinstance(rule, NVFP4Rule):
                    ways += [(tile, "tensor") for tile in rule.tiles if tile != (1, 16) and tile[1] == block]
                    ways += [(plain, "row")] if rule.row_scaling and contract.scaling != "row" else []
                for tile, scaling in ways:
                    labels = [label for label in methods_of(rule) if tile == plain or label not in EXACT]
                    if contract.transform.columnwise:  # the transform is the same for all methods
                        labels = [label for label in labels if label in ("amax", "mae 448", "optimal")]
                    cases += [Case(contract, name, block, label, tile, scaling) for label in labels]
    return cases


def peer_methods(contract: hb.contracts.Contract, name: str) -> list[str]:
    """Labels of the methods that `every_case` leaves out for a contract and format."""
    match contract.name, name:
        case "fouroversix", "nvfp4":
            return ["abs_max 256"]
        case "modelopt", "nvfp4":
            return ["mse 256", "sweep", "sweep fused"]
        case "qwantize", _:
            return ["optimal", "hessian"]
        case ("ocp", _) | ("gguf", "mxfp4"):
            return ["descent"]
    return []


def peer_cases() -> list[Case]:
    """The peers' own searches, and descent on MX codes."""
    cases = []
    for contract in PEER_VARIANTS:
        for name, rule in contract.rules.items():
            if isinstance(rule, DecodeRule):
                continue
            blocks = hb.get_format(name).blocks if isinstance(rule, NVFP4Rule) else rule.blocks
            for block in blocks or hb.get_format(name).blocks:
                tiles = [(1, block)]
                if isinstance(rule, NVFP4Rule) and contract.name == "fouroversix":
                    tiles += [tile for tile in rule.tiles if tile != (1, 16) and tile[1] == block]
                cases += [
                    Case(contract, name, block, label, tile, "tensor")
                    for label in peer_methods(contract, name)
                    for tile in tiles
                ]
    return cases


def has_own_kernel(case: Case, dtype: str) -> bool:
    """Whether a specialised kernel runs a case. All others share the general kernel."""
    if case.format != "nvfp4":
        return case.method not in ("hessian", "descent")
    if case.method not in EXACT:
        return True
    rule = case.contract.rules[case.format]
    ties_down = rule.rounding.tie != "even" if isinstance(rule, NVFP4Rule) else False
    return (
        case.block == 16
        and case.contract.name != "fouroversix"
        and not (ties_down and dtype == "fp32")
        and not (case.scaling == "row" and case.method != "optimal")
    )


def served_cases(dtype: str = "bf16") -> list[Case]:
    """The cases that the compiled backend serves. test_bits.py checks that none is missing from the list."""
    return [case for case in every_case() + peer_cases() if Cpu().supports(case.request(dtype)) is None]


# --- inputs ---

DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
finfo: Any = ml_dtypes.finfo
ROWS, WIDTH = 17, 96
"""17 rows, 102 blocks of 16, 51 of 32: with any number of lanes, a kernel has whole vectors and a remainder."""

SHAPES = {
    "one row": (1, 96),
    "single block": (1, 32),
    "tiles": (32, 64),
    "ragged": (5, 90),
    "odd": (18, 37),
    "narrow": (3, 5),
    "one element": (1, 1),
}


def finite(x: npt.NDArray[np.float64], dtype: str) -> Matrix:
    """Round to the dtype, and clip to its finite range."""
    largest = float(finfo(DTYPES[dtype]).max)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.clip(x, -largest, largest).astype(DTYPES[dtype]))


def spread(dtype: str, low: int, high: int, by_block: bool = False) -> Matrix:
    """Normal numbers times random powers of two, one per element or one per block of sixteen."""
    generator = np.random.default_rng(5)
    normal = generator.normal(size=(ROWS, WIDTH))
    if by_block:
        exponent = np.repeat(generator.integers(low, high, (ROWS, WIDTH // 16)), 16, axis=1)
    else:
        exponent = generator.integers(low, high, normal.shape)
    return finite(np.ldexp(normal, exponent), dtype)


def bits(dtype: str, exponents: tuple[int, int] | None = None) -> Matrix:
    """Random bit patterns: all patterns, or only those with biased exponents within bounds."""
    size = np.dtype(DTYPES[dtype]).itemsize
    generator = np.random.default_rng(6)
    pattern = generator.integers(0, 256, (ROWS, WIDTH, size), dtype=np.uint8).view(f"u{size}")[..., 0]
    if exponents is not None:
        mantissa = {"fp32": 23, "fp16": 10, "bf16": 7}[dtype]
        field = ((1 << (8 * size - 1)) - 1) >> mantissa << mantissa
        drawn = generator.integers(*exponents, pattern.shape) << mantissa
        pattern = (pattern & ~pattern.dtype.type(field)) | drawn.astype(pattern.dtype)
    return pattern.view(DTYPES[dtype])


def neighbours(x: Matrix) -> Matrix:
    """Every number with its lower and upper neighbour: (..., 3·n)."""
    integer = x.view(f"i{x.dtype.itemsize}")
    return np.stack([integer, integer - 1, integer + 1], axis=-1).reshape(*x.shape[:-1], -1).view(x.dtype)


def ties(dtype: str) -> Matrix:
    """Elements on and next to every tie of E2M1, in blocks whose amaxes are on and next to every tie of the scales.

    The largest element is 2688 = 6·448, so that global factors are powers of two.
    """
    grid = np.array(E2M1_VALUES)
    middles = (grid[1:] + grid[:-1]) / 2  # times a scale of four bits: fits into bfloat16
    scales = np.ldexp(1 + np.arange(8) / 8, np.arange(-9, 8)[:, None])[..., None]
    elements = neighbours((scales * middles).astype(DTYPES[dtype]))
    amaxes = neighbours((scales * np.array([6, 6.375, 4, 7, 8])).astype(DTYPES[dtype]))
    blocks = np.zeros((ROWS, 8, 32), DTYPES[dtype])
    blocks[..., 1:16], blocks[..., 17:] = elements[..., :15], -elements[..., 6:]
    for column in range(8):
        blocks[:, column, 0] = blocks[:, column, 16] = amaxes[:, column, column * 5 % 15]
    blocks[0, 0, 0] = 2688
    return blocks.reshape(ROWS, 256)


def patched(dtype: str, values: Matrix, share: float, scale: float = 1.0) -> Matrix:
    """Normal numbers with some of the elements replaced."""
    generator = np.random.default_rng(7)
    x = finite(generator.normal(size=(ROWS, WIDTH)) * scale, dtype)
    where = generator.random(x.shape) < share
    x[where] = generator.choice(values, int(where.sum()))
    return x


def nonfinite_values(dtype: str) -> Matrix:
    """Both infinities, quiet and signalling NaNs of both signs, with payloads."""
    size = np.dtype(DTYPES[dtype]).itemsize
    infinity, mantissa = {"fp32": (0x7F800000, 23), "fp16": (0x7C00, 10), "bf16": (0x7F80, 7)}[dtype]
    patterns = [infinity + payload for payload in (0, 1, 5, 1 << (mantissa - 1), (1 << mantissa) - 1)]
    patterns += [pattern | 1 << (8 * size - 1) for pattern in patterns]
    return np.array(patterns, f"u{size}").view(DTYPES[dtype])


def zero_blocks(dtype: str) -> Matrix:
    x = patched(dtype, np.zeros(1, DTYPES[dtype]), 0.2)
    x[::2, 16:48] = 0
    x[1::2, 64:80] = -0.0
    return x


def outlier(dtype: str) -> Matrix:
    x = patched(dtype, np.zeros(1, DTYPES[dtype]), 0.0, 0.01)
    x[3, 50] = -30000
    return x


def edge(exponent: int) -> Callable[[str], Matrix]:
    """Normal numbers whose amax is exactly a power of two (in fp16, the nearest possible)."""

    def make(dtype: str) -> Matrix:
        x = np.clip(np.random.default_rng(8).normal(size=(ROWS, WIDTH)) / 4, -0.9, 0.9)
        x[2, 33] = -1
        exponents = {"fp16": max(-20, min(15, exponent))}
        return finite(np.ldexp(x, exponents.get(dtype, exponent)), dtype)

    return make


def subnormals(dtype: str) -> Matrix:
    """Each block of sixteen has another amax, from one to nine times the smallest number."""
    generator = np.random.default_rng(9)
    most = np.arange(1, 1 + ROWS * WIDTH // 16).reshape(ROWS, -1).repeat(16, axis=1) % 9 + 1
    units = generator.integers(-most, most + 1)
    return np.asarray((units * float(finfo(DTYPES[dtype]).smallest_subnormal)).astype(DTYPES[dtype]))


NARROW = {"fp32": (-52, 52), "fp16": (-24, 14), "bf16": (-52, 52)}
"""Exponents for which the kernels of the searches serve the whole tensor."""

INPUTS: dict[str, Callable[[str], Matrix]] = {
    "gauss": lambda dtype: spread(dtype, 0, 1),
    "small": lambda dtype: spread(dtype, -12, -11),
    "tiny": lambda dtype: spread(dtype, -16, -14) if dtype == "fp16" else spread(dtype, -128, -126),
    "huge": lambda dtype: spread(dtype, 13, 15) if dtype == "fp16" else spread(dtype, 124, 127),
    "wide": lambda dtype: spread(dtype, -24, 15) if dtype == "fp16" else spread(dtype, -149, 127),
    "wide in range": lambda dtype: spread(dtype, *NARROW[dtype]),
    "block scales": lambda dtype: spread(dtype, -14, 14, by_block=True),
    "zeros": lambda dtype: np.zeros((ROWS, WIDTH), DTYPES[dtype]),
    "zero blocks": zero_blocks,
    "signed zeros": lambda dtype: patched(dtype, np.array([0.0, -0.0], DTYPES[dtype]), 0.6),
    "outlier": outlier,
    "subnormal": subnormals,
    "subnormal and normal": lambda dtype: patched(dtype, subnormals(dtype).reshape(-1), 0.5, 2000.0),
    "ties": ties,
    "bits": bits,
    "finite bits": lambda dtype: bits(dtype, (0, 31) if dtype == "fp16" else (0, 255)),
    "bits in range": lambda dtype: bits(dtype, (0, 31) if dtype == "fp16" else (70, 180)),
    "bits in a binade": lambda dtype: bits(dtype, (12, 16) if dtype == "fp16" else (124, 129)),
    "nonfinite": lambda dtype: patched(dtype, nonfinite_values(dtype), 0.02),
    "infinite": lambda dtype: patched(dtype, np.array([np.inf, -np.inf], DTYPES[dtype]), 0.02),
    "2**-60": edge(-60),
    "2**-61": edge(-61),
    "2**60": edge(60),
    "2**61": edge(61),
    **{name: lambda dtype, shape=shape: np.resize(spread(dtype, -3, 3), shape) for name, shape in SHAPES.items()},  # type: ignore[misc]
}


@functools.cache
def make_input(name: str, dtype: str) -> Matrix:
    x = INPUTS[name](dtype)
    x.setflags(write=False)
    return x


def fits(case: Case, x: Matrix) -> bool:
    """Whether the contract takes the width: contracts that refuse ragged rows get only whole blocks."""
    if x.shape[1] % case.block == 0:
        return True
    return (
        case.contract.ragged == "pad"
        and not case.contract.transform.hadamard
        and case.method not in ("hessian", "descent")
    )
