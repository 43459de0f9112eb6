"""The study's pages in Chromium, at desktop and phone width: what a browser makes of them, not what the text says.

`make test-pages` runs this. A small script is added to a copy of the page; it measures the page when everything is
laid out, and writes what it found where `--dump-dom` shows it. The page is in a frame, because no window of Chromium
is as narrow as a phone.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halfbyte.study import run_methods, run_study
from halfbyte.study.page import methods_page, study_page
from tests.samples import gaussian

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = {"desktop": 1280, "phone": 390}
SCENARIOS = ["gaussian", "mixed-scales", "spread-18", "single-outlier", "constant", "subnormal-heavy"]

MEASURE = """
<script>
window.addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  const outside = [];
  for (const svg of document.querySelectorAll("svg"))
    for (const part of svg.querySelectorAll("text, circle, rect")) {
      const a = box(part), b = box(svg);
      if (a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1)
        outside.push(part.textContent);
    }
  const labels = [...document.querySelectorAll("figure svg")].map(svg => [...svg.querySelectorAll("text")].map(box));
  const found = {
    width: window.innerWidth,
    scrolls: document.documentElement.scrollWidth,
    pictures: [...document.querySelectorAll("img")].map(img => [img.naturalWidth, img.naturalHeight, box(img).width]),
    plots: [...document.querySelectorAll("svg")].map(svg => [box(svg).width, box(svg).height]),
    outside,
    overlapping: labels.filter(([a, b]) => b && a.right > b.left).length,
    cells: [...document.querySelectorAll("td")].map(td => box(td).height),
    names: [...document.querySelectorAll("td:first-child")].map(td => getComputedStyle(td).position),
    text: document.body.innerText,
  };
  parent.document.body.setAttribute("data-found", JSON.stringify(found));
});
</script>
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    if CHROMIUM is None:
        pytest.fail("there is no Chromium; on Debian: apt-get update && apt-get install chromium")
    rows = run_methods([("model.layers.0.mlp.gate_proj.weight", gaussian(32, 64)), ("b", gaussian(16, 64))])
    return {"study": study_page(run_study(SCENARIOS, maps=True)), "methods": methods_page(rows)}


def looked_at(page: str, width: int, folder: Path) -> dict[str, Any]:
    """What Chromium finds on a page in a window of that width."""
    file = folder / "page.html"
    measured_page = html.escape(page.replace("</body>", MEASURE + "</body>"))
    frame = f'<iframe style="border: 0" width="{width}" height="900" srcdoc="{measured_page}"></iframe>'
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}</body>', encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless=new", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # Chromium has no sandbox for root
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<body data-found="([^"]*)"', dom)
    assert found is not None, "the script did not run"
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert measured["width"] == width
    return measured


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["study", "methods"])
def test_the_page_fits_and_everything_is_drawn(pages: dict[str, str], name: str, width: int, tmp_path: Path) -> None:
    found = looked_at(pages[name], width, tmp_path)
    assert found["scrolls"] <= width, "only tables and plots scroll sideways, not the page"
    assert found["outside"] == [], "text or a mark lies outside its plot"
    assert found["overlapping"] == 0, "labels of a histogram overlap"
    assert found["plots"]
    assert all(wide > 0 and high > 0 for wide, high in found["plots"])
    assert max(found["plots"])[0] >= 700, "the large plot keeps its size and scrolls"


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_tables_and_maps(pages: dict[str, str], width: int, tmp_path: Path) -> None:
    found = looked_at(pages["study"], width, tmp_path)
    assert max(found["cells"]) < 40, "figures stand in one line"
    assert set(found["names"]) == {"sticky"}, "the names of rows stay in sight"
    assert len(found["pictures"]) == 3 * 6
    assert all(size == [48, 24] for *size, _ in found["pictures"]), "Chromium decodes every map"
    assert all(0 < shown <= width for *_, shown in found["pictures"])
    for words in ("Beside the published figures", "rule of April 2026", "1.58e-05", "midpoint", "Where the error is"):
        assert words in found["text"]
