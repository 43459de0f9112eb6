"""llama.cpp's importance matrices as statistics: diagonals, the mean of x² of every input. Both of its file formats.

The old format, a plain stream: the number of entries; for each its name, the number of calls, the number of values and
the values (mean squares × calls), integers of 32 bits and float32. The new one is a GGUF file with `<name>.in_sum2` and
`<name>.counts`. Names are llama.cpp's; those of decoders with the usual parts become the names of transformers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from halfbyte.errors import InputError, UnsupportedError
from halfbyte.statistics.folder import Entry, Statistics
from halfbyte.statistics.linear import ARRAYS, F32, LinearStatistics

BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Parts of a block in llama.cpp → in transformers; {} is the number of an expert."""

LONGEST_NAME = 1 << 12

Found = tuple[str, LinearStatistics | None]
"""A module and what is known of it; None if it saw no token."""


class Imatrix(Statistics):
    """The diagonals of a file."""

    def __init__(self, path: Path, modules: Mapping[str, LinearStatistics]) -> None:
        super().__init__(path, {"imatrix": path.name}, {name: Entry(path, name, {}) for name in modules})
        self._modules = modules

    def holds(self, name: str) -> frozenset[str]:
        found = self.get(name)
        return frozenset() if found is None else frozenset(part for part, _ in found.arrays())

    def get(self, name: str, width: int | None = None, arrays: Iterable[str] = ARRAYS) -> LinearStatistics | None:
        found = self._modules.get(name)
        if found is not None:
            found.check(f"{self.path}: {name}", width)
        return found


def open_imatrix(path: Path) -> Imatrix:
    """Read an imatrix file. `tokens` is the number of tokens (GGUF) or of calls (the old format)."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    named = list(_from_gguf(path) if magic == b"GGUF" else _from_stream(path, path.read_bytes()))
    found = {module: one for module, one in named if one is not None}
    if named and not found:
        raise InputError(f"{path} knows nothing: every count of its linear layers is 0; make it again, of a text")
    if not found:
        raise InputError(f"{path} holds no entry whose name is that of a linear layer (such as blk.0.attn_q.weight)")
    return Imatrix(path, found)


def module_of(name: str, expert: int | None = None) -> str | None:
    """The module of transformers that a tensor of llama.cpp is; None if it is none of a block.

    >>> module_of("blk.3.ffn_down.weight"), module_of("blk.0.ffn_up_exps.weight", 7), module_of("output.weight")
    ('model.layers.3.mlp.down_proj', 'model.layers.0.mlp.experts.7.up_proj', 'lm_head')
    """
    if name == "output.weight":
        return "lm_head"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None or found[2] not in BLOCK:
        return None
    return f"model.layers.{found[1]}.{BLOCK[found[2]].format(0 if expert is None else expert)}"


def _modules(name: str, means: F32, counts: list[int]) -> Iterator[Found]:
    """One module, or one per expert of a stack."""
    stacked = name.endswith("_exps.weight")
    for expert, (row, tokens) in enumerate(zip(means, counts, strict=True)):
        module = module_of(name, expert if stacked else None)
        if module is not None:
            diagonal = np.ascontiguousarray(row, np.float32)
            yield module, LinearStatistics(tokens, len(row), 0.0, diagonal=diagonal) if tokens > 0 else None


def _from_gguf(path: Path) -> Iterator[Found]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedError(f"{path} is a GGUF file; `pip install gguf` lets halfbyte read it") from error
    try:
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(str(path)).tensors}
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise InputError(f"{path}: cannot be read as GGUF: {error}") from error
    for key in tensors:
        if not key.endswith(".in_sum2"):
            continue
        name = key.removesuffix(".in_sum2")
        if f"{name}.counts" not in tensors:
            raise InputError(f"{path}: {key} has no {name}.counts beside it")
        counts = np.asarray(tensors[f"{name}.counts"], np.float64).reshape(-1)
        sums = np.asarray(tensors[key], np.float64).reshape(len(counts), -1)
        means = sums / np.maximum(counts, 1)[:, None]
        yield from _modules(name, means.astype(np.float32), [int(count) for count in counts])


def _from_stream(path: Path, data: bytes) -> Iterator[Found]:
    at = 0

    def integer(least: int, most: int, what: str) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise InputError(f"{path}: ends at byte {len(data)} within {what}: cut, or no imatrix file")
        (value,) = struct.unpack_from("<i", data, at)
        if not least <= value <= most:
            raise InputError(f"{path}: {what} is {value} at byte {at}; not an imatrix file, or damaged")
        at += 4
        return int(value)

    for _ in range(integer(1, 1 << 24, "the number of entries")):
        length = integer(1, LONGEST_NAME, "the length of a name")
        name = data[at : at + length].decode("utf-8", "replace")
        at += length
        calls = integer(0, 2**31 - 1, f"the number of calls of {name}")
        count = integer(1, 2**31 - 1, f"the number of values of {name}")
        if at + 4 * count > len(data):
            raise InputError(f"{path}: {name} has {count} values, but the file ends before them: it is cut")
        values = np.frombuffer(data, "<f4", count, at)
        at += 4 * count
        if name.endswith("_exps.weight"):
            continue  # the old format does not say how many experts a stack has
        means = values.astype(np.float64) / max(1, calls)
        yield from _modules(name, means.astype(np.float32)[None], [calls])
