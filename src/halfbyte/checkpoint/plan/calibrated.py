"""Which statistics, or which solved codes, each quantized module of a plan takes.

Only names and headers are read, and a few values of the source that tell whether the statistics are its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from halfbyte.checkpoint.io.likeness import fingerprint_of
from halfbyte.checkpoint.io.solved import SolvedFolder
from halfbyte.checkpoint.plan.draft import Draft, action_of
from halfbyte.checkpoint.plan.source_weights import SourceWeight
from halfbyte.checkpoint.plan.target import by_statistics
from halfbyte.checkpoint.plan.types import Calibrated, Options, Solved
from halfbyte.errors import CheckpointError, HalfbyteError, InputError
from halfbyte.methods import Gptq, parse_method
from halfbyte.models.experts import expert_module
from halfbyte.statistics import Statistics, open_statistics

LISTED = 8


@dataclass(frozen=True)
class Planned:
    """What planning found, and what the user should know of it."""

    calibrated: Calibrated | None
    solved: Solved | None
    notes: tuple[str, ...] = ()


def plan_calibrated(draft: Draft, options: Options, names: Mapping[str, Iterable[str]]) -> Planned:
    """Statistics or solved codes for the modules of a draft, if the options name a folder of either.

    names: what a statistic may be called → the modules on disk that are meant by it.
    """
    fresh = [weight for weight in draft.converted if action_of(weight, draft.target) == "quantize"]
    if options.solved is not None:
        return Planned(None, _solved(draft, Path(options.solved), fresh))
    if options.statistics is None or not by_statistics(options):
        return Planned(None, None)
    return _calibrated(draft, options, Path(options.statistics), fresh, names)


def _calibrated(
    draft: Draft, options: Options, path: Path, fresh: list[SourceWeight], names: Mapping[str, Iterable[str]]
) -> Planned:
    statistics, called = open_named(path, names)
    kind = options.served or "gptq"
    method = options.method if isinstance(options.method, Gptq) else Gptq()
    codes: Literal["nearest", "descent"] = "nearest"
    if kind == "hessian" and isinstance(options.method, str):
        codes = parse_method(options.method)[1].get("codes", codes)
    chosen: dict[str, tuple[str | None, ...]] = {}
    fallback: dict[str, str] = {}
    for weight in fresh:
        found = []
        for number in range(len(weight.sources)):
            own = statistics_name(draft, weight, number, called)
            reason = _why_not(statistics, own, kind)
            if reason is not None:
                fallback[weight.module] = reason
            found.append(None if reason is not None else own)
        chosen[weight.module] = tuple(found)
    if fresh and len(fallback) == len(fresh) and not any(any(found) for found in chosen.values()):
        first = next(iter(fallback.items()))
        raise CheckpointError(f"--stats {path} serves none of the {len(fresh)} modules; {first[0]}: {first[1]}")
    if fallback and options.strict_statistics:
        raise CheckpointError(f"--strict-stats: {_listed(fallback)}")
    taken = [name for found in chosen.values() for name in found if name is not None]
    crossed = kind == "gptq" and method.asymmetry != 0 and any("cross_moment" in statistics.holds(one) for one in taken)
    calibrated = Calibrated(path, kind, method, *_digest(statistics, path), chosen, fallback, crossed, codes)
    if kind == "hessian":
        calibrated = replace(calibrated, headroom=options.headroom)
    notes = [f"{_listed(fallback)}; they get optimal scales without statistics"] if fallback else []
    if statistics.header.get("complete") is False:
        notes.append(f"{path}: its calibration was stopped; the same `halfbyte calibrate` continues it")
    known = str(statistics.header.get("model", {}).get("fingerprint", ""))
    if known and known != fingerprint_of(draft.checkpoint):
        notes.append(
            f"{path} is not of these files: of another training or of the same model in another dtype, as its names "
            "and widths fit. If it is of another training, calibrate this one"
        )
    others = len(draft.converted) - len(fresh)
    if others:
        notes.append(f"{others} weights are FP4 in the source: their codes are cast or kept, without statistics")
    return Planned(calibrated, None, tuple(notes))


def open_named(path: Path, names: Mapping[str, Iterable[str]]) -> tuple[Statistics, dict[str, str]]:
    """The statistics of a folder, and module on disk → what it is called there."""
    try:
        statistics = open_statistics(path)
    except HalfbyteError as error:
        raise CheckpointError(f"--stats: {error}") from error
    called: dict[str, str] = {}
    for name in statistics.names:
        for module in names.get(name, (name,)):
            called.setdefault(module, name)
    return statistics, called


def statistics_name(draft: Draft, weight: SourceWeight, number: int, called: Mapping[str, str]) -> str | None:
    """The statistics of one source of a weight: its own, or for an expert of a stack those of any projection."""
    candidates = [weight.module]
    if weight.stacked and draft.model.stacking is not None:
        rows = weight.sources[number].rows
        projections = draft.model.projections(weight.module, rows)
        experts = [expert_module(weight.module, number, projection) for projection in projections]
        candidates = [*experts, weight.module]
    return next((called[name] for name in candidates if name in called), None)


def _why_not(statistics: Statistics, name: str | None, kind: str) -> str | None:
    """Why a module cannot take the statistics of that name; None if it can."""
    if name is None:
        return "it has no statistics"
    held = statistics.holds(name)
    if kind == "gptq" and "second_moment" not in held:
        return "its statistics have no full second moments, which gptq needs (--moments full)"
    if not held & {"second_moment", "blocks", "diagonal"}:
        return "no token reached it"
    return None


def _solved(draft: Draft, path: Path, fresh: list[SourceWeight]) -> Solved:
    folder = SolvedFolder(path)
    format, contract = draft.target.format, draft.target.contract
    if format is None or contract is None:
        raise InputError("solved weights are FP4; this conversion decodes")
    folder.check(format, contract)
    names: dict[str, tuple[str, ...]] = {}
    for weight in fresh:
        found = []
        for number in range(len(weight.sources)):
            name = f"{weight.module}.{number}" if weight.stacked else f"{weight.module}.weight"
            if name not in folder:
                raise CheckpointError(f"{path} has no codes of {name}, which is quantized; --keep it, or solve it")
            rows, columns = weight.sources[number].rows, weight.sources[number].columns
            folder.rows(name, (rows, columns), 0, 0, format)
            found.append(name)
        names[weight.module] = tuple(found)
    return Solved(path, folder.said["method"], folder.digest, names, folder.device)


def _digest(statistics: Statistics, path: Path) -> tuple[str, int]:
    """What identifies the statistics: names, sizes and headers of the files; and when they were last changed."""
    digest, modified = hashlib.sha256(), 0
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length if file.suffix == ".safetensors" else 1 << 20)
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} ".encode() + header)
        modified = max(modified, stat.st_mtime_ns)
    digest.update("\n".join(statistics.names).encode())
    return digest.hexdigest(), modified


def _listed(fallback: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for module, reason in fallback.items():
        reasons.setdefault(reason, []).append(module)
    parts = []
    for reason, modules in reasons.items():
        shown = ", ".join(modules[:LISTED]) + (f" and {len(modules) - LISTED} more" if len(modules) > LISTED else "")
        parts.append(f"{len(modules)} modules without usable statistics ({reason}): {shown}")
    return "; ".join(parts)
