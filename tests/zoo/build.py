"""Which classes there are, and a tiny random model of one."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.fixes import ARGUMENTS, repair
from tests.zoo.shrink import shrink, shrink_overrides

MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
MOST = 8_000_000
"""Parameters. A larger model was not made small."""


class Unbuildable(Exception):
    """There is no small model of this class."""


def class_names() -> list[str]:
    """Every architecture class of the auto mappings that generate text or fill in words."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for mapping in MAPPINGS:
        for entry in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            names.update([entry] if isinstance(entry, str) else entry)
    return sorted(names)


def tiny_config(name: str) -> Any:
    """A small config, as it reads from its own file."""
    import transformers

    kind = getattr(transformers, name).config_class
    config = shrink(kind(**(ARGUMENTS.get(name) or ARGUMENTS.get(kind.model_type) or {})))
    return kind.from_dict(repair(kind.model_type, shrink_overrides(config.to_dict())))


def tiny_model(name: str) -> Any:
    """The model in bfloat16, with random weights large enough that a wrong one changes the outputs."""
    import transformers

    made = getattr(transformers, name)
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in made(config).parameters())
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}") from error
    if size > MOST:
        raise Unbuildable(f"{size} parameters")
    torch.manual_seed(0)
    model = made(config).to(torch.bfloat16).eval()
    randomize(model)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Matrices get another size in each row, so that no two have the same amax; vectors stay as they are made."""
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        table = isinstance(module, torch.nn.Embedding)
        if "Sinusoidal" in type(module).__name__:  # computed, and not saved
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2 or min(parameter.shape[-2:]) < 2:
                continue
            spread = torch.exp(0.3 * torch.randn((*parameter.shape[:-1], 1), generator=generator))
            size = (
                1.0 if table else parameter[0].numel() ** -0.5 if parameter.dim() == 2 else parameter.shape[-1] ** -0.5
            )
            values = torch.randn(parameter.shape, generator=generator) * spread * size
            parameter.data = values.to(parameter.dtype)
