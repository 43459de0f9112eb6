"""Which parts of a weight are damaged: what one pass measured, judged and placed by row, block and column.

A weight that was rounded to nearest has no code but the nearest ones, so a few others are damage, and so is a scale
that breaks the rule which all others follow. Other ways of rounding (GPTQ, at random) leave such codes in most rows;
then only rows and blocks that are much worse than the rest can be told (otherwise.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.formats import E2M1
from halfbyte.verify.against import otherwise
from halfbyte.verify.against.measure import Measured
from halfbyte.verify.nearest import VALUES, Encoded, look_up, not_nearest
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.values import Matrix

FACTOR = 0.02
"""How far from 1 the best factor of a weight may be."""

CERTAIN = 4
"""Standard deviations by which it must differ."""

EXPLAINED = 0.99
"""Share of the squared error that a missing factor explains where codes are right and the source is exact."""

SHOWN = 50
"""Places of one weight that are named one by one."""

EXACT = 1e-6
"""Error of a row that still counts as exact: scales may have been inverted twice."""


def is_off_by_a_factor(measured: Measured, mine: Matrix, theirs: Matrix) -> bool:
    """Whether one factor is missing: the codes and the middle block say so, or it explains every error."""
    least = max(FACTOR, CERTAIN * measured.factor_error)
    if is_rounded_otherwise(measured) and np.isfinite(least) and otherwise.is_off_by_a_factor(mine, theirs, least):
        return True
    off = [factor - 1 for factor in measured.factors]
    clearly = min(abs(part) for part in off) >= least and off[0] * off[1] > 0
    return clearly and measured.explained > EXPLAINED and not measured.by_amax


def is_rounded_otherwise(measured: Measured) -> bool:
    """Whether codes that are not the nearest are so common that the writer must have meant them."""
    rows = measured.error.shape[0]
    if rows < 16:
        return sum(measured.wrong_blocks.values()) > max(8, rows * measured.blocks // 4)
    scattered = sum(not _is_whole(measured, row) for row in measured.wrong_blocks)
    return scattered > max(4, rows // 20) or len(measured.wrong_blocks) > rows // 2


def _is_whole(measured: Measured, row: int) -> bool:
    """Whether a row is wrong as a whole, not in some blocks."""
    return measured.wrong_blocks[row] > max(2, measured.blocks // 2)


def damage_problems(measured: Measured, mine: Matrix, theirs: Matrix) -> Iterator[Problem]:
    """What is wrong, with its places, for a weight that is right on the whole."""
    if mine.encoded is None:
        yield from _bad_rows(measured, mine, theirs)
    elif is_off_by_a_factor(measured, mine, theirs):
        text = (
            f"{mine.kind}: right when multiplied by {measured.factors[0]:.4f}; the tensor scale is off by "
            f"{abs(1 / measured.factors[0] - 1):.1%}"
        )
        yield Problem("error", "values", mine.name, text)
    elif is_rounded_otherwise(measured):
        yield from _bad_rows(measured, mine, theirs)
        yield from _bad_blocks(measured, mine, theirs)
    else:
        rows = sorted(measured.wrong_blocks)
        for row in rows[:SHOWN]:
            if _is_whole(measured, row):
                yield _whole_row(row, measured, mine, theirs)
            else:
                yield from _blocks(row, mine, theirs)
        if len(rows) > SHOWN:
            text = f"{number(len(rows) - SHOWN, 'more row')} with codes that are not the nearest to the source"
            yield Problem("error", "row", mine.name, text)
        for row, block in measured.odd_scales:
            yield _odd_scale(row, block, measured.rule, mine)


def _bad_rows(measured: Measured, mine: Matrix, theirs: Matrix) -> Iterator[Problem]:
    """Rows that are much worse than the rest; where most rows are exact, those that are not."""
    bad = _bad(measured)
    if mine.encoded is not None:
        bad = [row for row in bad if not _is_row(row, mine, theirs)]
    for row in bad[:SHOWN]:
        yield _whole_row(row, measured, mine, theirs)
    if len(bad) > SHOWN:
        yield Problem("error", "row", mine.name, f"{number(len(bad) - SHOWN, 'more row')} as bad")


def _is_row(row: int, mine: Matrix, theirs: Matrix) -> bool:
    """Whether a row that is far from its source is that row nevertheless, and not another one."""
    if not otherwise.holds_its_source(row, mine, theirs):
        return False
    return _same_row(mine.row(row), theirs) in (None, row)


def _bad(measured: Measured) -> list[int]:
    errors = np.nan_to_num(measured.row_errors, nan=np.inf)
    if not np.median(errors):
        return [int(row) for row in np.flatnonzero(errors > EXACT)]
    return otherwise.distant_rows(measured)


def _bad_blocks(measured: Measured, mine: Matrix, theirs: Matrix) -> Iterator[Problem]:
    """Blocks that are off by many more steps than the rest, in rows that are not wrong as a whole. Warnings: a
    writer may have meant them, where inputs hardly count."""
    done = set(_bad(measured))
    for row, block, steps, stored in otherwise.distant_blocks(mine, theirs):
        if row not in done:
            text = f"{_place(row, block, stored)}: off by {steps:.3g} steps on average, far more than the rest"
            yield Problem("warning", "block", mine.name, text)


def _whole_row(row: int, measured: Measured, mine: Matrix, theirs: Matrix) -> Problem:
    """A row that is wrong as a whole, with what it holds instead."""
    values = mine.row(row)
    text = f"row {row}: relative error {measured.row_errors[row]:.3g}"
    if not values.any():
        text += "; it decodes to 0"
    else:
        other = _same_row(values, theirs)
        if other is not None and other != row:
            text += f"; it holds the values of row {other} of the source"
    return Problem("error", "row", mine.name, text)


def _same_row(values: F32, theirs: Matrix) -> int | None:
    """The row of the source that these values are nearest to in direction, if they are near."""
    best, found = 0.9, None
    length = float(np.linalg.norm(values))
    for start, stop in theirs.chunks():
        part = theirs.read(start, stop)
        with np.errstate(all="ignore"):
            cosines = np.nan_to_num((part @ values) / (np.linalg.norm(part, axis=1) * length), nan=0.0)
        at = int(cosines.argmax())
        if cosines[at] > best:
            best, found = float(cosines[at]), start + at
    return found


def _blocks(row: int, mine: Matrix, theirs: Matrix) -> Iterator[Problem]:
    """The blocks of a row that have wrong codes."""
    if mine.encoded is None:
        return
    stored, wanted = mine.encoded(row, row + 1), theirs.read(row, row + 1)
    wrong = not_nearest(stored, wanted)[0]
    values, got = look_up(VALUES, stored.codes)[0], mine.row(row)
    for block in np.unique(np.flatnonzero(wrong) // stored.block):
        columns = block * stored.block + np.flatnonzero(wrong[block * stored.block :][: stored.block])
        column = int(columns[0])
        text = f"{_place(row, int(block), stored)}: "
        text += (
            f"the code in column {column} ({values[column]:g}) decodes to {got[column]:.4g}, the source is "
            f"{wanted[0, column]:.4g}; {_nearest(stored, wanted, column):g} is nearest"
        )
        if len(columns) > 1:
            text += f" ({len(columns) - 1} more in this block)"
        byte = _repaired(stored, wanted, int(block))
        if byte is not None:
            has = int(stored.scale_bytes[0, block])
            text += f"; all are right with scale byte {byte:#04x}, not {has:#04x}: one bit differs"
        yield Problem("error", "block", mine.name, text)


def _nearest(stored: Encoded, wanted: F32, column: int) -> float:
    quotient = wanted[0, column] / stored.multiplier()[0, column // stored.block, 0]
    return float(E2M1.values[np.abs(E2M1.values - quotient).argmin()])


def _repaired(stored: Encoded, wanted: F32, block: int) -> int | None:
    """The scale byte, one bit from the stored one, under which every code of the block is the nearest, if there is."""
    columns = slice(block * stored.block, (block + 1) * stored.block)
    part = wanted[:, columns]
    found: list[tuple[float, int]] = []
    for bit in range(8):
        byte = int(stored.scale_bytes[0, block]) ^ (1 << bit)
        scale = stored.scale_format.values[byte : byte + 1].reshape(1, 1)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            continue
        codes = stored.codes[:, columns.start // 2 : columns.stop // 2]
        other = Encoded(
            np.ascontiguousarray(codes), np.array([[byte]], np.uint8), scale, stored.tensor_scale, stored.scale_format
        )
        if not not_nearest(other, part).any():
            decoded = look_up(VALUES, other.codes) * other.multiplier()[:, :, 0]
            found.append((float(((decoded - part) ** 2).sum()), byte))
    return min(found)[1] if found else None


def _odd_scale(row: int, block: int, rule: str, mine: Matrix) -> Problem:
    text = f"row {row}, block {block}"
    if mine.encoded is not None:
        stored = mine.encoded(row, row + 1)
        text = f"{_place(row, block, stored)}: scale byte {int(stored.scale_bytes[0, block]):#04x}"
    return Problem("error", "block", mine.name, f"{text} is not the one that {rule}, as all other scales are")


def _place(row: int, block: int, stored: Encoded) -> str:
    return f"row {row}, columns {block * stored.block} to {(block + 1) * stored.block - 1}"
