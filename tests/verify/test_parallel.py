"""Checks on threads: the results are those of one thread, in the same order; an error reaches the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfbyte.verify import verify
from halfbyte.verify.parallel import AHEAD, in_order
from tests.clients.converted import converted
from tests.quantized import edit, load


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_results_come_in_the_order_of_the_items(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", threads)
    first = threading.Event()

    def check(item: int) -> int:
        if item == 0 and threads != "1":
            first.wait(5)  # the first is done after others
        elif item == 1:
            first.set()
        return item * item

    assert list(in_order(check, range(40))) == [item * item for item in range(40)]


def test_an_error_reaches_the_caller_and_stops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", "2")
    done: list[int] = []

    def check(item: int) -> int:
        if item == 3:
            raise ValueError("no")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="no"):
        list(in_order(check, range(1000)))
    assert len(done) < 1000


def test_what_waits_when_an_error_comes_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", "2")
    done: list[int] = []

    def check(item: int) -> None:
        if item == 0:
            raise ValueError("no")
        time.sleep(0.03)
        done.append(item)

    with pytest.raises(ValueError, match="no"):
        list(in_order(check, range(100)))
    assert len(done) < 7


@pytest.mark.parametrize("threads", ["1", "2"])
def test_one_thread_is_the_caller(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", threads)
    here = threading.current_thread()
    assert set(in_order(lambda item: threading.current_thread() is here, range(5))) == {threads == "1"}


def test_few_results_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are taken as results are: a long list is not begun all at once."""
    monkeypatch.setenv("HALFBYTE_THREADS", "2")
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    results = in_order(lambda item: item, items())
    assert next(results) == 0
    assert (len(taken), AHEAD) == (9, 4)  # four for each thread, and the one in hand
    results.close()  # type: ignore[attr-defined]


def test_a_report_is_the_same_on_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage in many weights and in kept tensors, with the manifest's hashes: the same words in the same order."""
    path = converted(tmp_path, "llama", "--to", "nvfp4", "--layout", "modelopt")
    changed = {}
    for name, values in load(path).items():
        if name.endswith(("proj.weight", "norm.weight")):
            raw = values.view(np.uint8).reshape(*values.shape[:-1], -1).copy()
            raw.reshape(-1)[7] ^= 4
            changed[name] = raw.view(values.dtype).reshape(values.shape)
    edit(path, changed)
    reports = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("HALFBYTE_THREADS", threads)
        reports.append(verify(path, tmp_path / "llama").as_json())
    assert len(reports[0]["problems"]) > 10  # type: ignore[arg-type]
    assert reports[1] == reports[0]
    assert reports[2] == reports[0]
