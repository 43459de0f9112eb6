"""The published order of methods on a layer of MiniLM with real activations. `make test-real`.

Mean squared error of the output on text that the statistics were not taken from would need more text than there is
here: this is the error on the calibrated sentences, as published.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from examples import minilm
from examples.bert import WordPiece
from examples.sentences import SENTENCES
from tests.feedback.problems import Layer
from tests.feedback.textbook import textbook
from tests.real.check_real import load

LAYERS = ("encoder.layer.1.intermediate.dense", "encoder.layer.3.output.dense", "encoder.layer.2.attention.self.query")


@pytest.fixture(scope="module")
def layers() -> dict[str, Layer]:
    minilm.fetch()
    model = load(minilm.SOURCE, "BertModel").float()
    tokenizer = WordPiece(minilm.SOURCE / "vocab.txt")
    modules = dict(model.named_modules())
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in LAYERS}

    def note(name: str) -> Any:
        def hook(module: Any, given: tuple[torch.Tensor, ...]) -> None:
            seen[name].append(given[0].detach().flatten(0, -2))

        return hook

    handles = [modules[name].register_forward_pre_hook(note(name)) for name in LAYERS]
    for sentence in SENTENCES:
        with torch.no_grad():
            model(torch.tensor([tokenizer.encode(sentence)]))
    for handle in handles:
        handle.remove()
    found = {}
    for name in LAYERS:
        x = torch.cat(seen[name]).numpy()
        found[name] = Layer(modules[name].weight.detach().numpy(), x, x)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_the_published_order_of_methods(layers: dict[str, Layer], name: str) -> None:
    """naive > optimal > hessian > gptq > gptq with Hessian scales > blocks in order."""
    given = layers[name]
    h, amax = given.second_moment, float(np.abs(given.weight).max())
    blocks = hb.Hessian(hb.hessian_from_activations(given.inputs))

    def naive(part: Any, number: int) -> Any:
        return hb.quantize(part.astype(np.float32), "nvfp4", global_amax=amax)

    def error(q: Any) -> float:
        return given.output_error(hb.dequantize(q))

    found = {
        "naive": error(hb.quantize(given.weight, "nvfp4")),
        "optimal": error(hb.quantize(given.weight, "nvfp4", method="optimal")),
        "hessian": error(hb.quantize(given.weight, "nvfp4", method=blocks)),
        "gptq": given.output_error(textbook(given.weight, h, naive).astype(np.float32)),
        "gptq + hessian": error(hb.gptq(given.weight, h, "nvfp4", order="given")),
        "ordered gptq + hessian": error(hb.gptq(given.weight, h, "nvfp4")),
    }
    print(name, {key: f"{value:.5f}" for key, value in found.items()})
    assert list(found) == sorted(found, key=lambda key: -found[key])
