"""Generate the tables of docs/contracts.md from the contracts themselves.

The formulas come from the docstrings of the slots. To find what a contract does with zeros, -0.0 and underflow, the
script runs the reference on small test tensors. A test fails if the page is not up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import halfbyte as hb
from halfbyte.contracts import CONTRACTS, Contract, MXRule, NVFP4Rule
from halfbyte.contracts.spec import formula

PAGE = Path(__file__).parent / "contracts.md"

NVFP4_VARIANTS = [
    hb.contracts.transformer_engine(),
    hb.contracts.miles(),
    hb.contracts.fouroversix(),
    hb.contracts.modelopt(),
    hb.contracts.modelopt(mode="max"),
    hb.contracts.compressed_tensors(),
    hb.contracts.torchao(),
    hb.contracts.torchao(two_level=False),
    hb.contracts.flashinfer(),
    hb.contracts.flashinfer(mode="te"),
    hb.contracts.vllm(),
    hb.contracts.qwantize(),
]

MX_VARIANTS = [
    hb.contracts.ocp(),
    hb.contracts.transformer_engine(),
    hb.contracts.fouroversix(),
    hb.contracts.fouroversix(rule="static_4"),
    hb.contracts.modelopt(),
    hb.contracts.compressed_tensors(),
    *(hb.contracts.torchao(scaling_mode=mode) for mode in ("floor", "even", "ceil", "rceil")),
    hb.contracts.qwantize(),
    hb.contracts.gguf(),
    hb.contracts.flashinfer(),
]

FOUR_SIX_VARIANTS = [
    hb.contracts.transformer_engine(),
    hb.contracts.miles(),
    hb.contracts.flashinfer(mode="4over6"),
    hb.contracts.fouroversix(),
]


def label(contract: Contract) -> str:
    options = ", ".join(str(value) for _, value in contract.options)
    if contract.options and contract.options[0][0] == "two_level":
        options = "one level"
    return contract.name + (f" ({options})" if options else "")


def probe(contract: Contract, format: str, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[str, str]:
    """The scale bytes (in hex) and codes of a small tensor, each value once."""
    q = hb.quantize(x, format, contract)
    codes = np.asarray(q.codes).reshape(-1)
    nibbles = sorted({int(code) for code in codes & 0xF} | {int(code) for code in codes >> 4})
    scales = sorted({int(byte) for byte in np.asarray(q.scales).reshape(-1)})
    return " ".join(f"{byte:02X}" for byte in scales), " ".join(map(str, nibbles))


def zero_block(contract: Contract, format: str) -> str:
    """Scale byte of an all-zero block in a tensor that is not all zero."""
    block = hb.get_format(format).block
    x = np.zeros((2, block), np.float32)
    x[0] = 1
    q = hb.quantize(x, format, contract)
    return f"{int(np.asarray(q.scales)[1, 0]):02X}"


def zero_codes(contract: Contract, format: str) -> str:
    """Codes of +0.0 and -0.0 in a block that also holds a one."""
    x = np.zeros((1, hb.get_format(format).block), np.float32)
    x[0, :2] = 1
    x[0, 3] = -0.0
    q = hb.quantize(x, format, contract)
    byte = int(np.asarray(q.codes)[0, 1])
    return f"{byte & 0xF} / {byte >> 4}"


def underflow(contract: Contract) -> str:
    """Scale byte and codes of a block of ±1e-9 in a tensor whose amax is 1000: the block scale is far below 2**-10."""
    x = np.full((2, 16), 1e-9, np.float32)
    x[1, ::2] *= -1
    x[0, 0] = 1000
    q = hb.quantize(x, "nvfp4", contract)
    codes = np.asarray(q.codes)[1, 0]
    return f"{int(np.asarray(q.scales)[1, 0]):02X}: {int(codes) >> 4} {int(codes) & 0xF}"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(header: list[str], rows: Iterator[list[str]]) -> str:
    return "\n".join([row(header), "|" + "---|" * len(header), *map(row, rows)])


def nvfp4_rule(contract: Contract) -> NVFP4Rule:
    rule = contract.rules["nvfp4"]
    if not isinstance(rule, NVFP4Rule):
        raise TypeError(f"{contract} has no NVFP4 quantizer")
    return rule


def nvfp4_table() -> str:
    header = [
        "contract", "stored", "tensor factor", "block scale before E4M3", "zero block", "underflow: byte, codes of ±",
        "element", "tie", "+0 / −0", "all-zero tensor: bytes, codes", "decode",
    ]  # fmt: skip

    def rows() -> Iterator[list[str]]:
        for contract in NVFP4_VARIANTS:
            rule = nvfp4_rule(contract)
            scales, codes = probe(contract, "nvfp4", np.zeros((1, 16), np.float32))
            yield [
                label(contract), rule.stored_as, formula(rule.factor), formula(rule.pre_scale),
                zero_block(contract, "nvfp4"), underflow(contract), formula(rule.element), rule.rounding.tie,
                zero_codes(contract, "nvfp4"), f"{scales}; {codes}", formula(rule.decode),
            ]  # fmt: skip

    return table(header, rows())


def four_six_table() -> str:
    header = ["contract", "e4m3_max", "error", "block scale before E4M3, ·1.5", "d", "fast d", "added", "tile (16, 16)"]

    def rows() -> Iterator[list[str]]:
        for contract in FOUR_SIX_VARIANTS:
            rule = nvfp4_rule(contract)
            four_six = rule.four_six
            if four_six is None:
                raise TypeError(f"{contract} has no 4over6")
            exact = formula(four_six.exact_error)
            if four_six.exact_row_error is not None:
                exact += f"; per row {formula(four_six.exact_row_error)}"
            has_tiles = (16, 16) in rule.tiles and four_six.tile_sum is not None
            yield [
                label(contract), ", ".join(map(str, four_six.e4m3_maxes)), ", ".join(four_six.errors),
                formula(four_six.pre_scale), exact,
                formula(four_six.fast_error) if four_six.fast_error else "–",
                formula(four_six.block_sum),
                formula(four_six.tile_sum) if has_tiles and four_six.tile_sum else "–",
            ]  # fmt: skip

    return table(header, rows())


def mx_table() -> str:
    header = ["contract", "formats", "scale from the block amax v", "element", "tie", "+0 / −0", "zero block", "decode"]

    def rows() -> Iterator[list[str]]:
        for contract in MX_VARIANTS:
            rule = contract.rules["mxfp4"]
            if not isinstance(rule, MXRule):
                raise TypeError(f"{contract} has no MXFP4 quantizer")
            formats = ", ".join(name for name in ("mxfp4", "mxfp8") if name in contract.rules)
            yield [
                label(contract), formats, formula(rule.scale),
                formula(rule.nearest) if rule.nearest else formula(rule.element), rule.rounding.tie,
                zero_codes(contract, "mxfp4"), zero_block(contract, "mxfp4"), formula(rule.decode),
            ]  # fmt: skip

    return table(header, rows())


def difference_table() -> str:
    """How often the contracts' NVFP4 bytes differ from TransformerEngine's on ordinary weights."""
    generator = np.random.default_rng(0)
    import ml_dtypes

    tensors = [generator.standard_normal((256, 1024)).astype(ml_dtypes.bfloat16) for _ in range(24)]
    wanted = [hb.quantize(x, "nvfp4") for x in tensors]

    def rows() -> Iterator[list[str]]:
        for contract in NVFP4_VARIANTS[1:]:
            if nvfp4_rule(contract).stored_as == "none":
                continue  # one level of scales: completely different numbers
            got = [hb.quantize(x, "nvfp4", contract) for x in tensors]
            scales = [np.mean(np.asarray(a.scales) != np.asarray(b.scales)) for a, b in zip(got, wanted, strict=True)]
            codes = [np.mean(np.asarray(a.codes) != np.asarray(b.codes)) for a, b in zip(got, wanted, strict=True)]
            touched = sum(a > 0 or b > 0 for a, b in zip(scales, codes, strict=True))
            yield [label(contract), f"{touched} of 24", f"{max(scales):.2%}", f"{max(codes):.2%}"]

    return table(["contract", "tensors that differ", "scale bytes, worst", "code bytes, worst"], rows())


TABLES: dict[str, Callable[[], str]] = {
    "nvfp4": nvfp4_table,
    "four_six": four_six_table,
    "mx": mx_table,
    "differences": difference_table,
    "sources": lambda: table(["contract", "bytes of"], ([name, make().source] for name, make in CONTRACTS.items())),
}


def render(text: str) -> str:
    """The page with every marked table generated again."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    print(f"wrote {PAGE.name}")
