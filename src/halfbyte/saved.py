"""save() and load(): one quantized tensor as a safetensors file."""

from __future__ import annotations

import json
from dataclasses import fields
from os import PathLike, fspath
from os.path import isdir
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.arrays import is_torch, to_numpy
from halfbyte.contracts import CONTRACTS, Contract
from halfbyte.errors import HalfbyteError, InputError, UnsupportedError, unknown_name
from halfbyte.formats import FORMATS, get_format
from halfbyte.methods import Method, parse_method
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

VERSION = "1"
PREFIX = "method."


def save(q: QuantizedTensor, path: str | PathLike[str]) -> None:
    """Write a tensor with its format, contract and method; `load` has the keys. An existing file is replaced.

    A format or contract that was made by hand has no name to find it by, so it cannot be saved.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = _path(path)
    named = FORMATS.get(q.format.name)
    if named is None or get_format(named, q.format.block) != q.format:
        raise UnsupportedError(f"format {q.format.name} with blocks of {q.format.block} is not halfbyte's own")
    options = {key: value.item() if isinstance(value, np.generic) else value for key, value in q.contract.options}
    if _contract(q.contract.name, json.loads(_json(options, q.contract))) != q.contract:
        raise UnsupportedError(f"contract {q.contract} was made by hand: a file can name only those of hb.contracts")
    parts: dict[str, Any] = {"codes": q.codes, "scales": q.scales}
    if q.stored_scale is not None:
        parts["stored_scale"] = q.stored_scale
    for option in fields(q.method):
        if option.type == "object" and getattr(q.method, option.name) is not None:
            parts[PREFIX + option.name] = getattr(q.method, option.name)
    arrays = {name: np.asarray(to_numpy(part) if is_torch(part) else part) for name, part in parts.items()}
    metadata = {
        "halfbyte": VERSION,
        "format": q.format.name,
        "block": str(q.format.block),
        "shape": json.dumps(q.shape),
        "contract": q.contract.name,
        "contract_options": json.dumps(options),
        "method": q.method.spelling,
        "arrays": "torch" if is_torch(q.codes) else "numpy",
    }
    try:
        save_file({name: _plain(array) for name, array in arrays.items()}, path, metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} cannot be written: {error}; give the path of a file in a folder that exists"
        ) from error


def load(path: str | PathLike[str], device: torch.device | str | None = None) -> QuantizedTensor:
    """Read a tensor that `QuantizedTensor.save` wrote: it is equal to that one, with its contract and method.

    path: a safetensors file with the tensors `codes` and `scales` (uint8), `stored_scale` (float32, if the contract
        stores one) and the arrays of the method (`method.weights`, `method.h`). Its metadata are texts: `halfbyte`
        (the version of these keys, "1"), `format`, `block`, `shape` and `contract_options` (both JSON), `contract`,
        `method` (its spelling) and `arrays` ("torch" or "numpy").
    device: a torch device for torch tensors, "numpy" for numpy arrays; None: the kind that was saved, on the CPU.

    >>> import tempfile, torch, halfbyte as hb
    >>> q = hb.quantize(torch.randn(4, 64), "nvfp4", "modelopt", "four_six:mse:256")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     q.save(f"{folder}/q.safetensors")
    ...     again = load(f"{folder}/q.safetensors")
    >>> again == q, again
    (True, QuantizedTensor(nvfp4, shape=(4, 64), contract=modelopt(), method=four_six:mse:256, torch on cpu, 148 bytes))
    """
    from safetensors import SafetensorError, safe_open

    path = _path(path)
    if isdir(path):
        raise InputError(
            f"{path} is a folder; load reads one file that QuantizedTensor.save wrote; for checkpoints there are "
            "`halfbyte inspect` and halfbyte.layouts"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
    if metadata.get("halfbyte") != VERSION:
        raise InputError(
            f"{path}: not a file of QuantizedTensor.save, version {VERSION}; for checkpoints there are "
            "`halfbyte inspect` and halfbyte.layouts"
        )
    try:
        if metadata["contract"] not in CONTRACTS:
            raise unknown_name("contract", metadata["contract"], CONTRACTS)
        q = QuantizedTensor(
            get_format(metadata["format"], int(metadata["block"])),
            tuple(json.loads(metadata["shape"])),
            arrays["codes"],
            arrays["scales"],
            None,
            arrays.get("stored_scale"),
            _contract(metadata["contract"], json.loads(metadata["contract_options"])),
            _method(metadata["method"], arrays),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, HalfbyteError):
            raise type(error)(f"{path}: {error}") from error
        raise InputError(f"{path}: its metadata or tensors are damaged: {error!r}") from error
    wanted = device if device is not None else {"torch": "cpu"}.get(metadata.get("arrays", ""), "numpy")
    return q if wanted == "numpy" else q.to(wanted)


def _path(path: object) -> str:
    if not isinstance(path, str | PathLike) or isinstance(fspath(path), bytes):
        raise InputError(f"a path is a text or a pathlib.Path, not {path!r}")
    return fspath(path)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Contiguous, because the writer takes an array's memory for its order."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def _json(options: dict[str, Any], contract: Contract) -> str:
    try:
        return json.dumps(options)
    except TypeError as error:
        raise UnsupportedError(f"contract {contract} has an option that a text cannot hold: {error}") from error


def _contract(name: str, options: dict[str, Any]) -> Contract | None:
    return CONTRACTS[name](**options) if name in CONTRACTS else None


def _method(spelling: str, arrays: dict[str, Any]) -> Method:
    given = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    kind, options = parse_method(spelling)
    return kind(**given, **options)
