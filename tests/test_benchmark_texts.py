"""Where the benchmark's texts come from: the index that pip uses, and only the archive whose hash is pinned."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import texts

DATA = b"the archive"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An index of one project with one archive, which pip's own settings name."""
    (tmp_path / "simple" / "one").mkdir(parents=True)
    (tmp_path / "simple" / "one" / "index.html").write_text('<a href="../../files/one%2D1.tar.gz#sha256=0">one</a>')
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one-1.tar.gz").write_bytes(DATA)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/simple"
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    yield address
    server.shutdown()
    server.server_close()


def test_an_archive_comes_from_the_index_of_pip(index: str) -> None:
    assert texts.index() == index
    assert texts._archive("one", "one-1.tar.gz", hashlib.sha256(DATA).hexdigest()) == DATA


def test_another_archive_is_refused(index: str) -> None:
    with pytest.raises(SystemExit, match=r"one-1.tar.gz: its SHA-256 is not the pinned one"):
        texts._archive("one", "one-1.tar.gz", "0" * 64)
    with pytest.raises(SystemExit, match=r"/simple/one/ lists no one-2.tar.gz"):
        texts._archive("one", "one-2.tar.gz", "0" * 64)


def test_a_variable_names_the_index_too(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/other")
    assert texts.index() == "http://127.0.0.1:1/other"
