"""What a lane computes of values that are on the device: queued on its stream, and the results queued back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.gpu import WORDS, total_of
from halfbyte.backends.headroom import Total, Trial
from halfbyte.checkpoint.execute.device.lanes import Lane
from halfbyte.checkpoint.execute.device.protocol import Matrix, Memory
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group


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
    engine: Engine, words: npt.NDArray[np.int64], amax: np.float32, candidates: tuple[float, ...], dtype: np.dtype[Any]
) -> tuple[Total, ...]:
    """The sums of a part from those words; None for a candidate that is left out."""
    usable = engine.usable_headrooms(amax, candidates, dtype)
    totals = (total_of(each.tolist()) for each in words.reshape(len(candidates), WORDS))
    return tuple(total if kept else None for total, kept in zip(totals, usable, strict=True))
