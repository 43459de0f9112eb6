"""`python -m tests.zoo.table REPORT.json`: the table of docs/clients.md from what `tests.zoo.run --json` wrote."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.zoo.case import LAYOUTS, THEN

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- table: zoo -->", "<!-- end -->"
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.table", description=__doc__)
    parser.add_argument("report", type=Path)
    report = json.loads(parser.parse_args().report.read_text())
    PAGE.write_text(replaced(PAGE.read_text(), table(report)))
    print(f"wrote {PAGE.name}: {len(report)} classes")


def replaced(page: str, text: str) -> str:
    """The page with the text between its markers exchanged."""
    found = re.search(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{page[: found.start()]}{BEGIN}\n{text}\n{END}{page[found.end() :]}"


def table(report: Sequence[Row]) -> str:
    """Counts, a row per class, and the reasons by number."""
    reasons: dict[str, int] = {}
    rows = [_row(row, reasons) for row in report]
    header = f"| class | {' | '.join(LAYOUTS)} |"
    counted = [f"- {layout}: {_counts(report, layout)}" for layout in LAYOUTS]
    told = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*counted, "", header, "|---" * (1 + len(LAYOUTS)) + "|", *rows, "", *told])


def _row(row: Row, reasons: dict[str, int]) -> str:
    cells = []
    for layout in LAYOUTS:
        kind, _, text = str(row["outcomes"][layout]).partition(": ")
        if text:
            kind = f"{kind} ({reasons.setdefault(reason(text, row['name']), len(reasons) + 1)})"
        cells.append(kind)
    return f"| {row['name']} | {' | '.join(cells)} |"


def _counts(report: Sequence[Row], layout: str) -> str:
    kinds = [str(row["outcomes"][layout]).partition(":")[0] for row in report]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def reason(text: str, name: str) -> str:
    """A reason without what differs from class to class: names of modules, and what transformers then did.

    >>> reason("transformers reads no scale of experts; and so: 12 unexpected keys: model.layers.3.x", "A")
    'transformers reads no scale of experts'
    >>> reason("transformers (5.22.2) cannot load A with model.layers.#.q, model.layers.#.k and 2 more packed", "A")
    'transformers (5.22.2) cannot load it with … packed'
    """
    short = re.sub(MODULES, "…", text.partition(THEN)[0].replace(name, "it"))
    return re.sub(
        r"[.;] (To load it there|add the missing tensor|Keep |Checkout |You can install).*", "", short
    ).replace("|", "\\|")


MODULE = r"[A-Za-z_][\w#]*(?:\.[\w#]+){2,}"
MODULES = rf"{MODULE}(?:, {MODULE})*(?: and \d+ more)?"


if __name__ == "__main__":
    main()
