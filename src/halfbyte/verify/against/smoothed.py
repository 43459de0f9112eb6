"""Factors that were folded into a checkpoint: a source has to be scaled alike before it is compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.codec.bits import F32
from halfbyte.errors import HalfbyteError
from halfbyte.models.folding import folds
from halfbyte.smoothing import FILE, Smoothing, read_smoothing, scaled
from halfbyte.verify.problems import Problem
from halfbyte.verify.reading import read_whole
from halfbyte.verify.values import Matrix


def smoothing_of(checkpoint: Checkpoint) -> tuple[Smoothing, list[Problem]]:
    """The factors that a checkpoint says it has, and what is wrong with them: each must leave the outputs alone."""
    path = checkpoint.path / FILE
    if not path.is_file():
        return Smoothing(()), []
    try:
        found = read_smoothing(path)
        modules = {name.removesuffix(end) for name in checkpoint.tensors for end in (".weight", ".weight_packed")}
        known = {fold.origin: fold for fold in folds(checkpoint.config, modules)}
    except HalfbyteError as error:
        return Smoothing(()), [Problem("error", "smoothing", FILE, str(error))]
    problems = []
    for link in found.links:
        fold = known.get(link.origin)
        wanted = None if fold is None else (fold.into, fold.is_norm, fold.repeats, fold.head)
        if wanted != (link.into, link.norm, link.repeats, link.head):
            readers = ", ".join(link.into)
            text = f"{FILE} divides it by factors that {readers} would have to undo; in this model they do not"
            problems.append(Problem("error", "smoothing", link.origin, text))
    return found, problems


def smoothed(matrix: Matrix, smoothing: Smoothing) -> Matrix:
    """A weight of the source with the factors folded in."""
    columns, rows = smoothing.columns.get(matrix.name), smoothing.rows.get(matrix.name)
    if columns is None and rows is None:
        return matrix
    fits = (columns is None or len(columns) == matrix.shape[1]) and (rows is None or len(rows) == matrix.shape[0])
    if not fits:
        return matrix

    def read(start: int, stop: int) -> F32:
        mine = None if rows is None else rows[start:stop]
        return np.asarray(scaled(matrix.read(start, stop), columns, mine), np.float32)

    return replace(matrix, read=read, plain=None, stored=None, multipliers=None)


def vector_problem(
    checkpoint: Checkpoint, source: Checkpoint, mine: Tensor, theirs: Tensor, smoothing: Smoothing
) -> Problem | None:
    """A norm or a bias that was divided by factors: None if it is the source's, divided."""
    exponents = smoothing.vectors[mine.name]
    if mine.shape != theirs.shape or mine.shape != exponents.shape or mine.dtype != theirs.dtype:
        return Problem(
            "error", "shape", mine.name, f"{mine.dtype} {list(mine.shape)}, unlike the source or its factors"
        )
    got, wanted = read_whole(checkpoint.path, mine), read_whole(source.path, theirs)
    wrong = got != scaled(wanted, None, exponents, dtype=got.dtype)
    if not wrong.any():
        return None
    first = int(wrong.argmax())
    text = (
        f"element {first} is {float(got[first]):g}, but {float(wanted[first]):g} / 2^{exponents[first]} in the source"
    )
    return Problem("error", "kept", mine.name, text)
