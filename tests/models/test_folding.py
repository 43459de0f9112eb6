"""Where factors can be folded: with powers of two, transformers' own models give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conformance.peers.spec import quiet
from halfbyte.errors import UnsupportedError
from halfbyte.models.folding import KINDS, Fold, folds
from halfbyte.smoothing import Link, Smoothing, powers

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "no_rope_layers": [1, 0],
}
"""Of every model; a config takes what it knows."""


def tiny(model_type: str) -> Any:
    """A model of that type with random weights, norms and biases too."""
    with quiet():
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(model_type, **SIZES)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def random_smoothing(places: list[Fold], width: dict[str, int]) -> Smoothing:
    rng = np.random.default_rng(0)
    return Smoothing(
        tuple(
            Link(
                fold.origin,
                fold.into,
                fold.is_norm,
                rng.integers(-3, 4, width[fold.into[0]] // fold.repeats).astype(np.int8),
                fold.repeats,
                fold.head,
            )
            for fold in places
        )
    )


@pytest.mark.parametrize("model_type", KINDS)
def test_logits_keep_their_bits(model_type: str) -> None:
    model = tiny(model_type)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    linears = {name: found for name, found in model.named_modules() if isinstance(found, torch.nn.Linear)}
    places = list(folds(model.config.to_dict(), linears))
    kinds = {fold.kind for fold in places}
    assert kinds == set(KINDS[model_type])
    assert len(places) == 2 * len(kinds)
    smoothing = random_smoothing(places, {name: found.in_features for name, found in linears.items()})
    with torch.no_grad():
        before = model(tokens).logits
        for name, exponents in smoothing.columns.items():
            linears[name].weight.mul_(torch.from_numpy(powers(exponents)))
        for name, exponents in smoothing.rows.items():
            linears[name].weight.div_(torch.from_numpy(powers(exponents))[:, None])
        parameters = dict(model.named_parameters())
        for name, exponents in smoothing.vectors.items():
            if name in parameters:
                parameters[name].div_(torch.from_numpy(powers(exponents)))
        after = model(tokens).logits
    assert torch.equal(before, after)
    assert before.std() > 0.01


def test_grouped_queries_share_factors() -> None:
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    found = [fold for fold in folds(config, names) if fold.kind == "values"]
    assert [(fold.repeats, fold.head) for fold in found] == [(3, 8)]


def test_places_with_a_weight_that_is_not_there_are_left_out() -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 32}
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert [fold.kind for fold in folds(config, names)] == ["up"]


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not known of the model type 'gpt_neox'"):
        list(folds({"model_type": "gpt_neox"}, []))
