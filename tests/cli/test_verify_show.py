"""`verify --show`: how much of what was found is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.verify import Report
from halfbyte.verify.problems import WeightError


@pytest.mark.parametrize(
    ("show", "said"),
    [
        (0, ["2 weights, none worse than 0.2000", "problems and warnings not shown: 1; --json FILE has them all"]),
        (1, ["… and 1 more, none worse than 0.1000", "error [names] b: is missing"]),
    ],
)
def test_none_prints_no_table(show: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [WeightError(name, "bf16", (2, 2), relative, 1.0) for name, relative in (("a", 0.2), ("b", 0.1))]
    report = Report("d", "s", errors=errors)
    report.add("error", "names", "b", "is missing")
    monkeypatch.setattr("halfbyte.verify.verify", lambda *arguments, **options: report)
    output = CliRunner().invoke(app, ["verify", str(tmp_path), "--against", "s", "--show", str(show)]).output
    assert all(line in output.splitlines() for line in said)
    assert ("largest" in output) == (show > 0)
