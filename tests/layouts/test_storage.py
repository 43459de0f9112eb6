"""The tables of the layouts: a weight that is written by one is found by it again, and by no other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.description import Activations, LogicalWeight, Storage
from halfbyte.layouts.storage import (
    all_storages,
    companion_suffixes,
    find_stored,
    known_methods,
    read_config,
    unneeded_suffixes,
)


@dataclass(frozen=True)
class Header:
    """A tensor without data."""

    name: str
    dtype: str
    shape: tuple[int, ...]


STORAGES = {storage.name: storage for storage in all_storages()}


def tensors_of(storage: Storage, activations: Activations = "none") -> dict[str, Header]:
    """The tensors of one weight as the table has them; a scale of which several shapes are possible is one per row."""
    module = "model.layers.0.mlp.experts.down_proj" if storage.stacked else "model.layers.0.mlp.down_proj"
    weight = LogicalWeight(module, 64, 128, 4 if storage.stacked else 0)
    found = {part.name: Header(part.name, part.dtype, part.shape) for part in storage.written(weight, activations)}
    if callable(storage.rules["scales"].shape):
        name = module + storage.rules["scales"].suffix
        found[name] = Header(name, found[name].dtype, (64, 1))
    return found


@pytest.mark.parametrize("activations", ["none", "static"])
@pytest.mark.parametrize("name", STORAGES)
def test_a_weight_is_found_by_its_own_table(name: str, activations: Activations) -> None:
    storage = STORAGES[name]
    tensors = tensors_of(storage, activations)
    (weight,) = find_stored(tensors)
    assert weight.storage is storage
    assert {part.name for part in weight.parts.values()} == set(tensors)
    assert weight.missing == []
    assert storage.sizes(weight.codes.shape) == (4 if storage.stacked else 0, 64, 128)


@pytest.mark.parametrize("name", [name for name in STORAGES if STORAGES[name].has_tensor_scale])
def test_a_weight_without_a_scalar_is_still_found(name: str) -> None:
    """A missing tensor is then told by name, and not taken for another form."""
    storage = STORAGES[name]
    tensors = tensors_of(storage)
    missing = next(
        header for header in tensors.values() if header.name.endswith(storage.rules[storage.global_role].suffix)
    )
    del tensors[missing.name]
    (weight,) = find_stored(tensors)
    assert (weight.storage, weight.missing) == (storage, [missing.name])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("nvfp4 (modelopt)", (64, 60)),
        ("nvfp4 (modelopt)", (64, 4, 16)),
        ("mxfp4 (gpt-oss)", (4, 64, 4, 8)),
        ("nvfp4 stack (modelopt)", (4, 60, 64)),
    ],
)
def test_codes_of_a_shape_that_no_weight_has(name: str, shape: tuple[int, ...]) -> None:
    assert STORAGES[name].sizes(shape) is None


def test_shapes_in_words() -> None:
    stack, oss = STORAGES["nvfp4 stack (modelopt)"], STORAGES["mxfp4 (gpt-oss)"]
    assert stack.describe(stack.codes) == "[experts, in/2, out]"
    assert oss.describe(oss.codes) == "[experts, out, in/32, 16]"
    assert oss.describe(oss.rules["scales"]) == "[experts, out, in/32]"


def test_suffixes_that_come_from_the_tables() -> None:
    assert {".weight_scale", ".weight_scale_2", "_blocks", "_scales", ".weight_packed"} <= set(companion_suffixes())
    assert not {"", ".weight", ".scale"} & set(companion_suffixes())
    assert {".input_scale", "_input_scale", ".input_global_scale", ".weight_shape"} == set(unneeded_suffixes())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_knows_the_config_that_it_writes(name: str) -> None:
    layout = LAYOUTS[name]
    assert layout.quant_method in known_methods()
    for storage in layout.storages:
        assert storage.format in layout.formats


def test_configs_that_say_nothing() -> None:
    assert read_config({}).layout is None
    assert read_config({"quant_method": "gptq"}).layout == "gptq"
    assert read_config({"quant_method": "fp8"}).layout == "fp8"
    assert read_config({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}).layout == "modelopt"
