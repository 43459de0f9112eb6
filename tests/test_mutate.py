"""The mutation tool: what it changes, which tests it picks, that it puts files back, and that its list is not stale."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.mutate.__main__ import Count, table
from tools.mutate.changes import Mutation, mutations
from tools.mutate.reviewed import Reviewed, reviewed
from tools.mutate.trial import ROOT, RecordedTest, callers, is_noticed, mirror, read_record

SOURCE = '''"""About 1 + 1."""
def grows(x: int, limit: "int" = 3) -> bool:
    if not x:
        return False
    return x < limit and x + 1 <= limit
class Heap:
    def add(self, size):
        self.check(size)
        if size:
            self.total += size
        return [1, 1]
'''


def test_every_kind_of_change(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    path.write_text(SOURCE)
    found = mutations(path)
    assert [(mutation.number, mutation.function, mutation.change) for mutation in found] == [
        (2, "grows", "3 → (4)"),
        (3, "grows", "not x → (x)"),
        (4, "grows", "False → (True)"),
        (5, "grows", "x < limit and x + 1 <= limit → (x < limit or x + 1 <= limit)"),
        (5, "grows", "x < limit → (x <= limit)"),
        (5, "grows", "x + 1 <= limit → (x + 1 < limit)"),
        (5, "grows", "x + 1 → (x - 1)"),
        (5, "grows", "1 → (2)"),
        (8, "Heap.add", "self.check(size) → None"),
        (9, "Heap.add", "size → (not size)"),
        (10, "Heap.add", "self.total += size → self.total -= size"),
        (11, "Heap.add", "1 → (2)"),
        (11, "Heap.add", "1 → (2) (2nd)"),
    ]
    for mutation in found:
        ast.parse(mutation.text)
        assert mutation.text != SOURCE
    assert path.read_text() == SOURCE


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with one function and two tests of it, the second of which asks for little."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "grows.py").write_text(SOURCE)
    (tmp_path / "tools" / "mutate").mkdir(parents=True)
    for name in ("__init__.py", "calls.py"):
        (tmp_path / "tools" / "mutate" / name).write_bytes((ROOT / "tools" / "mutate" / name).read_bytes())
    (tmp_path / "test_it.py").write_text(
        "from grows import grows\n"
        "def test_good():\n    assert [grows(x) for x in range(4)] == [False, True, True, False]\n"
        "def test_poor():\n    assert not grows(0)\n"
    )
    return tmp_path


def changing(copy: Path, change: str) -> Mutation:
    (mutation,) = [one for one in mutations(copy / "src" / "grows.py") if one.change.startswith(change)]
    return mutation


def test_a_change_is_noticed_by_a_test_that_needs_the_line(copy: Path) -> None:
    good, poor = (
        RecordedTest(f"test_it.py::{name}", 0.1, frozenset({f"{copy}/src/grows.py::grows"}))
        for name in ("test_good", "test_poor")
    )
    assert not is_noticed(changing(copy, "x + 1 →"), copy, [good, poor]), "x - 1 <= limit holds wherever x < limit does"
    assert is_noticed(changing(copy, "x + 1 <="), copy, [poor, good])
    assert not is_noticed(changing(copy, "x + 1 <="), copy, [poor]), "only the tests of the list run"
    assert (copy / "src" / "grows.py").read_text() == SOURCE


def test_tests_that_call_the_function_quick_ones_first() -> None:
    mutation = Mutation(Path("src/halfbyte/casting/rows.py"), 1, "f", "", "", "")
    calling = frozenset({"src/halfbyte/casting/rows.py::f"})
    slow, quick = (RecordedTest(f"tests/cli/a.py::{seconds}", seconds, calling) for seconds in (2.0, 1.0))
    other = RecordedTest("tests/cli/a.py::other", 0.1, frozenset({"src/halfbyte/casting/rows.py::g"}))
    assert callers(mutation, [slow, other, quick]) == [quick, slow]
    assert mirror(mutation.path) == "tests/casting"
    assert read_record(json.dumps({quick.name: {"seconds": 1.0, "functions": sorted(calling)}})) == [quick]


def test_the_table() -> None:
    lines = table({"casting": Count(1200, 9, 1, 2), "verify": Count(10, 10, 0, 0)}).splitlines()
    assert lines[2:] == [
        "| casting | 1,200 | 10 | 9 | 1 | 2 | 90.0 % |",
        "| verify | 10 | 10 | 10 | 0 | 0 | 100.0 % |",
        "| all | 1,210 | 20 | 19 | 1 | 2 | 95.0 % |",
    ]


def test_every_reviewed_mutation_exists_and_has_a_reason() -> None:
    """An entry whose line was changed since must be read again."""
    entries = reviewed()
    every: dict[str, list[Mutation]] = {}
    for entry in entries:
        assert len(entry.reason) > 20, entry
        for file in [entry.file] if entry.file else []:
            every.setdefault(file, mutations(Path(file)))
            for change in entry.changes:
                alone = Reviewed(file, entry.function, entry.line, (change,), "")
                assert any(alone.has(mutation) for mutation in every[file]), (file, entry.line, change)
