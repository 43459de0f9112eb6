"""Check the built site: every link and anchor within it leads somewhere, and no page loads anything from the network.

    python docs/check_site.py site

`make docs-site` runs this after the build. Links to other sites are allowed; scripts, styles, fonts and pictures of
other sites are not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
"""What a browser fetches by itself. (A link is a style, an icon or a neighbouring page; none may be elsewhere.)"""


class Page(HTMLParser):
    """The anchors of a page, what it loads, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.loads: list[str] = []
        self.leads: list[str] = []
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name == "style":
                self.loads += in_style(value)
            elif (tag, name) in LOADED:
                self.loads.append(value)
            elif (tag, name) == ("a", "href"):
                self.leads.append(value)

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads += in_style(data)


def in_style(text: str) -> list[str]:
    """What a style sheet loads."""
    return re.findall(r"""(?:url\(|@import\s+)["']?([^"')\s;]+)""", text)


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def is_inline(link: str) -> bool:
    """A picture within the page, or an address that is no file."""
    return urlsplit(link).scheme in {"data", "mailto", "javascript"}


def problems(site: Path) -> Iterator[str]:
    """One line for each link that leads nowhere and each thing that would be fetched from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for link in page.loads:
            if is_elsewhere(link):
                yield f"{name}: loads {link}"
        for link in [*page.loads, *page.leads]:
            if not is_elsewhere(link) and not is_inline(link):
                reason = _nowhere(link, path, site, pages)
                if reason:
                    yield f"{name}: {link}: {reason}"
    for path in sorted(site.rglob("*.css")):
        for link in in_style(path.read_text(encoding="utf-8")):
            if is_elsewhere(link):
                yield f"{path.relative_to(site).as_posix()}: loads {link}"


def _nowhere(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Why a link within the site leads nowhere, or None."""
    parts = urlsplit(link)
    where = unquote(parts.path)
    target = (
        path if not where else site / where.lstrip("/") if where.startswith("/") else (path.parent / where).resolve()
    )
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "no such file"
    if target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


def main(site: Path) -> int:
    if not (site / "index.html").exists():
        print(f"{site} holds no site; `make docs-site` builds it")
        return 2
    found = list(problems(site.resolve()))
    print("\n".join(found) if found else f"{site}: {len(list(site.rglob('*.html')))} pages, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
