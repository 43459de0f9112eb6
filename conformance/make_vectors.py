"""Make a new directory of vectors from the live peers: python -m conformance.make_vectors --out DIR --seed N

They have the form of the golden vectors (conformance/README.md), so `halfbyte conform DIR` runs them. The operands of a
case are a pure function of peer, config and seed. The result of the peer also depends on its version and, near NaN, on
the machine, so both are recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from conformance.cases import Recipe, make_case, shapes
from conformance.inputs import FINITE, NONFINITE
from conformance.peers import LIVE, get_peer
from conformance.peers.spec import Offer, Peer, quiet
from halfbyte.conform import Case

ABOUT = "FP4 vectors produced by each peer's own code on CPU, from halfbyte's generators. Raw bytes are uint8."
FEW = 4
"""The number of cases for an offer that is slow, that is one of many similar ones (4over6), or that takes no floats."""


def recipes(offer: Offer, index: int, seed: int) -> Iterator[Recipe]:
    """The operands for one offer.

    An offer gets every second distribution, so that two neighbouring offers cover the list. Dtypes and shapes rotate.
    """
    names = (*FINITE, *NONFINITE)
    few = offer.slow or offer.operands != "input" or "nvfp4_use_4over6" in offer.config
    chosen = [names[(5 * number + index) % len(FINITE)] for number in range(FEW)] if few else names[index % 2 :: 2]
    sizes = shapes(offer)
    for number, name in enumerate(chosen):
        turn = number + index
        yield Recipe(
            name, sizes[turn % len(sizes)], offer.dtypes[turn % len(offer.dtypes)], 1000 * seed + 50 * index + number
        )


def runtime() -> str:
    """The version of torch and the instruction set of its kernels, on which the peers ran."""
    with quiet():
        import torch

    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def entry(case: Case, peer: Peer, recipe: Recipe, ran_on: str) -> dict[str, Any]:
    """The entry of a case in index.json, without its size. The header of the file has the same, as JSON strings."""
    described = {
        "config": dict(case.config),
        "conventions": dict(case.conventions),
        "format": case.format,
        "input": recipe.as_json(),
        "name": case.name,
        "peer": case.peer,
        "peer_version": peer.version,
        "runtime": ran_on,
        "tensors": {name: [array.dtype.name, list(array.shape)] for name, array in sorted(case.tensors.items())},
    }
    return described | ({"unstable": sorted(case.unstable)} if case.unstable else {})


def encode(case: Case, described: dict[str, Any]) -> bytes:
    """The safetensors file of a case."""
    header = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in described.items()
        if key != "tensors"
    }
    return save({name: np.ascontiguousarray(array) for name, array in case.tensors.items()}, header)


def write(folder: Path, peers: list[str], seed: int) -> dict[str, Any]:
    """Write every case of the given peers to a folder, with an index. Returns the index."""
    cases: list[dict[str, Any]] = []
    for name in peers:
        peer = get_peer(name)
        ran_on = runtime()
        for index, offer in enumerate(peer.offers):
            for recipe in recipes(offer, index, seed):
                case = make_case(peer, offer, recipe)
                described = entry(case, peer, recipe, ran_on)
                raw = encode(case, described)
                path = folder / f"{case.name}.safetensors"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)
                cases.append({"bytes": len(raw)} | described)
        print(f"{name}: {sum(case['peer'] == name for case in cases)} cases", file=sys.stderr)
    cases.sort(key=lambda case: str(case["name"]))
    index_file = {
        "about": ABOUT,
        "bytes": sum(case["bytes"] for case in cases),
        "cases": cases,
        "count": len(cases),
    }
    (folder / "index.json").write_text(json.dumps(index_file, indent=1, sort_keys=True) + "\n")
    return index_file


def zip_folder(folder: Path) -> Path:
    """Write the folder as a zip archive next to it. With fixed dates and order, equal vectors give equal bytes."""
    archive = folder.with_name(f"{folder.name}.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                info = zipfile.ZipInfo(path.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
                file.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.make_vectors", description="Vectors from live peers.")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--seed", type=int, required=True, help="another seed draws other operands")
    parser.add_argument("--peers", default=",".join(LIVE), help="names, comma-separated (default: all)")
    parser.add_argument("--zip", action="store_true", help="also write OUT.zip")
    given = parser.parse_args(arguments)
    peers = given.peers.split(",")
    unknown = [name for name in peers if name not in LIVE]
    if unknown:
        parser.error(f"no driver for {', '.join(unknown)}; live: {', '.join(LIVE)}")
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty: name a new folder")
    given.out.mkdir(parents=True, exist_ok=True)
    index = write(given.out, peers, given.seed)
    print(f"{index['count']} cases, {index['bytes']} bytes in {given.out}")
    if given.zip:
        print(zip_folder(given.out))


if __name__ == "__main__":
    main()
