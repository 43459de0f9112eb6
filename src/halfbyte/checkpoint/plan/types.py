"""The Plan of a conversion and its parts.

A plan is frozen and holds names and numbers only: which bytes of which source file become which tensor at which offset
of which output file, and by which act. `run` executes it; memory, workers and devices are not its business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from halfbyte.checkpoint.io.header import encode_header, tensor_bytes
from halfbyte.checkpoint.io.views import SourceMatrix
from halfbyte.checkpoint.plan.select import Rules, check_names
from halfbyte.contracts import Contract
from halfbyte.errors import InputError
from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Part
from halfbyte.methods import Gptq, Hessian, Method, parse_method
from halfbyte.methods.optimal import checked_headroom
from halfbyte.smoothing import Smoothing

Action = Literal["quantize", "cast", "relayout", "decode", "gather", "rescale"]
"""quantize: from values. cast: MXFP4 blocks to NVFP4 blocks. relayout: same codes and scales under other names.
decode: to BF16. gather: single values from scattered places, unchanged. rescale: a vector divided by powers of two."""

VERSION = 1
"""Version of plans, journals and manifests. After a change, unfinished conversions start again."""


@dataclass(frozen=True)
class Options:
    """What decides the output's bytes."""

    to: str = "nvfp4"
    layout: str = "modelopt"
    method: str | Method | None = None
    """None: optimal for NVFP4 under the default contract, otherwise the contract's own. gptq and hessian need
    statistics; options of gptq in a text, such as gptq:damping=0.01, become a Gptq."""
    contract: str | Contract | None = None
    """None: Model-Optimizer's rules for NVFP4, OCP's for MXFP4."""
    activations: str | None = None
    """none, unit, stats (by the statistics), or a JSON file of calibrated amaxes; None: what the contract writes, or
    what the source has."""
    rules: Rules = Rules()
    ignore: tuple[str, ...] = ()
    """Names for the exclude list, written as they are."""
    modules_from_model: bool = False
    """Whether transformers is asked what the modules are, instead of the table."""
    trust_remote_code: bool = False
    """Whether it may run the code that comes with the checkpoint."""
    statistics: Path | None = None
    """A folder of statistics, for the methods gptq and hessian and for the activations stats."""
    strict_statistics: bool = False
    """Whether a module without usable statistics is an error."""
    solved: Path | None = None
    """A folder of weights whose codes are decided already."""
    smoothing: Path | Smoothing | None = None
    """Factors to fold into the model before it is quantized, or a file of them."""

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method.startswith(f"{Gptq.name}:"):
            kind, given = parse_method(self.method)
            object.__setattr__(self, "method", kind(**given))
        check_names("ignore", self.ignore)
        if not isinstance(self.rules, Rules):
            raise InputError(f"rules of Options are Rules(…), not {self.rules!r}")
        if not all(self.ignore):
            raise InputError("--ignore needs a name; an empty one would exclude every module in some readers")

    @property
    def served(self) -> Literal["gptq", "hessian"] | None:
        """The method that statistics serve, if it is one of these."""
        if isinstance(self.method, Gptq) or self.method == Gptq.name:
            return "gptq"
        spelled = isinstance(self.method, str) and self.method.split(":")[0] == Hessian.name
        return "hessian" if spelled else None

    @property
    def headroom(self) -> tuple[float, ...] | None:
        """The headroom that a method which statistics serve was given."""
        if isinstance(self.method, Gptq):
            return checked_headroom(self.method.headroom)
        given = parse_method(self.method)[1] if isinstance(self.method, str) and self.served == "hessian" else {}
        return checked_headroom(given.get("headroom"), "Hessian")


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an output file, at its place."""

    part: Part
    start: int
    """First byte in the file; `stop` is the byte after its last."""
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor whose bytes are kept."""

    file: str
    offset: int
    output: Output


@dataclass(frozen=True, slots=True)
class Factors:
    """Powers of two that are folded into the values of a unit, as exponents in signed bytes."""

    columns: bytes = b""
    """Columns are multiplied by these; empty: they stay."""
    rows: bytes = b""
    """Rows are divided by these."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose weight is computed anew."""

    module: str
    action: Action
    sources: tuple[SourceMatrix, ...]
    outputs: tuple[Output, ...]
    group: int
    """Index into the plan's groups: who shares its tensor scale."""
    input_scale: float | None = None
    """Multiplier of the activations; None where none is written, or where the source has one."""
    factors: Factors | None = None
    """What smoothing does to its values."""

    @property
    def source_bytes(self) -> int:
        return sum(source.weight.bytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file."""

    name: str
    header: bytes = field(repr=False)
    size: int
    copies: tuple[Copy, ...]
    units: tuple[Unit, ...]

    @property
    def outputs(self) -> list[Output]:
        placed = [copy.output for copy in self.copies] + [output for unit in self.units for output in unit.outputs]
        return sorted(placed, key=lambda output: (output.start, output.stop, output.part.name))


@dataclass(frozen=True)
class Calibrated:
    """Modules that are quantized by the statistics of their inputs."""

    path: Path
    kind: Literal["gptq", "hessian"]
    method: Gptq
    """The options of gptq."""
    digest: str
    modified: int
    names: Mapping[str, tuple[str | None, ...]]
    """Module → the statistics of each of its sources; None: optimal scales without statistics."""
    fallback: Mapping[str, str]
    """Module → why some of it is quantized without statistics."""
    crossed: bool = False
    """Whether gptq finds cross moments."""
    codes: Literal["nearest", "descent"] = "nearest"
    """How hessian chooses codes."""
    headroom: tuple[float, ...] | None = None
    """That of hessian, if it was given."""
    device: str = ""
    """What makes the factors of gptq, once that is known: their last bits depend on it."""

    def __str__(self) -> str:
        if self.kind == "gptq":
            return str(self.method)
        options = {"codes": None if self.codes == "nearest" else self.codes, "headroom": self.headroom}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"Hessian({given})" if given else "Hessian"


@dataclass(frozen=True)
class Solved:
    """Modules whose codes are read from a folder."""

    path: Path
    method: str
    digest: str
    names: Mapping[str, tuple[str, ...]]
    """Module → the name of each of its sources in the folder."""
    device: str = ""
    """What solved them, if the folder says so."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What identifies a source file, so that a change is noticed."""

    name: str
    size: int
    modified: int
    header: str
    """SHA-256 of the header."""


@dataclass(frozen=True)
class Plan:
    """A whole conversion."""

    source: Path
    files: tuple[SourceFile, ...]
    side_files: tuple[str, ...]
    format: BlockFormat | None
    """None: values, BF16."""
    contract: Contract | None
    method: str | Method | None
    repairs: bool
    """Whether tensors without a usable scale (all zero, or tiny) get one that every reader can use."""
    layout: str
    activations: str
    """In words: what a server does with activations."""
    shards: tuple[Shard, ...]
    groups: tuple[tuple[str, ...], ...]
    """Modules that share one tensor scale, single ones included."""
    kept: Mapping[str, str]
    """Module → why its weight is not FP4."""
    dropped: Mapping[str, str]
    """Source tensor → why nothing of it is written."""
    left_out: Mapping[str, str]
    """Source file → why it is not copied."""
    notes: tuple[str, ...]
    """What the user should know before running this."""
    json_files: Mapping[str, Mapping[str, Any]]
    """config.json, the index and what else the layout wants, as they will be written."""
    calibrated: Calibrated | None = None
    solved: Solved | None = None
    smoothing: Smoothing | None = None

    @property
    def units(self) -> list[Unit]:
        return [unit for shard in self.shards for unit in shard.units]

    @property
    def shared(self) -> list[tuple[str, ...]]:
        return [group for group in self.groups if len(group) > 1]

    @property
    def source_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def output_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for plans that write the same bytes from files with the same headers."""
        digest = hashlib.sha256()
        described = {
            "version": VERSION,
            "files": [(file.name, file.size, file.header) for file in self.files],
            "choices": self.choices,
            "json": self.json_files,
            "side": self.side_files,
        }
        digest.update(json.dumps(described, sort_keys=True).encode())
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header)
            digest.update(json.dumps([unit.input_scale for unit in shard.units]).encode())
        return digest.hexdigest()

    def shard_fingerprint(self, shard: Shard) -> str:
        """Equal for shards with the same bytes, made from files that did not change, in whatever plan they stand.

        What a unit's tensor scale depends on lies partly in other shards: the units that share it count too.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps([VERSION, self.choices, self.repairs], sort_keys=True).encode())
        if self.calibrated is not None:
            digest.update(str(self.calibrated.modified).encode())
        digest.update(shard.name.encode() + shard.header)
        files = {copy.file for copy in shard.copies}
        for copy in shard.copies:
            digest.update(repr((copy.file, copy.offset, copy.output)).encode())
        for unit in shard.units:
            sharing = self._sharing.get(unit.group, [unit])
            digest.update(repr((unit.module, unit.action, unit.outputs, unit.input_scale)).encode())
            digest.update(repr([(other.module, other.action, other.sources) for other in sharing]).encode())
            files |= {file for other in sharing for source in other.sources for file in source.files}
        digest.update(repr([file for file in self.files if file.name in files]).encode())
        return digest.hexdigest()

    @cached_property
    def _sharing(self) -> dict[int, list[Unit]]:
        """The units of each group, by its number."""
        found: dict[int, list[Unit]] = {}
        for unit in self.units:
            if unit.group >= 0:
                found.setdefault(unit.group, []).append(unit)
        return found

    @property
    def choices(self) -> dict[str, str]:
        """The options that decide bytes, as words."""
        choices = {
            "to": self.format.name if self.format else "bf16",
            "layout": self.layout,
            "contract": repr(self.contract) if self.contract else "",
            "method": str(self.method or ""),
            "activations": self.activations,
        }
        if self.calibrated is not None:
            choices |= {"method": str(self.calibrated), "statistics": self.calibrated.digest}
            choices |= {"device": self.calibrated.device} if self.calibrated.device else {}
        if self.solved is not None:
            choices |= {"method": self.solved.method, "solved": self.solved.digest}
            choices |= {"device": self.solved.device} if self.solved.device else {}
        if self.smoothing is not None:
            choices["smoothing"] = self.smoothing.digest
        return choices

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines: each output tensor with dtype, shape and offsets, and what it is made from."""
        return {
            "version": VERSION,
            "source": str(self.source),
            "files": [asdict(file) for file in self.files],
            "side_files": list(self.side_files),
            **self.choices,
            "fingerprint": self.fingerprint,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "shards": [_shard_json(shard) for shard in self.shards],
            "shared_scales": [list(group) for group in self.shared],
            "kept": dict(self.kept),
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
            **({} if self.calibrated is None else {"without_statistics": dict(self.calibrated.fallback)}),
        }


def _shard_json(shard: Shard) -> dict[str, Any]:
    made_from = {copy.output.part.name: "copy" for copy in shard.copies}
    made_from |= {output.part.name: unit.action for unit in shard.units for output in unit.outputs}
    return {
        "name": shard.name,
        "bytes": shard.size,
        "tensors": [
            {
                "name": output.part.name,
                "dtype": output.part.dtype,
                "shape": list(output.part.shape),
                "offsets": [output.start, output.stop],
                "act": made_from[output.part.name],
            }
            for output in shard.outputs
        ],
    }


def place(parts: Sequence[Part], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Output], int]:
    """Header, places and file size for the tensors of one file.

    Wide elements come first, so that every tensor starts at a multiple of its element's size, as loaders that map files
    need it.
    """
    widths = {
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "C64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "F16": 2,
        "BF16": 2,
        "I16": 2,
        "U16": 2,
    }
    ordered = sorted(parts, key=lambda part: -widths.get(part.dtype, 1))
    header = encode_header(((part.name, part.dtype, part.shape) for part in ordered), metadata)
    placed: dict[str, Output] = {}
    at = len(header)
    for part in ordered:
        stop = at + tensor_bytes(part.dtype, part.shape)
        placed[part.name] = Output(part, at, stop)
        at = stop
    return header, placed, at
