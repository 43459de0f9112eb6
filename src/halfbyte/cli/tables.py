"""Tables that fit the terminal and lose no text: columns that matter less are left out, and the rest is never cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table

from halfbyte.cli.app import out

FOLDED = 24
"""The least width of a column whose names go on in the next line (overflow="fold")."""
FRAME = 3
"""What a column takes beside its text: two spaces and a line."""


def print_table(table: Table, optional: Sequence[str] = (), markup: bool = True) -> None:
    """Print a table. If words of it would be cut, leave out optional columns, the first named first, and say so.

    markup: False for text from files, whose brackets must be printed as they are.
    """
    console = out(markup)
    whole = _total(_least(console, column) for column in table.columns)
    left_out = []
    for heading in optional:
        if _total(_least(console, column) for column in table.columns) <= console.width:
            break
        left_out.append(heading)
        table.columns = [column for column in table.columns if column.header != heading]
        for number, column in enumerate(table.columns):
            column._index = number
    if _total(_least(console, column) for column in table.columns) > console.width:
        for column in table.columns:  # nothing more can be left out: words go on in the next line, whole
            column.no_wrap, column.overflow = False, "fold"
    else:
        _set_widths(console, table)
    console.print(table)
    if left_out:
        text = f"left out here, because all needs a width of {whole}: {', '.join(reversed(left_out))}"
        console.print(text, markup=False, soft_wrap=True)


def _set_widths(console: Console, table: Table) -> None:
    """Where the table is too wide, give each column what its words need, and the rest to cells that need most.

    Headings come last: they are folded once, cells in each row.
    """
    if _total(max(map(len, _lines(console, column))) for column in table.columns) <= console.width:
        return
    widths = [_least(console, column) for column in table.columns]
    for cells_alone in (True, False):
        wanted = [max(map(len, _lines(console, column, cells_alone)), default=0) for column in table.columns]
        while _total(widths) < console.width:
            neediest = max(range(len(widths)), key=lambda i: wanted[i] - widths[i])
            if wanted[neediest] <= widths[neediest]:
                break
            widths[neediest] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


def _total(widths: Iterable[int]) -> int:
    """The width of a table with columns of these widths."""
    return 1 + sum(FRAME + width for width in widths)


def _lines(console: Console, column: Column, cells_alone: bool = False) -> list[str]:
    given = column.cells if cells_alone else (column.header, *column.cells)
    cells = [console.render_str(str(cell)).plain for cell in given]
    return [line for cell in cells for line in cell.splitlines() or [""]]


def _least(console: Console, column: Column) -> int:
    """The width at which no word of a column is cut. Names may be folded."""
    if column.no_wrap:
        return max(map(len, _lines(console, column)))
    longest = max((len(word) for line in _lines(console, column) for word in line.split()), default=1)
    return min(longest, FOLDED) if column.overflow == "fold" else longest
