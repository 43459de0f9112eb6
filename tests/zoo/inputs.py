"""Inputs that a model's forward accepts, found by trying: words first; pictures or sound where words are not enough."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.zoo.shrink import WORDS, parts

LENGTH = 16
Inputs = dict[str, torch.Tensor]


class NoInputs(Exception):
    """None of the inputs that we know of runs the model."""


def words(model: Any, seed: int, length: int = LENGTH) -> torch.Tensor:
    """Words that the embedding has and that are no special tokens."""
    known = min([WORDS, *(part.vocab_size for part in parts(model.config) if vars(part).get("vocab_size"))])
    return torch.randint(5, known, (2, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)


def candidates(model: Any) -> Iterator[Inputs]:
    """Sets of inputs in the order in which to try them."""
    accepted = set(inspect.signature(runner(model).forward).parameters)
    text: Inputs = {}
    if "input_ids" in accepted:
        text = {"input_ids": words(model, 1)}
        if "attention_mask" in accepted:
            text["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    target: Inputs = {"decoder_input_ids": words(model, 2)} if "decoder_input_ids" in accepted else {}
    if text:
        yield text | target
        yield {"input_ids": words(model, 1)} | target
        yield {"input_ids": words(model, 1, 64)} | target
    for name, shapes in MODALITIES.items():
        if name in accepted:
            for shape in shapes:
                yield {name: noise(*shape)} | target
                yield {name: noise(*shape)} | text | target
    yield from peculiar(model.config.model_type, text, target)


MODALITIES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "pixel_values": ((2, 3, 32, 32), (2, 1, 3, 32, 32), (2, 1, 1, 3, 32, 32)),
    "input_features": (
        *((2, bins, 256) for bins in (80, 128)),
        *((2, 256, bins) for bins in (64, 80, 128, 160)),
        (2, 128, 128),
    ),
    "input_values": ((2, 4000),),
}


def peculiar(model_type: str, text: Inputs, target: Inputs) -> Iterator[Inputs]:
    """Inputs of single models."""
    picture = {"pixel_values": noise(2, 3, 32, 32)}
    if model_type in ("blip-2", "instructblip", "instructblipvideo"):
        if model_type == "instructblipvideo":
            picture = {"pixel_values": noise(2, 1, 3, 32, 32)}
        marked = text["input_ids"].clone()
        marked[:, :4] = 250  # a token for each query
        asked = {} if model_type == "blip-2" else {"qformer_input_ids": text["input_ids"]}
        yield text | {"input_ids": marked} | picture | asked | target
        yield text | {"input_ids": marked} | picture | asked
    if model_type == "idefics":
        yield text | {"pixel_values": noise(2, 1, 3, 32, 32), "image_attention_mask": torch.ones(2, LENGTH, 1)}
    if model_type == "kosmos-2":
        places = torch.zeros(2, LENGTH, dtype=torch.long)
        places[:, :4] = 1
        yield text | picture | {"image_embeds_position_mask": places}
    if model_type == "udop":
        yield text | target | {"bbox": torch.rand(2, LENGTH, 4, generator=torch.Generator().manual_seed(3))}
    if model_type == "dia":
        yield text | {"decoder_input_ids": target["decoder_input_ids"][:, :, None].expand(2, LENGTH, 9)}
    if model_type == "pix2struct":
        patches = noise(2, LENGTH, 66)
        patches[:, :, :2] = 1  # row and column
        yield {"flattened_patches": patches} | target
    if model_type == "kyutai_speech_to_text":
        yield {"input_ids": text["input_ids"][:, :, None].expand(2, LENGTH, 33)}
    if model_type.startswith("musicgen"):
        yield {"input_ids": text["input_ids"].repeat(4, 1)}


def runner(model: Any) -> Any:
    """The part of a model that computes: some have a forward only in it."""
    return getattr(model, "thinker", model)


def find_inputs(model: Any) -> Inputs:
    """The first set of inputs with which the model computes finite numbers."""
    reasons = []
    for inputs in candidates(model):
        try:
            found = compute(model, inputs)
        except Exception as error:
            reasons.append(f"{'+'.join(inputs)}: {type(error).__name__}: {error}".replace("\n", " ")[:160])
            continue
        if bool(torch.isfinite(found).all()) and float(found.norm()) > 0:
            return inputs
        reasons.append(f"{'+'.join(inputs)}: not finite, or zero")
    raise NoInputs("; ".join(reasons[:3]) or "the forward takes none that we know")


def compute(model: Any, inputs: Inputs) -> torch.Tensor:
    """The logits, or the first tensor of numbers that comes out."""
    torch.manual_seed(5)
    called = runner(model)
    more = {"use_cache": False} if "use_cache" in inspect.signature(called.forward).parameters else {}
    with torch.no_grad():
        output = called(**inputs, **more)
    named = getattr(output, "logits", None)
    for value in [named, *(output.values() if hasattr(output, "values") else output)]:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.float()
    raise NoInputs("no tensor comes out")
