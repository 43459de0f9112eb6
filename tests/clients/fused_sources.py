"""What the model sources of vLLM and SGLang say they fuse, read without importing them, against our own table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from halfbyte.models.partners import fused_layers

MODEL_TYPES = {
    "exaone": "exaone",
    "qwen": "qwen",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "whisper": "whisper",
    "cohere_asr": "cohere_asr",
    "fireredasr2": "whisper",
    "kimi_linear": "kimi_linear",
    "kimi_k3": "kimi_k3",
    "glm5next": "glm5_next",
    "glm5_next": "glm5_next",
    "dots3_common": "dots3_note",
    "bailing_moe_v3": "bailing_hybrid",
    "olmo_hybrid": "olmo_hybrid",
    "jet_nemotron": "jet_nemotron",
    "k2_horizon": "k2_horizon",
    "minimax_m3": "minimax_m3_text",
    "minimax_m3_vl": "minimax_m3_text",
    "inkling": "inkling_model",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "qwen4_exp": "qwen4_exp",
}
"""Source file or folder → the model type whose rows of the table it must agree with; others with the default."""

CONVOLUTION = "convolutions are kept"
TOWER = "part of a tower or projector, which is kept"
INDEXER = "attention indexers are kept"

UNSHARED: dict[frozenset[str], str] = {
    frozenset({"q_conv1d", "k_conv1d", "v_conv1d"}): CONVOLUTION,
    frozenset({"fc1", "fc3"}): TOWER,
    frozenset({"q", "k", "v"}): TOWER,
    frozenset({"query_net", "key_net", "value_net"}): "speech decoders outside transformers: not converted by us",
    frozenset({"key_net", "value_net"}): "speech decoders outside transformers: not converted by us",
    frozenset({"gate_proj", "dense_h_to_4h"}): TOWER,
    frozenset({"wk", "weights_proj"}): INDEXER,
    frozenset({"q_proj", "k_proj", "v_proj", "index_qk_proj"}): INDEXER,
}
"""Members that servers fuse and our table does not, with the reason."""

OTHER_NAMES = {
    "molmo": {"merged_linear": TOWER},
    "molmo2": {"merged_linear": TOWER, "merged_kv": TOWER, "merged_qkv": TOWER},
    "k2_horizon": {"qk_proj": "layers without v_proj share the same scale; only the name differs"},
}
"""Source → fused names that vLLM uses and our table does not, with the reason."""


class Fusion(NamedTuple):
    """One fused layer of one source file."""

    source: str
    served: str
    members: tuple[str, ...]
    parent: str
    packed: bool
    """From `packed_modules_mapping`, by which exclude lists are matched; else from a weight loader."""


@cache
def fusions(models: Path) -> list[Fusion]:
    """All that the sources below a folder fuse."""
    found = []
    for file in sorted(models.rglob("*.py")):
        source = file.relative_to(models).with_suffix("").parts[0]
        for served, members, packed in _mappings(ast.parse(file.read_text())):
            leaves = tuple(dict.fromkeys(_parts(member)[1] for member in members))
            name = _parts(served)[1]
            leaves = tuple(leaf for leaf in leaves if leaf not in (name, "_input_mix_padding"))
            if len(leaves) > 1 and "w13_weight" not in name:
                found.append(Fusion(source, name, leaves, _parts(members[0])[0], packed))
    return list(dict.fromkeys(found))


def disagreements(models: Path, named: bool) -> list[str]:
    """What a server fuses and our table does not; if `named`, also what it calls by another name."""
    wrong = []
    for fusion in fusions(models):
        if frozenset(fusion.members) in UNSHARED:
            continue
        called = _served_names(fusion)
        if not called:
            wrong.append(f"{fusion.source}: {fusion.served} of {', '.join(fusion.members)}")
        elif named and fusion.packed and fusion.served not in {*called, *OTHER_NAMES.get(fusion.source, ())}:
            wrong.append(f"{fusion.source}: {', '.join(fusion.members)} are called {fusion.served}")
    return wrong


def _served_names(fusion: Fusion) -> set[str]:
    """What our table calls the members of a fused layer, by each row that has them all."""
    fused, names = fused_layers(MODEL_TYPES.get(fusion.source, "")), set()
    for layer in fused.layers:
        if set(layer.members) >= set(fusion.members):
            parent = f"model.layers.0.{layer.parent or fusion.parent or 'block'}"
            modules = [f"{parent}.{leaf}" for leaf in fusion.members]
            siblings = {*modules, *(f"{parent}.{leaf}" for leaf in layer.beside)}
            if {*fused.partners(modules[0], siblings), modules[0]} >= set(modules):
                names.add(fused.served_name(modules[0], siblings).rpartition(".")[2])
    return names


def _parts(name: str) -> tuple[str, str]:
    """(last part of the parent's name, last part) of a name as mappings spell it: ".linear_attn.q_proj."."""
    parts = [part for part in name.split(".") if part and part not in ("weight", "bias")]
    return (parts[-2] if len(parts) > 1 else ""), parts[-1]


def _mappings(tree: ast.Module) -> Iterator[tuple[str, list[str], bool]]:
    """(fused name, members, whether packed) of every mapping in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "orig_to_new_stacked":
            entries = [(key, value) for key, value in _items(node.value)]
            yield from _stacked([(value[0], key, value[1]) for key, value in entries if isinstance(value, tuple)])
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [ast.unparse(target) for target in targets]
        if any("packed_modules_mapping" in name for name in names):
            yield from ((key, _names(value), True) for key, value in _items(node.value) if isinstance(value, list))
        if any("params_mapping" in name for name in names) and isinstance(node.value, ast.List):
            rows = [_literal(row) for row in node.value.elts]
            yield from _stacked([row for row in rows if isinstance(row, tuple) and len(row) == 3])


def _stacked(rows: list[tuple[object, ...]]) -> Iterator[tuple[str, list[str], bool]]:
    """Rows (fused name, member, number of the part); a number that comes again starts another set of members."""
    groups: dict[str, list[dict[object, str]]] = {}
    for served, member, number in rows:
        if isinstance(served, str) and isinstance(member, str):
            sets = groups.setdefault(served, [{}])
            if str(number) in sets[-1]:
                sets.append({})
            sets[-1][str(number)] = member
    for served, sets in groups.items():
        yield from ((served, list(members.values()), False) for members in sets)


def _items(node: ast.expr) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else _literal(key)
            if isinstance(name, str):
                yield name, _literal(value)


def _names(value: list[object]) -> list[str]:
    return [str(item[0] if isinstance(item, tuple) else item) for item in value]


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
