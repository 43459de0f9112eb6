"""Reports: counts, the last line, groups of alike, and the fields of the file."""

from __future__ import annotations

import pytest

from halfbyte.verify.problems import Problem, Report, WeightError, number


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_numbers_of_things(count: int, text: str) -> None:
    assert number(count, "row") == text


def test_a_new_report_is_empty() -> None:
    report = Report("p")
    assert (report.against, report.tensors, report.bytes, report.kinds, report.equal) == (None, 0, 0, {}, 0)
    assert (report.problems, report.errors, report.clean, report.alike()) == ([], [], True, [])
    assert report.last_line == "p: 0 problems, 0 warnings in 0 tensors (unquantized: none of them is)"


def test_counts_and_the_last_line() -> None:
    report = Report("p", tensors=7, kinds={"nvfp4 (modelopt)": 2, "fp8 (scale)": 1})
    report.add("warning", "a", "x", "text")
    assert report.clean
    report.extend([Problem("error", "b", "y", "text"), Problem("warning", "a", "x", "text")])
    assert (report.count("error"), report.count("warning"), report.clean) == (1, 2, False)
    assert report.last_line == "p: 1 problem, 2 warnings in 7 tensors (1 fp8 (scale), 2 nvfp4 (modelopt))"


def test_alike_comes_errors_first_in_the_order_found() -> None:
    report = Report("p")
    for level, name, text in (
        ("warning", "l.1", "is 2"),
        ("error", "l.2", "is 3"),
        ("error", "m", "is"),
        ("error", "l.3", "is 9"),
    ):
        report.problems.append(Problem("error" if level == "error" else "warning", "r", name, text))
    assert [[problem.name for problem in group] for group in report.alike()] == [["l.2", "l.3"], ["m"], ["l.1"]]


def test_the_file() -> None:
    report = Report("p", "s", 3, 99, {"k": 1}, equal=2)
    report.add("error", "rule", "name", "text")
    report.errors.append(WeightError("w", "bf16", (2, 3), 0.5, 4.0))
    assert report.as_json() == {
        "path": "p",
        "against": "s",
        "clean": False,
        "tensors": 3,
        "bytes": 99,
        "kinds": {"k": 1},
        "summary": "p: 1 problem, 0 warnings in 3 tensors (1 k)",
        "problems": [{"level": "error", "rule": "rule", "name": "name", "text": "text"}],
        "equal": 2,
        "errors": [{"name": "w", "kind": "bf16", "shape": [2, 3], "relative": 0.5, "largest": 4.0}],
    }
