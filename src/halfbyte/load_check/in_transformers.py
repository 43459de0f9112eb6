"""The process that asks transformers: `python -m halfbyte.load_check.in_transformers DIRECTORY trust|known OUTPUT`.

It is transformers' own `from_pretrained` from end to end: config, quantizer, renaming and merging of tensors, tied
weights, the keys that a class may lack or ignore. Only the device is meta, and the tensors have no bytes. Written for
transformers 5; tried with 5.22.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfbyte.child import after_traceback, answer, one_line
from halfbyte.load_check.headers import meta_tensors
from halfbyte.models.from_model import TRUST
from halfbyte.models.model_class import find_class

Shapes = dict[str, tuple[int, ...]]


def load(path: str, trust: str) -> dict[str, Any]:
    """Missing and unexpected names, shapes that differ, or the error, of the model in a directory."""
    model_class, config = find_class(Path(path), trust == TRUST)
    seen = Seen()
    with on_meta(meta_tensors(Path(path)), seen):
        try:
            _, told = model_class.from_pretrained(
                path,
                config=config,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                **_decoded(config),
            )
        except RuntimeError:
            if not seen.failures:
                raise
            told = {"missing_keys": seen.missing, "unexpected_keys": seen.unexpected, "mismatched_keys": ()}
    found: dict[str, Any] = {
        "missing": sorted(told["missing_keys"]),
        "unexpected": sorted(told["unexpected_keys"]),
        "mismatched": sorted({*seen.mismatched, *map(_mismatch, told["mismatched_keys"])}),
    }
    if seen.failures:
        (name, why), others = seen.failures[0], len(seen.failures) - 1
        found["error"] = one_line(
            f"{name} cannot be made from its tensors{f' (nor {others} others)' * (others > 0)}: {why}"
        )
    return found


class Seen:
    """What the loader does not tell: failures of merging, and shapes that differ in a quantized model."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.unexpected: set[str] = set()
        self.mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.failures: list[tuple[str, str]] = []

    def note(self, before: Shapes, after: Shapes, told: Any) -> None:
        """Compare a model's shapes before and after its tensors were put in."""
        self.missing, self.unexpected = set(told.missing_keys), set(told.unexpected_keys)
        self.mismatched = [(name, after[name], shape) for name, shape in before.items() if after[name] != shape]
        self.failures = [(name, reason(text)) for name, text in told.conversion_errors.items()]


def reason(text: str) -> str:
    """Why tensors could not be merged, from what transformers noted of it: a traceback and more."""
    return next(iter(after_traceback(text)), text)


@contextmanager
def on_meta(tensors: Mapping[str, Any], seen: Seen) -> Iterator[None]:
    """Let from_pretrained put these tensors onto the meta device without the accelerate package; look at what it did.

    A quantizer turns transformers' own comparison of shapes off; here it is done for every model.
    """
    import torch
    from transformers import PreTrainedModel, modeling_utils

    fill = PreTrainedModel._load_pretrained_model

    def fill_and_compare(model: Any, state_dict: Any, *rest: Any, **named: Any) -> Any:
        before = _shapes(model)
        result = fill(model, dict(tensors), *rest, **named)
        seen.note(before, _shapes(model), result[0])
        return result

    with (
        replaced(modeling_utils, "check_and_set_device_map", lambda device_map: {"": torch.device("meta")}),
        replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(fill_and_compare)),
    ):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while. One that is not there is an error: the package is another than we know."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _shapes(model: Any) -> Shapes:
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _mismatch(told: tuple[str, Any, Any]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    name, stored, wanted = told
    return name, tuple(stored), tuple(wanted)


def _decoded(config: Any) -> dict[str, Any]:
    """gpt-oss's layout is read as it is without a card: decoded. The tensors are the same."""
    import transformers

    said = getattr(config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    return {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}


if __name__ == "__main__":
    answer(load)
