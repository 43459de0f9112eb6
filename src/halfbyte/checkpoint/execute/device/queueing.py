"""What a lane computes of values that are on the device: queued on its stream, and the results queued back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.gpu import WORDS, total_of
from halfbyte.backends.headroom import Total, Trial
from halfbyte.checkpoint.execute.device.lanes import Lane
from halfbyte.checkpoint.execute.device.protocol import Matrix, Memory
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.io.buffers import Arena


def queue_amax(lane: Lane, matrix: Matrix, into: npt.NDArray[np.float32]) -> None:
    found = lane.take(4)
    lane.stream.amax(matrix, found)
    lane.stream.download(found, into)


def queue_quantize(engine: Engine, lane: Lane, matrix: Matrix, group: Group | None) -> tuple[Memory, Memory]:
    """Codes and scale bytes, which stay on the device."""
    codes, scales = engine.widths(matrix.columns)
    made = lane.take(matrix.rows * codes), lane.take(matrix.rows * scales)
    lane.stream.quantize(matrix, None if group is None else group.amax, *made)
    return made


def queue_survey(
    engine: Engine,
    lane: Lane,
    matrix: Matrix,
    amax: np.float32,
    tried: tuple[Trial, int],
    into: npt.NDArray[np.int64],
) -> None:
    """What each candidate for the headroom costs, as words. tried: the trial, and how many rows come before these."""
    mark = lane.mark()
    scratch = lane.take(matrix.rows * engine.widths(matrix.columns)[0])
    found = lane.take(into.nbytes)
    lane.stream.survey(matrix, amax, tried, scratch, found)
    lane.stream.download(found, into)
    lane.release(mark)


def read_totals(
    engine: Engine,
    words: Sequence[npt.NDArray[np.int64]],
    amax: np.float32,
    trials: Sequence[Trial],
    dtypes: Sequence[np.dtype[Any]],
) -> list[list[tuple[Total, ...]]]:
    """For each trial the sums of every part from those words; None for a candidate that is left out."""
    return [
        [_read_part(engine, part, amax, trial.candidates, dtype) for part, dtype in zip(found, dtypes, strict=True)]
        for trial, found in zip(trials, words, strict=True)
    ]


def _read_part(
    engine: Engine, words: npt.NDArray[np.int64], amax: np.float32, candidates: tuple[float, ...], dtype: np.dtype[Any]
) -> tuple[Total, ...]:
    usable = engine.usable_headrooms(amax, candidates, dtype)
    totals = (total_of(each) for each in words.reshape(len(candidates), WORDS).tolist())
    return tuple(total if kept else None for total, kept in zip(totals, usable, strict=True))


def room_for_words(arena: Arena, parts: int, trials: Sequence[Trial]) -> list[npt.NDArray[np.int64]]:
    """Room for what a survey of so many parts says: for each trial (parts, words)."""
    sizes = [WORDS * len(trial.candidates) for trial in trials]
    return [arena.take(8 * size * parts).view(np.int64).reshape(parts, size) for size in sizes]
