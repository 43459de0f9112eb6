"""verify(): all checks in order, the cheapest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.layouts.storage import read_config
from halfbyte.models import model_of
from halfbyte.verify.against.compare import Progress, compare
from halfbyte.verify.block_scales import block_problems
from halfbyte.verify.parallel import InOrder, in_order
from halfbyte.verify.problems import Report
from halfbyte.verify.recorded import recorded_problems
from halfbyte.verify.rules.algorithms import algorithm_problems
from halfbyte.verify.rules.cache import cache_problems
from halfbyte.verify.rules.claim import claim_problems
from halfbyte.verify.rules.config_source import config_problems
from halfbyte.verify.rules.excluded import exclude_problems, unquantized_modules
from halfbyte.verify.rules.schemes import scheme_problems
from halfbyte.verify.rules.sharing import scalar_problems, sharing_problems
from halfbyte.verify.rules.structure import structure_problems
from halfbyte.verify.stored import read_contents

LIMIT = 0.25
"""Relative error from which a quantized weight counts as wrong. 4-bit floats of real weights err by 0.08 to 0.15."""


def verify(
    path: Path,
    against: Path | None = None,
    *,
    limit: float = LIMIT,
    headers_only: bool = False,
    progress: Callable[[Progress], None] = lambda progress: None,
    each: InOrder = in_order,
) -> Report:
    """Check a quantized checkpoint, alone or against its source. Raises CheckpointError if one cannot be read.

    Alone: names, dtypes, shapes, config files, exclude lists as the readers match them, scales that fused layers share,
    every block scale, and the hashes of a manifest if there is one. Against a source: the same settings, every tensor
    accounted for, kept tensors equal to the byte, quantized ones decoded a few rows at a time and their error measured.

    limit: relative error from which a weight counts as wrong.
    headers_only: look at no data but the scalars.
    each: who checks tensors; by default the threads of this process.
    """
    checkpoint = open_checkpoint(path)
    source = None if against is None else open_checkpoint(against)
    contents = read_contents(checkpoint)
    report = Report(
        path=str(path),
        against=None if against is None else str(against),
        tensors=len(checkpoint.tensors),
        bytes=sum(tensor.info.bytes for tensor in checkpoint.tensors.values()),
        kinds=dict(Counter(weight.storage.name for weight in contents.quantized.values())),
    )
    claim = read_config(checkpoint.quantization)
    report.extend(structure_problems(contents))
    broken = {problem.name for problem in report.problems if problem.level == "error"}
    sound = contents.without(broken)  # the rest can be read
    model = model_of(checkpoint.config)
    report.extend(claim_problems(checkpoint, contents, claim))
    report.extend(algorithm_problems(checkpoint, contents))
    if claim.layout == "compressed-tensors":
        report.extend(scheme_problems(checkpoint.quantization, contents, unquantized_modules(contents, model)))
    report.extend(cache_problems(checkpoint.quantization, contents, claim))
    report.extend(exclude_problems(checkpoint, contents, claim, model))
    report.extend(scalar_problems(checkpoint.path, sound))
    report.extend(sharing_problems(checkpoint.path, sound, model.fused))
    report.extend(recorded_problems(checkpoint, headers_only, each))
    if not headers_only:
        report.extend(block_problems(checkpoint.path, sound, each))
    if source is not None:
        report.extend(config_problems(checkpoint, source))
        compare(checkpoint, sound, source, limit, report, progress, each)
    return report
