"""The algorithms that Model-Optimizer's two config files name, against the tensors and against each other."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.checkpoint.io.index import Checkpoint, read_json
from halfbyte.layouts import modelopt
from halfbyte.layouts.description import Json, texts
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.rules.groups import group_of, read_groups
from halfbyte.verify.stored import Contents, StoredTensors

CONFIG = "config.json"
MIXED = "MIXED_PRECISION"

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"),
    "fp8": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES"),
}
"""Format of stored weights → the algorithms that write it."""

READERS = "vLLM, SGLang and TensorRT-LLM build the layer by this and cannot load the tensors"


def algorithm_problems(checkpoint: Checkpoint, contents: Contents) -> Iterator[Problem]:
    """quant_algo, group_size and the cache in both files. Nothing for configs of other layouts."""
    weights = {
        name: weight for name, weight in contents.quantized.items() if weight.storage.layout in ("modelopt", "fp8")
    }
    outer, nested = checkpoint.config.get("quantization_config"), _nested(checkpoint)
    if isinstance(outer, dict) and str(outer.get("quant_method", "")).startswith("modelopt"):
        yield from _file(CONFIG, outer, weights)
        yield from _groups(outer, weights)
        if nested is not None:
            yield from _agree(outer, nested)
    if nested is not None and (not isinstance(outer, dict) or "moe_quant_algo" not in outer):
        yield from _file(modelopt.CONFIG_FILE, nested, weights)


def _nested(checkpoint: Checkpoint) -> Json | None:
    path = checkpoint.path / modelopt.CONFIG_FILE
    found = read_json(path).get("quantization") if path.is_file() else None
    return found if isinstance(found, dict) else None


def _file(file: str, config: Json, weights: dict[str, StoredTensors]) -> Iterator[Problem]:
    """One file against the tensors."""
    if not weights:
        return
    named = str(config.get("quant_algo") or "").upper()
    if named == MIXED:
        yield from _layers(file, config.get("quantized_layers"), weights)
        return
    if not named:
        yield Problem("error", "scheme", file, "quant_algo is missing: vLLM and SGLang stop there")
        return
    wrong = [weight for weight in weights.values() if named not in ALGORITHMS.get(weight.storage.format, ())]
    if wrong:
        yield _wrong_algorithm(file, "quant_algo", named, wrong)
    sized = [weight for weight in weights.values() if weight.storage.format == "nvfp4"]
    if sized and config.get("group_size") not in (None, sized[0].storage.block):
        yield _wrong_size(file, "group_size", config.get("group_size"), sized[0])


def _layers(file: str, layers: object, weights: dict[str, StoredTensors]) -> Iterator[Problem]:
    """quantized_layers, entry by entry. Which modules it leaves out is said elsewhere."""
    if not isinstance(layers, dict):
        yield Problem("error", "scheme", file, f"quant_algo is {MIXED}, but there are no quantized_layers: vLLM stops")
        return
    for module, entry in layers.items():
        weight = weights.get(module)
        if weight is None or not isinstance(entry, dict):
            continue
        named = str(entry.get("quant_algo") or "").upper()
        if named not in ALGORITHMS.get(weight.storage.format, ()):
            yield _wrong_algorithm(file, f"quantized_layers.{module}.quant_algo", named, [weight])
        if weight.storage.format == "nvfp4" and entry.get("group_size") not in (None, weight.storage.block):
            yield _wrong_size(file, f"quantized_layers.{module}.group_size", entry.get("group_size"), weight)


def _groups(config: Json, weights: dict[str, StoredTensors]) -> Iterator[Problem]:
    """config_groups, which some readers prefer to quant_algo."""
    groups = [group for group in read_groups(config) if not group.is_attention]
    if not groups:
        return
    done: set[tuple[str, str]] = set()
    for weight in weights.values():
        group = group_of(weight.name, groups)
        if group is None:
            text = f"stored as {weight.storage.name}, but no target of config_groups matches it"
            yield Problem("error", "targets", weight.name, text)
            continue
        nvfp4 = weight.storage.format == "nvfp4"
        if (group.name, weight.storage.format) in done:
            continue
        done.add((group.name, weight.storage.format))
        wanted = {"num_bits": 4 if nvfp4 else 8, "type": "float"} | ({"group_size": 16} if nvfp4 else {})
        for key, value in wanted.items():
            said = (group.weights or {}).get(key)
            if said != value:
                where = f"config_groups.{group.name}.weights.{key}"
                text = f"{where} is {said!r}, but {value!r} by the tensors of {weight.name}; {READERS}"
                yield Problem("error", "scheme", CONFIG, text)
    named = str(config.get("quant_algo") or "").upper()
    if named in ("NVFP4", "W4A16_NVFP4"):
        with_inputs = any(group.inputs is not None for group in groups)
        if with_inputs != (named == "NVFP4"):
            have = "have" if with_inputs else "have no"
            text = f"quant_algo is {named}, but config_groups {have} input_activations: readers follow one or the other"
            yield Problem("error", "scheme", CONFIG, text)


def _agree(outer: Json, nested: Json) -> Iterator[Problem]:
    """hf_quant_config.json must say the same as config.json."""
    file = modelopt.CONFIG_FILE
    for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
        if key not in nested:
            yield Problem("error", "config", file, f"lacks {key}, which vLLM requires (null or [] will do)")
    if "quant_algo" in outer and nested.get("quant_algo") != outer["quant_algo"]:
        text = f"quant_algo is {nested.get('quant_algo')!r} here and {outer['quant_algo']!r} in config.json"
        yield Problem("error", "config", file, text)
    if "ignore" in outer and set(texts(nested.get("exclude_modules"))) != set(texts(outer["ignore"])):
        differ = set(texts(nested.get("exclude_modules"))) ^ set(texts(outer["ignore"]))
        text = f"exclude_modules differs from ignore in config.json, for one by {sorted(differ)[0]!r}"
        yield Problem("error", "config", file, text)
    here, there = nested.get("kv_cache_quant_algo"), _cache(outer.get("kv_cache_scheme"))
    if (here or None) != there:
        text = f"kv_cache_quant_algo is {here!r}, but kv_cache_scheme in config.json says {there!r}"
        yield Problem("error", "config", file, text)


def _cache(scheme: object) -> object:
    """A kv_cache_scheme as the algorithm that it stands for."""
    if isinstance(scheme, dict):
        return "FP8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else str(scheme)
    return scheme or None


def _wrong_algorithm(file: str, key: str, named: str, wrong: list[StoredTensors]) -> Problem:
    first = wrong[0]
    who = first.name if len(wrong) == 1 else f"{first.name} and {number(len(wrong) - 1, 'more weight')}"
    verb = "is" if len(wrong) == 1 else "are"
    return Problem("error", "scheme", file, f"{key} is {named!r}, but {who} {verb} {first.storage.name}; {READERS}")


def _wrong_size(file: str, key: str, said: object, weight: StoredTensors) -> Problem:
    text = f"{key} is {said!r}, but {weight.name} has one scale for {weight.storage.block} elements; {READERS}"
    return Problem("error", "scheme", file, text)
