"""The mutation tool: what it changes, what it leaves alone, and that it puts files back."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.mutate import is_noticed, mutations

SOURCE = '''"""About 1 + 1."""
def grows(x: int, limit: "int" = 3) -> bool:
    if not x:
        return False
    return x < limit and x + 1 <= limit
'''


def test_every_kind_of_change(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    path.write_text(SOURCE)
    found = mutations(path)
    assert {(mutation.line, mutation.before, mutation.after) for mutation in found} == {
        (2, "3", "(4)"),
        (3, "not x", "(x)"),
        (4, "False", "(True)"),
        (5, "x < limit and x + 1 <= limit", "(x < limit or x + 1 <= limit)"),
        (5, "x < limit", "(x <= limit)"),
        (5, "x + 1 <= limit", "(x + 1 < limit)"),
        (5, "x + 1", "(x - 1)"),
        (5, "1", "(2)"),
    }
    for mutation in found:
        ast.parse(mutation.text)
        assert mutation.text != SOURCE
    assert path.read_text() == SOURCE


def test_a_change_is_noticed_by_a_test_that_needs_the_line(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    path.write_text(SOURCE)
    good, poor = tmp_path / "test_good.py", tmp_path / "test_poor.py"
    load = f"import runpy\ngrows = runpy.run_path({str(path)!r})['grows']\n"
    good.write_text(load + "def test_it():\n    assert [grows(x) for x in range(4)] == [False, True, True, False]\n")
    poor.write_text(load + "def test_it():\n    assert not grows(0)\n")
    (mutation,) = [mutation for mutation in mutations(path) if mutation.before == "x + 1"]
    assert is_noticed(mutation, [str(good)], 60) is False, "x - 1 <= limit holds wherever x < limit does"
    (mutation,) = [mutation for mutation in mutations(path) if mutation.before == "x + 1 <= limit"]
    assert is_noticed(mutation, [str(good)], 60)
    assert not is_noticed(mutation, [str(poor)], 60)
    assert path.read_text() == SOURCE
