"""The output of `halfbyte convert`: the plan as a table, a progress bar, or one JSON object per line."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Protocol

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from halfbyte.checkpoint import Event, Outcome, Plan, Resources
from halfbyte.checkpoint.execute.conversion import shared_memory, staged_memory
from halfbyte.checkpoint.execute.destination import Found
from halfbyte.checkpoint.execute.pieces import Sizes
from halfbyte.cli.app import err, out, quoted
from halfbyte.cli.calibrate import few_line
from halfbyte.cli.tables import print_table
from halfbyte.load_check import LoadReport

SHOWN = 12
"""The number of lines of a list that are printed; the rest is left out."""


class Reporter(Protocol):
    """What a conversion reports its progress to."""

    def few(self, few: dict[str, int]) -> None: ...
    def plan(self, plan: Plan, resources: Resources, cut: tuple[Sizes, int]) -> None: ...
    def event(self, event: Event) -> None: ...
    def finish(self, plan: Plan, destination: Path, outcome: Outcome, seconds: float) -> None: ...
    def found(self, destination: Path, found: Found) -> None: ...
    def load(self, report: LoadReport) -> None: ...
    def error(self, message: str) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Quiet:
    """Print only errors."""

    def few(self, few: dict[str, int]) -> None:
        pass

    def plan(self, plan: Plan, resources: Resources, cut: tuple[Sizes, int]) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def finish(self, plan: Plan, destination: Path, outcome: Outcome, seconds: float) -> None:
        pass

    def found(self, destination: Path, found: Found) -> None:
        pass

    def load(self, report: LoadReport) -> None:
        if not report.clean:
            self.error(" ".join(report.sentences()))

    def error(self, message: str) -> None:
        err().print(f"halfbyte convert: {message}", markup=False, soft_wrap=True)

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class JsonLog(Quiet):
    """Print one JSON object per line, and progress once per second."""

    def __init__(self) -> None:
        self._last = 0.0

    def _line(self, **content: object) -> None:
        typer.echo(json.dumps(content))

    def few(self, few: dict[str, int]) -> None:
        self._line(event="few_tokens", modules=few)

    def plan(self, plan: Plan, resources: Resources, cut: tuple[Sizes, int]) -> None:
        sizes, workers = cut
        device = {"device": resources.device, "device_reason": resources.device_reason}
        peak = sizes.arena * workers + staged_memory(resources, workers) + shared_memory(plan, resources)[1]
        self._line(event="plan", workers=workers, peak_memory=peak, **{**plan.as_json(), **device})

    def event(self, event: Event) -> None:
        if event.kind in ("progress", "close"):
            now = time.monotonic()
            if now - self._last < 1:
                return
            self._last = now
        self._line(
            event=event.kind, done=event.done, total=event.total, **({"shard": event.shard} if event.shard else {})
        )

    def finish(self, plan: Plan, destination: Path, outcome: Outcome, seconds: float) -> None:
        self._line(event="finished", destination=str(destination), seconds=round(seconds, 3), **vars(outcome))

    def found(self, destination: Path, found: Found) -> None:
        self._line(
            event="destination",
            destination=str(destination),
            finished=found.finished,
            continued=found.continued,
            shards_found=sorted(found.usable),
        )

    def load(self, report: LoadReport) -> None:
        self._line(event="load", **report.as_json())

    def error(self, message: str) -> None:
        self._line(event="error", message=message)


class Amount(ProgressColumn):
    """How much is done: bytes, or files while these get their names."""

    def render(self, task: Task) -> Text:
        if task.fields.get("files"):
            return Text(f"{task.completed:.0f}/{task.total or 0:.0f} files", style="progress.download")
        return DownloadColumn().render(task)


class Speed(ProgressColumn):
    """Bytes per second; nothing where files are counted."""

    def render(self, task: Task) -> Text:
        return Text("") if task.fields.get("files") else TransferSpeedColumn().render(task)


class Screen(Quiet):
    """Print tables and a progress bar."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), Amount(), Speed())
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=err(), transient=True, disable=not sys.stderr.isatty()
        )
        self._bar: TaskID | None = None
        self._closing: TaskID | None = None

    def few(self, few: dict[str, int]) -> None:
        out().print(few_line(few, "and are rounded without feedback"), markup=False, soft_wrap=True)

    def plan(self, plan: Plan, resources: Resources, cut: tuple[Sizes, int]) -> None:
        print_plan(plan, resources, cut)

    def event(self, event: Event) -> None:
        if event.kind == "close":
            if self._closing is None:
                self._closing = self._progress.add_task("close", total=event.total, files=True)
            self._progress.update(self._closing, completed=event.done)
            return
        if self._bar is None:
            self._bar = self._progress.add_task("convert", total=event.total, completed=event.done)
        self._progress.update(self._bar, completed=event.done, total=event.total)
        if event.kind == "shard":
            self._progress.update(self._bar, description=event.shard)

    def finish(self, plan: Plan, destination: Path, outcome: Outcome, seconds: float) -> None:
        if outcome.finished_before:
            out().print(f"{destination} is whole already: nothing to do", markup=False, soft_wrap=True)
            return
        shards = "1 shard" if outcome.shards_written == 1 else f"{outcome.shards_written} shards"
        if not outcome.complete:
            others = (
                f"{outcome.shards_missing} of other ranks are missing" if outcome.shards_missing else "all are there"
            )
            out().print(
                f"{destination}: this rank has written {shards}, {outcome.shards_found} were there, and {others}. The "
                f"last rank that ends closes; if none did: halfbyte finish {quoted(destination)}",
                markup=False,
                soft_wrap=True,
            )
            return
        found = f", {outcome.shards_found} found there" if outcome.shards_found else ""
        speed = plan.source_bytes / seconds / 1e9
        out().print(
            f"{destination}: {shards} written{found}, {size(plan.output_bytes)} from "
            f"{size(plan.source_bytes)} in {seconds:.1f} s ({speed:.2f} GB/s). Next: halfbyte verify "
            f"{quoted(destination)}",
            markup=False,
            soft_wrap=True,
        )
        if outcome.pieces_on_cpu:
            out().print(
                f"note: {outcome.pieces_on_cpu} pieces were computed on the CPU, because no GPU had memory "
                "left for them",
                markup=False,
                soft_wrap=True,
            )

    def found(self, destination: Path, found: Found) -> None:
        if found.finished:
            text = "is whole already: there is nothing to do"
        elif found.continued:
            text = f"holds this conversion unfinished: {len(found.usable)} shards are there and will be used"
        else:
            text = "will be written anew"
        out().print(f"{destination} {text}", markup=False, soft_wrap=True)

    def load(self, report: LoadReport) -> None:
        for sentence in report.sentences():
            out().print(sentence, markup=False, soft_wrap=True)

    def __enter__(self) -> object:
        return self._progress.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)


def size(count: float) -> str:
    """A number of bytes as text for people.

    >>> size(2_500_000_000), size(900)
    ('2.5 GB', '900 B')
    """
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= power:
            return f"{count / power:.4g} {unit}"
    return f"{count:.0f} B"


def print_plan(plan: Plan, resources: Resources, cut: tuple[Sizes, int]) -> None:
    """Print the plan as tables: what happens to the tensors, what is kept and why, what is shared, memory and bytes."""
    console = out(markup=False)
    sizes, workers = cut
    choices = plan.choices
    how = f", contract {choices['contract']}, method {choices['method'] or 'of the contract'}" if plan.format else ""
    console.print(f"{plan.source} → {choices['to']}, layout {choices['layout']}{how}", markup=False, soft_wrap=True)
    if plan.activations:
        console.print(f"activations: {plan.activations}", markup=False, soft_wrap=True)
    table = Table()
    table.add_column("tensors", overflow="fold")
    for heading in ("count", "source", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: dict[str, list[int]] = {}
    for shard in plan.shards:
        for copy in shard.copies:
            row = rows.setdefault("copied as they are", [0, 0, 0])
            row[0] += 1
            row[1] += copy.output.bytes
            row[2] += copy.output.bytes
        for unit in shard.units:
            row = rows.setdefault(
                f"{unit.action}: {unit.sources[0].kind} → {choices['to'] if unit.action != 'decode' else 'bf16'}",
                [0, 0, 0],
            )
            row[0] += 1
            row[1] += unit.source_bytes
            row[2] += sum(output.bytes for output in unit.outputs)
    for name, (count, before, after) in rows.items():
        table.add_row(name, str(count), size(before), size(after))
    table.add_row("all files", str(len(plan.shards)), size(plan.source_bytes), size(plan.output_bytes))
    print_table(table, markup=False)
    _print_kept(plan)
    if plan.shared:
        groups = "1 group shares" if len(plan.shared) == 1 else f"{len(plan.shared)} groups share"
        console.print(f"{groups} a tensor scale, such as {', '.join(plan.shared[0])}", soft_wrap=True)
    _print_list("dropped", plan.dropped)
    weights = [name for name in plan.side_files if name.endswith(".safetensors")]
    _print_list("copied", dict.fromkeys(weights, "weights in a folder of their own"))
    _print_list("not copied", plan.left_out)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    reason = f" ({resources.device_reason})" if resources.device_reason else ""
    factors = shared_memory(plan, resources)[1]
    beside = f" and {size(factors)} for factors of the statistics" if factors else ""
    buffers = sizes.arena * workers + staged_memory(resources, workers)
    console.print(
        f"memory: at most {size(buffers)} for buffers{beside}, {workers} workers on "
        f"{resources.device}{reason}; {size(plan.output_bytes)} will be written",
        markup=False,
        soft_wrap=True,
    )


def _print_kept(plan: Plan) -> None:
    if not plan.kept:
        return
    table = Table()
    table.add_column("kept", overflow="fold")
    table.add_column("modules", justify="right", no_wrap=True)
    table.add_column("such as", overflow="fold")
    counts = Counter(plan.kept.values())
    first = {reason: module for module, reason in reversed(list(plan.kept.items()))}
    for reason, count in counts.most_common():
        table.add_row(reason, str(count), first[reason])
    print_table(table, markup=False)
    _print_list("does not divide", {module: why for module, why in plan.kept.items() if why.startswith("width")})


def _print_list(title: str, items: object) -> None:
    if not isinstance(items, dict) or not items:
        return
    for name, reason in list(items.items())[:SHOWN]:
        out().print(f"{title}: {name} ({reason})", markup=False, soft_wrap=True)
    if len(items) > SHOWN:
        out().print(f"{title}: … and {len(items) - SHOWN} more")
