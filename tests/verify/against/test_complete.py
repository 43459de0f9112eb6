"""What is lost, and what was invented, from the names of both sides."""

from __future__ import annotations

from typing import Any

from halfbyte.verify.against.complete import cache_scales, completeness, split_biases
from halfbyte.verify.rules.structure import structure_problems
from halfbyte.verify.stored import read_contents
from halfbyte.verify.values import matrices
from tests.verify.headers import Headers, checkpoint, fp8, lines, modelopt, plain

ABSENT = "but not in the checkpoint"
NEW = "but the source has no such"


def found(ours: Headers, theirs: Headers, **quantization: Any) -> list[str]:
    mine, source = checkpoint(ours, {"quantization_config": quantization}), checkpoint(theirs)
    contents, before = read_contents(mine), read_contents(source)
    contents = contents.without({problem.name for problem in structure_problems(contents)})
    unread = list(contents.unreadable.values())
    biases = split_biases(mine, source)
    return lines(completeness(mine, matrices(mine, contents), unread, source, matrices(source, before), biases))


def test_weights_that_are_lost_or_new() -> None:
    ours = modelopt("a") | plain("b") | modelopt("new") | plain("n")
    theirs = plain("a") | fp8("b") | plain("lost", 4, 8) | {"x": ("F32", (3,)), "b.input_scale": ("F32", ())}
    assert found(ours, theirs) == [
        f"error [lost] lost: in the source (bf16 [4, 8]), {ABSENT}",
        f"error [lost] x: in the source (F32 [3]), {ABSENT}",
        f"error [no-source] new: nvfp4 (modelopt) [16, 128], {NEW} weight",
        f"error [no-source] n: bf16 [16, 128], {NEW} weight",
    ]
    assert found(plain("a") | {"y": ("F32", (2, 2))}, plain("a")) == [f"error [no-source] y: F32 [2, 2], {NEW} tensor"]


def test_unreadable_weights_count_as_there() -> None:
    """Its name and its tensors; for a stack, the modules of all its experts."""
    short = modelopt("a")
    del short["a.weight_scale"]
    assert found(short | modelopt("b"), plain("a") | plain("b")) == []
    down = "l.experts.down_proj"
    stack: Headers = {down: ("U8", (2, 16, 4)), f"{down}_weight_scale": ("F8_E4M3", (2, 2, 4))}
    alone = plain("l.experts.0.down_proj", 4, 32) | plain("l.experts.1.down_proj", 4, 32)
    assert found(stack, alone) == []
    assert found(stack, alone | plain("l.expertsx")) == [
        f"error [lost] l.expertsx: in the source (bf16 [16, 128]), {ABSENT}"
    ]


def cache(part: str, form: str) -> Headers:
    return {f"l.self_attn.{form.format(part)}": ("F32", ())}


def test_scales_of_the_cache_may_move() -> None:
    """Any form stands for any other; without a scheme that asks for them, they may go."""
    on_module, on_projection = "{0}_scale", "{0}_proj.{0}_scale"
    theirs = plain("a") | cache("k", on_projection) | cache("v", on_projection)
    asked = {"kv_cache_quant_algo": "FP8"}
    assert found(plain("a"), theirs) == []
    lost = f"error [lost] l.self_attn.v_proj.v_scale: in the source (F32 []), {ABSENT}"
    assert found(plain("a") | cache("k", on_module), theirs, **asked) == [lost]
    assert found(plain("a") | cache("k", on_module), theirs) == []
    assert found(theirs | cache("k", on_module), theirs) == []
    new = f"error [no-source] l.self_attn.v_scale: F32 [], {NEW} tensor"
    assert found(plain("a") | cache("v", on_module), plain("a") | cache("k", on_module), **asked) == [
        f"error [lost] l.self_attn.k_scale: in the source (F32 []), {ABSENT}",
        new,
    ]
    made = checkpoint(theirs)
    assert {str(scale): tensor.name for scale, tensor in cache_scales(made).items()} == {
        f"CacheScale(attention='l.self_attn', part='{part}')": f"l.self_attn.{part}_proj.{part}_scale" for part in "kv"
    }


def test_biases_of_experts() -> None:
    """More experts than elements of each."""
    stack = "l.experts.gate_up_proj"
    theirs: Headers = {
        f"{stack}_bias": ("BF16", (4, 2)),
        "l.experts.down_proj_bias": ("BF16", (4,)),
        "l.experts_bias": ("BF16", (4, 2)),
        "l.experts.down_proj.bias": ("BF16", (4, 2)),
    }
    leaves = {"gate_proj": slice(0, 1, 1), "up_proj": slice(1, 2, 1)}
    parts: Headers = {f"l.experts.{expert}.{leaf}.bias": ("BF16", (1,)) for expert in range(4) for leaf in leaves}
    mine, source = checkpoint(parts), checkpoint(theirs)
    assert split_biases(mine, source) == {
        f"l.experts.{expert}.{leaf}.bias": (f"{stack}_bias", expert, part)
        for expert in range(4)
        for leaf, part in leaves.items()
    }
    assert split_biases(source, source) == {}
    assert found(parts, {f"{stack}_bias": theirs[f"{stack}_bias"]}) == []
    assert found({"n": ("F32", (1,))}, {f"{stack}_bias": ("BF16", (4, 2)), "n": ("F32", (1,))}) == [
        f"error [lost] {stack}_bias: in the source (BF16 [4, 2]), {ABSENT}"
    ]
