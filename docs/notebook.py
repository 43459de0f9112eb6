"""Run the notebook of docs/ cell by cell, without Jupyter, and write what the cells print.

    python docs/notebook.py

Cells use print() for everything that they show, so text is all there is. A test fails if the printed text is not what
the file holds.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "tour.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook after a run of all cells, in order, in one fresh namespace. An error in a cell is raised."""
    names: dict[str, object] = {"__name__": "__main__"}
    cells = []
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
            text = printed.getvalue().splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def as_text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(as_text(executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))), encoding="utf-8")
    print(f"wrote {NOTEBOOK.name}")
