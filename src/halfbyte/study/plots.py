"""Small plots as SVG text, and heat maps as PNG. They need no library and no script, so the page opens anywhere."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {
    "requantize": "#c2410c",
    "midpoint": "#d97706",
    "verbatim": "#a16207",
    "hybrid": "#1d4ed8",
    "modelopt": "#7e22ce",
    "optimal": "#15803d",
    "amax": "#c2410c",
    "4over6 MAE 448": "#a16207",
    "4over6 MAE 256": "#ca8a04",
    "4over6 MSE 448": "#0369a1",
    "4over6 MSE 256": "#1d4ed8",
    "hessian": "#7e22ce",
    "ideal scale": "#4b5563",
    "Shannon bound": "#111827",
}
"""The colour of each algorithm and each method."""

EXACT = "exact"
LEGEND_LINE = 14
INK, FAINT = "#1f2937", "#e5e7eb"


def svg(width: float, height: float, body: Sequence[str], title: str) -> str:
    """An SVG element with a title for people who cannot see it."""
    inside = "".join(body)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{inside}</svg>'
    )


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 11, colour: str = INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"/>'


def rectangle(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}">{inside}</rect>'


def dots(rows: Mapping[str, Mapping[str, float]], title: str) -> str:
    """One line per name with one dot per series, on a log axis. Zeros have a separate column at the left."""
    positive = [value for series in rows.values() for value in series.values() if 0 < value < math.inf]
    low = math.floor(math.log10(min(positive))) if positive else -1
    high = math.ceil(math.log10(max(positive))) if positive else 0
    high = max(high, low + 1)
    left = max(150.0, 7.0 * max(map(len, rows), default=0) + 16)  # long tensor names stay inside
    right, step = left + 750, 18.0
    legend, lines = _legend(left, right, list(next(iter(rows.values()), {})))
    top = 32.0 + LEGEND_LINE * lines
    zero, start = left + 20, left + 60

    def place(value: float) -> float:
        if value <= 0:
            return zero
        if math.isinf(value):
            return right
        return start + (math.log10(value) - low) / (high - low) * (right - start)

    bottom = top + step * len(rows)
    body = [text(zero, top - 12, EXACT, "middle"), line(zero, top - 6, zero, bottom)]
    every = max(1, (high - low) // 12)
    for power in range(low, high + 1, every):
        x = place(10.0**power)
        body += [line(x, top - 6, x, bottom), text(x, top - 12, f"1e{power}", "middle")]
    for number, (name, series) in enumerate(rows.items()):
        y = top + step * (number + 0.5)
        body += [text(left - 8, y + 4, name, "end"), line(left, y, right, y)]
        for place_in_stack, (label, value) in enumerate(series.items()):
            shift = (place_in_stack - (len(series) - 1) / 2) * 2.2  # equal values stay visible
            body.append(
                f'<circle cx="{place(value):.1f}" cy="{y + shift:.1f}" r="3.4" fill="{COLOURS.get(label, INK)}" '
                f'fill-opacity="0.85"><title>{escape(f"{name}, {label}: {value:.4g}")}</title></circle>'
            )
    return svg(right + 30, bottom + 12, body + legend, title)


def _legend(left: float, right: float, labels: Sequence[str]) -> tuple[list[str], int]:
    """The legend, and how many lines it takes between left and right."""
    body, x, lines = [], left, 1
    for label in labels:
        width = 30.0 + 7 * len(label)
        if x + width > right and x > left:
            x, lines = left, lines + 1
        y = LEGEND_LINE * lines
        body += [rectangle(x, y - 9, 10, 10, COLOURS.get(label, INK)), text(x + 14, y, label)]
        x += width
    return body, lines


def bars(counts: Mapping[int, int], inside: tuple[int, int], title: str) -> str:
    """A histogram over integers; those outside the window have another colour."""
    width, height, base = 250.0, 70.0, 60.0
    low, high = (min(counts), max(counts)) if counts else (0, 0)
    each = min((width - 20) / (high - low + 1), 16.0)
    most = max(counts.values(), default=1)
    body = [line(8, base, width - 8, base, INK)]
    for k, count in counts.items():
        tall = max(48.0 * count / most, 1.0)
        colour = "#1d4ed8" if inside[0] <= k <= inside[1] else "#dc2626"
        body.append(rectangle(10 + (k - low) * each, base - tall, max(each - 1, 0.8), tall, colour, f"2^{k}: {count}"))
    body.append(text(8, height + 2, f"2^{low}", size=9))
    if high > low:
        body.append(text(max(10 + (high - low + 1) * each, 40), height + 2, f"2^{high}", size=9))
    return svg(width + 20, height + 6, body, title)


def heat_map(values: Sequence[Sequence[float]], ceiling: float, title: str) -> str:
    """Patches coloured by the logarithm of their value, from a millionth of the ceiling to the ceiling."""
    pixels = []
    for row in values:
        colours = bytearray()
        for value in row:
            share = 0.0 if value <= 0 or ceiling <= 0 else 1 + math.log10(min(value / ceiling, 1.0)) / 6
            shade = round(255 * (1 - max(share, 0.0)))
            colours += bytes((255, shade, shade))
        pixels.append(bytes(colours))
    width = max((len(row) for row in values), default=0)
    picture = base64.b64encode(png(pixels, width)).decode()
    return (
        f'<img alt="{escape(title)}" width="{5 * width}" height="{5 * len(values)}" '
        f'style="image-rendering: pixelated" src="data:image/png;base64,{picture}">'
    )


def png(rows: Sequence[bytes], width: int) -> bytes:
    """A PNG of 8-bit RGB rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, len(rows), 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
