"""The mutation tool: what it changes, which tests it picks, that it puts files back, and that its list is not stale."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutate.__main__ import Count, sample, table
from tools.mutate.changes import Mutation, mutations
from tools.mutate.reviewed import Reviewed, reviewed
from tools.mutate.trial import FIRST_ROUND, ROOT, Record, RecordedTest, Trials, mirror, read_record, record, rounds

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


def test_what_no_test_can_notice(tmp_path: Path) -> None:
    path = tmp_path / "looks.py"
    path.write_text(
        """@dataclass(frozen=True, slots=True, repr=False)
class Look:
    size: Literal[1] = field(default=2, repr=False)
    def pairs(self, x: f"{3}" = None) -> Literal[4]:
        return zip(x, sorted(x, strict=True), strict=True), f"{5}", x.reshape(-1, 6), x.other(-1)
if TYPE_CHECKING:
    pass
"""
    )
    assert [(mutation.number, mutation.change) for mutation in mutations(path)] == [
        (1, "True → (False)"),
        (3, "2 → (3)"),
        (5, "True → (False)"),
        (5, "6 → (7)"),
        (5, "1 → (2)"),
    ]


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
    (tmp_path / "tools" / "mutate" / "first").mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").touch()
    for name in ("__init__.py", "calls.py", "changes.py", "forks.py", "pytest_run.py", "first/sitecustomize.py"):
        (tmp_path / "tools" / "mutate" / name).write_bytes((ROOT / "tools" / "mutate" / name).read_bytes())
    (tmp_path / "test_it.py").write_text(
        "from grows import grows\n"
        "def test_good():\n    assert [grows(x) for x in range(4)] == [False, True, True, False]\n"
        "def test_poor():\n    assert not grows(0)\n"
    )
    return tmp_path


def recorded(copy: Path, *names: str) -> list[RecordedTest]:
    return [RecordedTest(f"test_it.py::{name}", 0.1, frozenset({f"{copy}/src/grows.py::grows"})) for name in names]


def noticed_by(mutation: Mutation, copy: Path, tests: list[RecordedTest]) -> str:
    trials = Trials(copy, Record(tests))
    try:
        return trials.noticed_by(mutation)
    finally:
        trials.close()


def changing(copy: Path, change: str) -> Mutation:
    (mutation,) = [one for one in mutations(copy / "src" / "grows.py") if one.change.startswith(change)]
    return mutation


def test_a_change_is_noticed_by_a_test_that_needs_the_line(copy: Path) -> None:
    both = recorded(copy, "test_poor", "test_good")
    trials = Trials(copy, Record(both))
    assert not trials.noticed_by(changing(copy, "x + 1 →")), "x - 1 <= limit holds wherever x < limit does"
    assert trials.noticed_by(changing(copy, "x + 1 <=")) == "test_it.py::test_good"
    trials.record = Record(both[:1])
    assert not trials.noticed_by(changing(copy, "x + 1 <=")), "only the tests of the list run"
    assert (copy / "src" / "grows.py").read_text() == SOURCE
    assert trials.server is not None, "in forks of one process"
    trials.close()
    assert not trials.server


def test_a_line_outside_functions_and_what_an_import_calls_are_tried_afresh(copy: Path) -> None:
    """A fork has imported them as they were."""
    source = "def one():\n    return 1\nONE, TWO = one(), 2\n"
    (copy / "src" / "grows.py").write_text(source)
    (copy / "test_it.py").write_text("from grows import ONE, TWO\ndef test_it():\n    assert (ONE, TWO) == (1, 2)\n")
    tests = [RecordedTest("test_it.py::test_it", 0.1, frozenset({f"{copy}/src/grows.py::one"}))]
    inside, outside = mutations(copy / "src" / "grows.py")
    trials = Trials(copy, Record(tests, frozenset({f"{copy}/src/grows.py::one"})))
    assert trials.noticed_by(inside) == trials.noticed_by(outside) == "test_it.py::test_it"
    assert trials.server is None


def test_values_of_arguments_that_are_left_out_are_tried_afresh(copy: Path) -> None:
    """They belong to the function, not to its code."""
    (copy / "src" / "grows.py").write_text("def one(x=1):\n    return x\n")
    (copy / "test_it.py").write_text("from grows import one\ndef test_it():\n    assert one() == 1\n")
    tests = [RecordedTest("test_it.py::test_it", 0.1, frozenset({f"{copy}/src/grows.py::one"}))]
    (found,) = mutations(copy / "src" / "grows.py")
    assert noticed_by(found, copy, tests) == "test_it.py::test_it"


def test_a_fork_forgets_what_was_cached_and_reaches_who_holds_the_function(copy: Path) -> None:
    source = (
        "import functools\ndef keep(function):\n    def inner():\n        return function()\n    return inner\n"
        "@keep\n@functools.cache\ndef one():\n    return (\n        1 +\n        1\n    )\ndef last():\n    return 3\n"
    )
    package = copy / "src" / "halfbyte"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (copy / "test_it.py").write_text(
        "from halfbyte import one\none()\ndef test_it():\n    assert one() == 2\ndef test_more():\n    pass\n"
    )
    tests = [RecordedTest("test_it.py::test_it", 0.1, frozenset({f"{package}/__init__.py::one"}))]
    found = mutations(package / "__init__.py")
    trials = Trials(copy, Record(tests))
    names = {(mutation.number, mutation.change): trials.noticed_by(mutation) for mutation in found}
    trials.close()
    noticed = "test_it.py::test_it"
    assert names == {
        (10, "1 + 1 → (1 - 1)"): noticed,
        (10, "1 → (2)"): noticed,
        (11, "1 → (2)"): noticed,
        (14, "3 → (4)"): "",
    }
    assert {mutation.text.count("\n") for mutation in found} == {source.count("\n")}, "each line stays where it is"


def test_only_new_and_changed_files_are_recorded_again(copy: Path) -> None:
    (copy / "src" / "grows.py").write_text(SOURCE + "TRUE = grows(1)\n")
    (copy / "test_more.py").write_text("from grows import grows\ndef test_more():\n    assert grows(1)\n")
    first = record(copy, ["test_it.py", "test_more.py"])
    assert {test.name: test.functions for test in first.tests} == dict.fromkeys(
        ("test_it.py::test_good", "test_it.py::test_poor", "test_more.py::test_more"),
        frozenset({"src/grows.py::grows"}),
    )
    assert "src/grows.py::grows" in first.imported
    marked = replace(first, tests=[replace(test, seconds=99) for test in first.tests])
    (copy / "test_more.py").write_text("def test_less():\n    pass\ndef test_bad():\n    assert False\n")
    second = record(copy, ["test_it.py", "test_more.py"], marked)
    assert [(test.name, test.seconds == 99) for test in second.tests] == [
        ("test_it.py::test_good", True),
        ("test_it.py::test_poor", True),
        ("test_more.py::test_less", False),
    ]
    assert record(copy, ["test_it.py", "test_more.py"], second) == second


def test_a_record_of_other_tests(copy: Path) -> None:
    """A test that is gone notices nothing; a file that is gone is an error, not a mutation that was noticed."""
    assert not noticed_by(changing(copy, "x + 1 <="), copy, recorded(copy, "test_gone"))
    gone = RecordedTest("test_gone.py::test_it", 0.1, frozenset({f"{copy}/src/grows.py::grows"}))
    with pytest.raises(RuntimeError, match=r"not found: .*test_gone\.py"):
        noticed_by(changing(copy, "x + 1 <="), copy, [gone])


def test_a_package_from_elsewhere_is_an_error(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An editable install, for example, would hide every mutation."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "halfbyte.py").write_text("")
    (copy / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\nimport halfbyte\n")
    with pytest.raises(RuntimeError, match=r"halfbyte comes from .*, not from the copy"):
        noticed_by(changing(copy, "x + 1 <="), copy, recorded(copy, "test_good"))


def test_specific_tests_first_then_all_callers_then_the_folder() -> None:
    path = Path("src/halfbyte/casting/rows.py")
    mutation = Mutation(path, 1, "f", "", "", "")
    f, g, h = (f"src/halfbyte/casting/rows.py::{name}" for name in "fgh")

    def test(name: str, seconds: float, *functions: str) -> RecordedTest:
        return RecordedTest(name, seconds, frozenset(functions))

    broad, slow, quick = (
        test("tests/cli/a.py::0", 0.1, f, g),
        test("tests/cli/a.py::1", 2, f),
        test("tests/cli/a.py::2", 1, f),
    )
    in_folder, other = test("tests/casting/a.py::0", 0.1, g), test("tests/cli/a.py::3", 0.1, g)
    tests = [broad, in_folder, slow, other, quick]
    assert list(rounds(mutation, tests)) == [[quick, slow, broad], [in_folder]]
    assert list(rounds(Mutation(path, 1, "", "", "", ""), tests)) == [[in_folder], [broad, other, quick, slow]]
    idle = test("tests/casting/c.py::0", 0.05, "src/halfbyte/formats.py::y")
    assert next(rounds(Mutation(path, 1, "", "", "", ""), [*tests, idle])) == [in_folder, idle]
    assert list(rounds(mutation, tests, 1.25)) == [[quick, broad], [in_folder]], "those that fit into the seconds"
    assert list(rounds(mutation, tests, 1.15)) == [[quick, broad]]
    assert list(rounds(Mutation(path, 1, "i", "", "", ""), tests)) == [[in_folder]]
    many = [test(f"tests/cli/b.py::{i}", 100 - i, f) for i in range(FIRST_ROUND + 2)]
    first, second = rounds(mutation, [*many, test("tests/cli/b.py::h", 1, h)])
    assert first == many[:1:-1]
    assert second == many[1::-1]
    assert mirror(path) == "tests/casting"
    known = Record([quick], frozenset({g}), {"tests/cli/a.py": "1"})
    assert read_record(known.as_json()) == known


def test_a_sample_depends_on_the_seed_alone() -> None:
    chosen, every = sample("layouts", 10, 0)
    assert sample("layouts", 20, 0)[0][:10] == chosen != sample("layouts", 10, 1)[0]
    assert len(sample("layouts", every + 1, 0)[0]) == every


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
