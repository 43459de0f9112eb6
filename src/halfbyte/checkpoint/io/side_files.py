"""Files beside the shards: which are copied, which are left out and why, which are broken.

The rule: everything is copied but version control, caches, and the same model in another form. In a folder of their
own, safetensors are weights that some loader reads (`2_Dense` of sentence-transformers, adapters), so they are copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from halfbyte.checkpoint.io.absent import is_dangling, is_lfs_pointer, refuse_absent
from halfbyte.checkpoint.io.header import encodable

WORK = ".halfbyte"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NOT_READ = (".git", ".cache", ".gitattributes", WORK)
"""Names that are never copied, in any folder: version control and caches."""
OTHER_FOLDERS = (
    "original", "metal", "onnx", "openvino", "coreml", "gguf", "ggml", "tflite", "tensorrt", "tf", "flax",
)  # fmt: skip
"""Folders that hold the same model in another form."""
OTHER_FORM = re.compile(
    r".*\.(bin|pt|pth|ckpt|pkl|onnx|onnx[._]data(_\d+)?|gguf|ggml|h5|msgpack|ot|tflite|mlmodel|pb|engine)(\.index\.json)?"
    r"|openvino_.*\.xml"
)
"""File names of the same model in another form, and of its index."""
READ_PICKLES = ("spk_dict.pt",)
"""Pickles that are no weights and that a loader reads: the voices of Qwen2.5-Omni."""
ANOTHER_FORM = "the model in another form"
MODULES = "modules.json"
"""The list of sentence-transformers: which folders hold which part of a model."""


def side_files(
    path: Path, shards: Collection[str], written: Collection[str], strict: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What is copied, and what is left out and why.

    shards, written: names that are read or written otherwise. strict: a link to nothing or a Git LFS pointer where a
    file should be copied is an error; else such a file is left out.
    """
    side: list[str] = []
    left_out: dict[str, str] = {}
    for name, why in _sorted_out(path, path):
        if name in shards or name in written:
            continue
        reason = why or (None if encodable(name) else "its name is no Unicode text") or _broken(path / name, strict)
        if reason is None:
            side.append(name)
        else:
            left_out[name if encodable(name) else ascii(name)] = reason
    return tuple(side), left_out


def _sorted_out(root: Path, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Every file in a folder and below with the reason to leave it out; None: copied."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = str(entry.relative_to(root))
        if entry.name in NOT_READ:
            yield name, "not read by loaders"
        elif entry.is_dir() and entry.is_symlink():
            yield name, "a link to a folder"
        elif entry.is_dir():
            yield from _sorted_out(root, entry)
        elif folder == root and name.endswith((".safetensors", ".safetensors.index.json")):
            yield name, "no shard of this checkpoint"
        else:
            yield name, ANOTHER_FORM if _is_other_form(root, entry) else None


def _is_other_form(root: Path, file: Path) -> bool:
    """Whether a file is part of the same model in another form."""
    if any(part.lower() in OTHER_FOLDERS for part in file.relative_to(root).parts[:-1]):
        return True
    if OTHER_FORM.fullmatch(file.name) is None or file.name in READ_PICKLES:
        return False
    return not _only_form(root, file)


def _only_form(root: Path, weights: Path) -> bool:
    """Whether a pickle in a folder is what its loader reads, because there are no safetensors beside it."""
    folder = weights.parent
    if folder == root or weights.suffix not in PICKLES or any(folder.glob("*.safetensors")):
        return False
    return (folder / "adapter_config.json").is_file() or str(folder.relative_to(root)) in _module_folders(root)


def _module_folders(root: Path) -> set[str]:
    """The folders that modules.json names."""
    try:
        modules = json.loads((root / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()
    listed = modules if isinstance(modules, list) else []
    return {str(module.get("path")) for module in listed if isinstance(module, dict)}


def _broken(path: Path, strict: bool) -> str | None:
    """Why a file that should be copied cannot be."""
    if strict:
        refuse_absent(path)
    if is_dangling(path):
        return "a link to nothing"
    if not path.is_file():
        return "no regular file"
    return "a Git LFS pointer" if is_lfs_pointer(path) else None
