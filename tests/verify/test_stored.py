"""Tensors of a checkpoint, each in one place."""

from __future__ import annotations

from tests.verify.headers import Headers, compressed, contents, fp8, modelopt, plain


def test_every_tensor_is_in_one_place() -> None:
    extra: Headers = {
        "s.weight_scale_2": ("F32", ()),
        "s.scale": ("F8_E8M0", (2, 2)),
        "p.scale": ("F32", (2, 2)),
        "p.other": ("F8_E8M0", (2, 2)),
        "k.weight_packed": ("F32", (2,)),
    }
    found = contents(modelopt("a") | compressed("b") | fp8("c") | plain("d") | extra)
    assert {name: weight.storage.name for name, weight in found.quantized.items()} == {
        "a": "nvfp4 (modelopt)",
        "b": "nvfp4 (compressed-tensors)",
        "c": "fp8 (weight_scale)",
    }
    assert list(found.plain) == ["d.weight", "p.scale", "p.other"]
    assert list(found.stray) == ["s.weight_scale_2", "s.scale", "k.weight_packed"]
    assert found.unreadable == {}


def test_damaged_weights_are_set_aside() -> None:
    """By the name of the weight or of one of its tensors."""
    whole = contents(modelopt("a") | modelopt("b") | modelopt("c") | plain("d"))
    found = whole.without({"a", "b.weight_scale", "d.weight", "c.input_scale"})
    assert (list(found.quantized), list(found.unreadable)) == (["c"], ["a", "b"])
    assert (found.plain, found.stray) == (whole.plain, whole.stray)
