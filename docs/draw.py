"""Draw the pictures of docs/: a block, and the two levels of scales. The numbers in them are quantized by halfbyte.

    python docs/draw.py

A picture has a background of its own and follows the reader's light or dark setting, so it can be read on any page.
A test fails if the files are not what this script draws.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np

import halfbyte as hb
from halfbyte.codec.bits import F32

FOLDER = Path(__file__).parent
LEFT, WIDTH = 12, 496
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.number { font: 12px ui-monospace, monospace; text-anchor: middle }
.faint { fill: #6b7280; font-size: 12px }
.strong { font-weight: 600 }
.page { fill: #ffffff } .cell { fill: #f3f4f6; stroke: #d1d5db }
.block { fill: #dbeafe; stroke: #60a5fa }
.tensor { fill: #fef3c7; stroke: #f59e0b } .largest { fill: #fee2e2; stroke: #f87171 }
path { stroke: #6b7280; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .faint { fill: #9ca3af }
  .page { fill: #1e2129 } .cell { fill: #2d323d; stroke: #4b5563 }
  .block { fill: #1e3a5f; stroke: #3b82f6 }
  .tensor { fill: #4a3a12; stroke: #d97706 } .largest { fill: #4c2226; stroke: #ef4444 }
  path { stroke: #9ca3af }
}
"""


def text(x: float, y: float, what: str, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{shown}>{escape(what)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'


def arrow(x: float, y: float, length: float) -> str:
    """An arrow that points down."""
    end = y + length
    return f'<path d="M{x:g} {y:g}V{end:g}m-4 -6l4 6l4 -6"/>'


def picture(title: str, height: float, parts: list[str]) -> str:
    body = "\n".join([box(LEFT, 0, WIDTH, height, "page"), *parts])
    size = f'viewBox="{LEFT} 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{start}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def cells(y: float, rows: list[list[str]], kinds: list[str]) -> list[str]:
    """Sixteen cells in two rows of eight; every cell holds the lines of `rows`, one above the other."""
    parts = []
    tall = 10 + 16 * len(rows)
    for at in range(16):
        left, top = 20 + 60 * (at % 8), y + (tall + 6) * (at // 8)
        parts.append(box(left, top, 56, tall, kinds[at]))
        parts += [text(left + 28, top + 18 + 16 * line, row[at], "number") for line, row in enumerate(rows)]
    return parts


def example() -> F32:
    """Sixteen weights: normal numbers of numpy's generator with seed 0, three decimals."""
    return np.round(np.random.default_rng(0).standard_normal((1, 16)) * 0.025, 3).astype(np.float32)


def block() -> str:
    """What becomes of sixteen numbers: the contract is Model-Optimizer's, the tensor scale is 2**-12."""
    x = example()
    q = hb.quantize(x, "nvfp4", "modelopt", global_amax=2688 * 2.0**-12)
    packed = np.asarray(q.codes)[0]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    element = q.format.element.magnitudes[codes & 7] * np.where(codes > 7, -1, 1)
    scale = float(np.asarray(q.scales_as_float8)[0, 0])
    amax = int(np.argmax(np.abs(x)))
    kinds = ["largest" if at == amax else "cell" for at in range(16)]
    decoded = [f"{value:.3f}" for value in np.asarray(hb.dequantize(q))[0]]
    step = f"{abs(float(x[0, amax])):g} / 6 ≈ {scale:g} × 2⁻¹²"
    return picture(
        "A block of NVFP4",
        414,
        [
            text(20, 28, "16 numbers of a row", "strong"),
            text(196, 28, "the largest magnitude (amax) is red", "faint"),
            *cells(40, [[f"{value:.3f}" for value in x[0]]], kinds),
            arrow(34, 110, 26),
            text(50, 122, f"scale: amax / 6, rounded to E4M3: {step}"),
            text(50, 138, "each number / scale, rounded to the nearest code", "faint"),
            text(20, 164, "16 codes of 4 bits", "strong"),
            text(196, 164, "sign and magnitude, and what they mean", "faint"),
            *cells(176, [[f"{code:04b}" for code in codes], [f"{value:g}" for value in element]], ["block"] * 16),
            arrow(34, 276, 26),
            text(50, 294, f"code × {scale:g} × 2⁻¹²"),
            text(20, 324, "16 decoded numbers", "strong"),
            text(196, 324, "8 bytes of codes and 1 byte of scale were stored", "faint"),
            *cells(336, [decoded], ["cell"] * 16),
        ],
    )


def two_levels() -> str:
    """NVFP4 has a scale per block and one per tensor; MXFP4 has a scale per block only."""
    parts = [text(20, 28, "NVFP4", "strong"), text(80, 28, "two levels of scales", "faint")]
    parts += [box(20, 40, 480, 34, "tensor"), text(32, 62, "tensor scale: one float32"), arrow(260, 76, 18)]
    for row, column in np.ndindex(3, 3):
        left, top = 20 + 164 * column, 98 + 44 * row
        parts.append(box(left, top, 40, 36, "block"))
        parts.append(text(left + 20, top + 23, "E4M3", "number"))
        parts += [box(left + 44 + 13.5 * (at % 8), top + 19 * (at // 8), 11.5, 17, "cell") for at in range(16)]
    parts += [
        text(20, 248, "one byte per block of 16", "faint"),
        text(20, 270, "value = element (E2M1) × block scale (E4M3) × tensor scale (float32)"),
        text(20, 290, "4 + 8/16 = 4.5 bits per number", "faint"),
        text(20, 330, "MXFP4", "strong"),
        text(80, 330, "one level of scales", "faint"),
    ]
    for row, column in np.ndindex(2, 2):
        left, top = 20 + 246 * column, 342 + 44 * row
        parts.append(box(left, top, 40, 36, "block"))
        parts.append(text(left + 20, top + 23, "E8M0", "number"))
        parts += [box(left + 44 + 11.8 * (at % 16), top + 19 * (at // 16), 9.8, 17, "cell") for at in range(32)]
    parts += [
        text(20, 448, "one byte per block of 32: a power of two", "faint"),
        text(20, 470, "value = element (E2M1) × block scale (E8M0)"),
        text(20, 490, "4 + 8/32 = 4.25 bits per number", "faint"),
    ]
    return picture("Two levels of scales", 508, parts)


PICTURES: dict[str, Callable[[], str]] = {"block.svg": block, "two_levels.svg": two_levels}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(f"wrote {name}")
