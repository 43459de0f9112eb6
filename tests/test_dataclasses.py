"""Types are frozen: what a plan or a rule says cannot be changed behind someone's back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import halfbyte

SOURCE = Path(halfbyte.__file__).parent

COLLECTORS = {
    "calibration/weights.py::Weights",
    "checkpoint/execute/device/solving_time.py::Work",
    "checkpoint/execute/device/loading.py::Slot",
    "checkpoint/execute/factors.py::_Entry",
    "checkpoint/execute/group.py::Group",
    "checkpoint/execute/hand_out.py::Line",
    "checkpoint/execute/pool.py::Collected",
    "checkpoint/execute/tasks.py::Job",
    "checkpoint/execute/tasks.py::Task",
    "checkpoint/plan/draft.py::Draft",
    "checkpoint/plan/source_weights.py::Found",
    "layouts/kv_cache.py::Moves",
    "scale/cluster.py::Cluster",
    "scale/in_flight.py::Flight",
    "verify/against/compare.py::Found",
    "verify/against/measure.py::Measured",
    "verify/problems.py::Report",
    "verify/against/scale_rules.py::ScaleRules",
}
"""Classes that collect, which are the only ones that change."""


def dataclasses() -> Iterator[tuple[str, dict[str, object]]]:
    """`file::Class` and the options of every dataclass of the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(call).rpartition(".")[2] == "dataclass" and isinstance(node, ast.ClassDef):
                    given = decorator.keywords if isinstance(decorator, ast.Call) else []
                    options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in given}
                    yield f"{path.relative_to(SOURCE).as_posix()}::{node.name}", options


def test_only_collectors_can_be_changed() -> None:
    found = dict(dataclasses())
    assert len(found) > 100
    assert {name for name, options in found.items() if not options.get("frozen")} == COLLECTORS
