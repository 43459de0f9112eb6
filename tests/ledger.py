"""Hashes of the output of halfbyte: every case of the bit-identity tests, and small checkpoints of every kind.

Golden vectors hold the bytes of the peers. This ledger holds the hashes of ours, including the exact searches and whole
checkpoints, so that every changed byte is noticed. If a change is intended, rewrite the ledger and describe the change
under "Bits" in the changelog:

    python -m tests.ledger
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.index import MANIFEST
from tests import tiny_models as models
from tests.backends.cases import DTYPES, EXACT, Case, every_case, fits, make_input, peer_cases
from tests.checkpoint import toy
from tests.checkpoint.test_packed_sources import write_int4, write_quark

LEDGER = Path(__file__).with_suffix(".json")
INPUTS = ("gauss", "block scales", "zero blocks", "ties", "bits in range", "nonfinite", "wide", "odd")
SEARCHED = ("block scales", "zero blocks", "ties", "odd")
"""Inputs for the exact searches: those that the kernels serve."""
DIGITS = 16

CONVERSIONS = {
    "modelopt": Options(),
    "modelopt amax": Options(method="amax"),
    "modelopt unit": Options(activations="unit"),
    "ct nvfp4": Options(layout="compressed-tensors"),
    "ct mxfp4": Options(to="mxfp4", layout="compressed-tensors"),
    "gpt-oss mxfp4": Options(to="mxfp4", layout="gpt-oss"),
    "miles four_six": Options(contract="miles", method=hb.FourSix("mse", 256)),
    "bf16": Options(to="bf16"),
}


def digest(parts: Iterable[bytes]) -> str:
    """One hash of several parts, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:DIGITS]


def outputs(case: Case) -> Iterator[bytes]:
    """Every array that a case gives for every dtype and input, and the decoded values."""
    for dtype in DTYPES:
        for name in SEARCHED if case.method in EXACT else INPUTS:
            x = make_input(name, dtype)
            if not fits(case, x):
                continue
            q = case.quantize(x, "auto")
            for part in (q.codes, q.scales, q.stored_scale, q.global_scale):
                yield b"" if part is None else to_numpy(part).tobytes()
            values = to_numpy(hb.dequantize(q))
            yield np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).tobytes()


def tensor_entries() -> Iterator[tuple[str, str]]:
    for case in every_case() + peer_cases():
        yield str(case), digest(outputs(case))


def sources(folder: Path) -> dict[str, Path]:
    """A small checkpoint of every family and source format. `convert` itself writes those in NVFP4 and MXFP4."""
    found = {name: models.make(name, folder / name) for name in models.MODELS}
    for label, dtype in (("fp16", np.float16), ("fp32", np.float32)):
        found[label] = toy.write_checkpoint(folder / label, toy.llama(dtype=dtype), shards=3)
    found["int4"] = write_int4(folder / "int4")[0]
    found["quark"] = write_quark(folder / "quark")[0]
    for label in ("modelopt", "ct nvfp4", "ct mxfp4"):
        found[f"llama as {label}"] = converted(found["llama"], CONVERSIONS[label], folder / f"llama as {label}")
    return found


def converted(source: Path, options: Options, folder: Path) -> Path:
    run(make_plan(source, options), folder, Resources(workers=2, max_memory=1 << 28, sync=False, chunk=5000))
    return folder


def checkpoint_entries() -> Iterator[tuple[str, str]]:
    """The files of every possible conversion, or its error. The manifest is left out: it only tells of the others."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, source in sources(folder).items():
            for label, options in CONVERSIONS.items():
                made = folder / "out" / f"{name} {label}"
                try:
                    converted(source, options, made)
                except hb.HalfbyteError as error:
                    yield f"{name} to {label}", f"{type(error).__name__}"
                    continue
                files = toy.all_bytes(made)
                kept = {path: data for path, data in files.items() if path != MANIFEST}
                yield f"{name} to {label}", digest(part for path in kept for part in (path.encode(), kept[path]))


def main() -> None:
    written = {"tensors": dict(tensor_entries()), "checkpoints": dict(checkpoint_entries())}
    LEDGER.write_text(json.dumps(written, indent=0) + "\n")
    print(f"{LEDGER.name}: {', '.join(f'{len(entries)} {kind}' for kind, entries in written.items())}")


if __name__ == "__main__":
    main()
