"""`calibrate_on_cluster`: statistics of a model, by the nodes of a cluster.

A layer needs the outputs of the layer before it, so layers are not shared out; windows of text are. Each task runs the
model over a part of the windows, layer by layer, as `calibrate` does. The parts are added up at the end, in their
order, so the result depends on how many parts there are, and not on who computed them, when, or how often.
"""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from halfbyte.calibration.collect import Options, Progress, calibrate, enough, open_statistics_header
from halfbyte.calibration.tokens import Windows
from halfbyte.errors import CheckpointError, HalfbyteError, InputError
from halfbyte.scale.cluster import Cluster
from halfbyte.scale.in_flight import InFlight
from halfbyte.statistics import HEADER, LinearStatistics, Statistics, merge_statistics, open_statistics

PARTS = ".parts"
"""Behind the name of the output: the folder of the parts. It stays until the user deletes it."""


def calibrate_on_cluster(
    model: Path,
    windows: Windows,
    target: Path,
    cluster: Cluster,
    options: Options,
    parts: int,
    progress: Progress | None = None,
) -> Statistics:
    """Write the statistics of a model on some windows. Parts, and layers of parts, that are there are not made again.

    The model and the target must be on a file system that all nodes share.
    """
    if (target / HEADER).exists():
        found = open_statistics_header(target)
        if found.get("parts") == _about(windows, parts, options):
            return open_statistics(target)
        raise InputError(f"{target} has statistics of another run; give a new folder")
    cluster.places()  # raises if no node can run a task
    rows = [part for part in np.array_split(windows.tokens, min(parts, len(windows.tokens))) if len(part)]
    home = target.absolute().with_name(target.name + PARTS)
    folders = [home / f"part-{number:05}-of-{len(rows):05}" for number in range(len(rows))]
    pieces = [Windows(np.ascontiguousarray(part), windows.sha256) for part in rows]
    alone = replace(options, is_part=True)
    flights: InFlight[int] = InFlight(
        cluster,
        calibrate_part,
        lambda number: (model.absolute(), pieces[number], folders[number], alone),
    )
    done = 0
    with closing(flights.run(range(len(rows)))) as landing:
        for landed in landing:
            if landed is None:
                continue
            if landed[1]:
                raise CheckpointError(landed[1])
            done += 1
            if progress is not None:
                progress(done, len(rows))
    few: dict[str, int] = {}

    def keep(name: str, merged: LinearStatistics) -> LinearStatistics:
        return enough(merged, few, name)

    about = {"parts": _about(windows, parts, options)}
    return merge_statistics(folders, target, keep, lambda: {**about, "few_tokens": few})


def calibrate_part(model: Path, windows: Windows, folder: Path, options: Options) -> str:
    """On a node: the statistics of a part, in a folder. What stopped it, if that would stop it again."""
    try:
        calibrate(model, windows, folder, options)
    except HalfbyteError as error:
        return f"{error} (on {socket.gethostname()})"
    return ""


def _about(windows: Windows, parts: int, options: Options) -> dict[str, object]:
    return {"count": parts, "text": windows.as_json(), "moments": options.moments}
