"""What config.json and hf_quant_config.json claim about a checkpoint, and whether the tensors agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoint.io.index import HF_QUANT_CONFIG, INDEX, Checkpoint, read_json
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Weights


@dataclass(frozen=True)
class Claim:
    """The quantization part of a config, in one form for all layouts."""

    layout: str | None
    """"modelopt", "compressed-tensors", "gpt-oss", "fp8" or the method as given; None when there is no such part."""
    activations: bool
    """Whether readers will quantize activations to FP4, and so want input scales."""
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    formats: tuple[str, ...] = ()
    """Formats that the config speaks of: nvfp4, mxfp4."""
    layers: tuple[str, ...] | None = None
    """Modules that are quantized, where the config names each."""
    beside: tuple[str, ...] = ()
    """Other layouts that the same config explains: FP8 beside FP4."""


def read_claim(checkpoint: Checkpoint) -> Claim:
    """The claim of a checkpoint; keys that are missing or of an unexpected type count as absent."""
    config = checkpoint.quantization
    if not config:
        return Claim(None, False)
    method = str(config.get("quant_method", ""))
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo", "")).upper()
        layers = config.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None
        return Claim(
            layout="modelopt",
            activations=algorithm == "NVFP4",
            ignore=_texts(config.get("ignore", config.get("exclude_modules"))),
            formats=("nvfp4",) if "NVFP4" in algorithm or layers else (),
            layers=tuple(layers) if isinstance(layers, dict) else None,
            beside=("fp8",) if layers else (),
        )
    if method == "compressed-tensors":
        groups = _groups(config)
        return Claim(
            layout="compressed-tensors",
            activations=any(_is_fp4(group.get("input_activations")) for group in groups),
            ignore=_texts(config.get("ignore")),
            targets=tuple(dict.fromkeys(target for group in groups for target in _texts(group.get("targets")))),
            formats=tuple(
                {"tensor_group": "nvfp4", "group": "mxfp4"}.get(str(group["weights"].get("strategy")), "")
                for group in groups
                if _is_fp4(group.get("weights"))
            ),
            beside=() if all(_is_fp4(group.get("weights")) for group in groups) else ("fp8",),
        )
    if method == "mxfp4":
        return Claim("gpt-oss", False, formats=("mxfp4",))
    if config.get("moe_quant_algo"):
        # DeepSeek-V4: vLLM builds such experts with quantized activations, whatever quantized_layers says of each
        layers = config.get("quantized_layers")
        named = tuple(layers) if isinstance(layers, dict) else None
        return Claim("modelopt", True, formats=("nvfp4",), layers=named, beside=("fp8", "deepseek"))
    return Claim(method or None, False, beside=("fp8", "deepseek"))


def claim_problems(checkpoint: Checkpoint, weights: Weights, claim: Claim) -> Iterator[Problem]:
    """Config against tensors, and the two config files against each other."""
    stored = {weight.kind.layout for weight in weights.quantized.values() if weight.kind.format in ("nvfp4", "mxfp4")}
    formats = {weight.kind.format for weight in weights.quantized.values() if weight.kind.layout == claim.layout}
    if stored and claim.layout is None:
        text = f"tensors are stored in the layout {', '.join(sorted(stored))}, but no config says so: readers see bytes"
        yield Problem("error", "config", "config.json", text)
    elif claim.formats and claim.layout not in stored:
        text = f"quantization_config speaks of {claim.layout}, but no tensor is stored so"
        yield Problem("error", "config", "config.json", text)
    elif claim.formats and formats and not formats <= set(claim.formats):
        text = f"quantization_config describes {', '.join(claim.formats)}, but tensors are {', '.join(sorted(formats))}"
        yield Problem("error", "config", "config.json", text)
    yield from _others(weights, claim)
    yield from _readers(checkpoint, weights, claim)
    yield from _activations(weights, claim)
    yield from _two_files(checkpoint)
    if checkpoint.setting("tie_word_embeddings") is True and "lm_head" in weights.quantized:
        text = "quantized, although tie_word_embeddings makes readers use the embedding instead"
        yield Problem("error", "tied", "lm_head", text)
    yield from _index(checkpoint)


def _others(weights: Weights, claim: Claim) -> Iterator[Problem]:
    """Quantized weights of a layout that the config does not speak of."""
    if claim.layout is None:
        return
    seen: set[str] = set()
    for weight in weights.quantized.values():
        kind = weight.kind
        if kind.layout not in (claim.layout, *claim.beside) and kind.name not in seen:
            seen.add(kind.name)
            text = f"stored as {kind.name}, which a quantization_config of {claim.layout} does not explain to a reader"
            yield Problem("error", "config", weight.name, text)


def _readers(checkpoint: Checkpoint, weights: Weights, claim: Claim) -> Iterator[Problem]:
    """Layouts that are as they should be, and that some reader cannot use all the same."""
    gpt_oss = checkpoint.model_type == "gpt_oss"
    if claim.layout == "gpt-oss" and not gpt_oss:
        text = f"quant_method mxfp4 is read for gpt_oss models only, not for {checkpoint.model_type or 'this one'}"
        yield Problem("error", "reader", "config.json", text)
    stored = [weight for weight in weights.quantized.values() if weight.kind.format == "nvfp4"]
    experts = [weight for weight in stored if ".experts." in weight.name]
    if experts and gpt_oss:
        text = "NVFP4 experts of gpt-oss are not read by vLLM 0.32 (it registers no expert biases); MXFP4 is"
        yield Problem("warning", "reader", experts[0].name, text)
    elif experts and claim.layout == "compressed-tensors":
        text = "transformers up to 5.22 drops the tensor scale of NVFP4 experts without a word; vLLM reads it"
        yield Problem("warning", "reader", experts[0].name, text)


def _activations(weights: Weights, claim: Claim) -> Iterator[Problem]:
    """Input scales: in every NVFP4 weight when activations are quantized, else in none."""
    nvfp4 = [weight for weight in weights.quantized.values() if weight.kind.format == "nvfp4"]
    nvfp4 = [weight for weight in nvfp4 if weight.kind.layout == claim.layout]
    for weight in nvfp4:
        if claim.activations and "input" not in weight.parts:
            text = (
                f"the config says activations are FP4, but {weight.name}{weight.kind.suffixes['input']} is missing: "
                "vLLM computes with uninitialised memory"
            )
            yield Problem("error", "input-scale", weight.name, text)
    extra = [weight.name for weight in nvfp4 if "input" in weight.parts]
    if extra and not claim.activations:
        text = f"{len(extra)} weights have an input scale, but the config says that activations are not quantized"
        yield Problem("warning", "input-scale", extra[0], text)


def _two_files(checkpoint: Checkpoint) -> Iterator[Problem]:
    """hf_quant_config.json must say the same as config.json; text_config must not say anything of its own."""
    outer, text = checkpoint.config.get("quantization_config"), checkpoint.config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    if isinstance(outer, dict) and isinstance(inner, dict) and inner != outer:
        yield Problem(
            "error", "config", "config.json", "text_config holds another quantization_config than the outer one"
        )
    path = checkpoint.path / HF_QUANT_CONFIG
    if not path.is_file() or not isinstance(outer, dict):
        return
    nested = read_json(path).get("quantization")
    if not isinstance(nested, dict):
        yield Problem("error", "config", HF_QUANT_CONFIG, "has no object called quantization")
        return
    for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
        if key not in nested:
            yield Problem("error", "config", HF_QUANT_CONFIG, f"lacks {key}, which vLLM requires (null or [] will do)")
    if "quant_algo" in outer and nested.get("quant_algo") != outer["quant_algo"]:
        said = f"quant_algo is {nested.get('quant_algo')!r} here and {outer['quant_algo']!r} in config.json"
        yield Problem("error", "config", HF_QUANT_CONFIG, said)
    if "ignore" in outer and set(_texts(nested.get("exclude_modules"))) != set(_texts(outer["ignore"])):
        differ = set(_texts(nested.get("exclude_modules"))) ^ set(_texts(outer["ignore"]))
        text = f"exclude_modules differs from ignore in config.json, for one by {sorted(differ)[0]!r}"
        yield Problem("error", "config", HF_QUANT_CONFIG, text)


def _index(checkpoint: Checkpoint) -> Iterator[Problem]:
    path = checkpoint.path / INDEX
    if not path.is_file():
        return
    metadata = read_json(path).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.info.bytes for tensor in checkpoint.tensors.values())
    if said is not None and said != total:
        yield Problem("warning", "index", INDEX, f"total_size says {said} bytes, the tensors have {total}")


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _is_fp4(scheme: object) -> bool:
    return isinstance(scheme, dict) and scheme.get("num_bits") == 4 and scheme.get("type") == "float"


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
