"""Schemes of a compressed-tensors config against headers: the whole list of what is said."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.verify.rules.schemes import READERS, scheme_problems
from tests.verify.headers import Headers, compressed, contents, fp8, int4, lines, modelopt, mxfp4

FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MX = FOUR | {"strategy": "group", "group_size": 32}
EIGHT = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT = {"num_bits": 4, "strategy": "group", "group_size": 32}
NV_PACK, MX_PACK, FLOATS, INTS = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized", "pack-quantized"


def group(weights: object, *targets: str, **more: object) -> dict[str, object]:
    return {"weights": weights, "targets": list(targets or ("Linear",)), **more}


def found(headers: Headers, plain: tuple[str, ...] = (), status: object = "compressed", **config: Any) -> list[str]:
    """Without the beginning that all lines on config.json have, and without their end."""
    told = lines(scheme_problems({**config, "quantization_status": status}, contents(headers), plain))
    return [line.removeprefix("error [scheme] config.json: ").removesuffix(f"; {READERS}") for line in told]


@pytest.mark.parametrize(
    ("headers", "scheme", "format"),
    [
        (compressed("a"), FOUR, NV_PACK),
        (mxfp4("a"), MX, MX_PACK),
        (fp8("a"), EIGHT, FLOATS),
        (fp8("a"), EIGHT, "naive-quantized"),
        (fp8("a", scales=(16, 1)), EIGHT | {"strategy": "channel"}, FLOATS),
        (fp8("a", scales=(2, 8)), EIGHT | {"strategy": "channel"}, FLOATS),
        (fp8("a", scales=(1, 8)), EIGHT | {"strategy": "block"}, FLOATS),
        (int4("a", groups=4), INT | {"type": "int", "symmetric": True}, INTS),
        (int4("a", groups=4), INT, INTS),
        (int4("a", groups=1), {"num_bits": 4}, INTS),
        (int4("a", groups=2), INT | {"group_size": 64}, INTS),
        (modelopt("a"), {}, "other"),
    ],
)
def test_right_schemes(headers: Headers, scheme: object, format: str) -> None:
    assert found(headers, format=format, config_groups={"g": group(scheme)}) == []
    assert found(headers, format=format, config_groups={"g": group(scheme, format=format)}) == []


def test_every_wrong_value_is_named() -> None:
    groups = {"g": group(None, "a", format=MX_PACK), "h": group({}, "b", "c"), "i": group({}, "d"), "k": group({}, "e")}
    headers = compressed("b") | compressed("c") | mxfp4("d") | int4("e", groups=4)
    where = "config_groups.{}.{} is {}, but {} by the tensors of {}"
    told = found(headers, format=NV_PACK, config_groups=groups)
    assert told == [
        where.format(*words)
        for words in (
            ("h", "weights.num_bits", 8, 4, "b and 1 more"),
            ("h", "weights.type", "'int'", "'float'", "b and 1 more"),
            ("h", "weights.strategy", None, "'tensor_group'", "b and 1 more"),
            ("h", "weights.group_size", None, 16, "b and 1 more"),
            ("i", "weights.num_bits", 8, 4, "d"),
            ("i", "weights.type", "'int'", "'float'", "d"),
            ("i", "weights.strategy", None, "'group'", "d"),
            ("i", "weights.group_size", None, 32, "d"),
            ("i", "format", f"'{NV_PACK}'", f"'{MX_PACK}'", "d"),
            ("k", "weights.num_bits", 8, 4, "e"),
            ("k", "weights.strategy", None, "'group'", "e"),
            ("k", "weights.group_size", None, 32, "e"),
            ("k", "format", f"'{NV_PACK}'", f"'{INTS}'", "e"),
        )
    ] + [f"format is '{NV_PACK}', but 'mixed-precision' by the tensors"]


def test_defaults_are_those_of_readers() -> None:
    """symmetric and not dynamic, 8 bits, integers."""
    wrong = FOUR | {"symmetric": False, "dynamic": True}
    assert found(compressed("a"), format=NV_PACK, config_groups={"g": group(wrong)}) == [
        "config_groups.g.weights.symmetric is False, but True by the tensors of a",
        "config_groups.g.weights.dynamic is True, but False by the tensors of a",
    ]
    (told,) = found(int4("a"), format=INTS, config_groups={"g": group({"type": "float", "num_bits": 4})})
    assert told == "config_groups.g.weights.type is 'float', but 'int' by the tensors of a"


def test_weights_that_are_stored_alike_are_said_once() -> None:
    headers = compressed("a") | compressed("b") | fp8("c") | fp8("d", scales=(16, 1)) | fp8("e") | compressed("f")
    told = found(headers, format="mixed-precision", config_groups={"g": group(FOUR | {"type": "int"}, format=NV_PACK)})
    assert [line for line in told if ".type" in line] == [
        "config_groups.g.weights.type is 'int', but 'float' by the tensors of a and 2 more",
        "config_groups.g.weights.type is 'int', but 'float' by the tensors of c and 1 more",
        "config_groups.g.weights.type is 'int', but 'float' by the tensors of d",
    ]


MATCHES_NONE = "matches no module of the checkpoint"


def test_targets() -> None:
    groups = {"g": group(FOUR, "a", "gone", "p", "b.re"), "k": group({}, "LlamaAttention"), "h": group(FOUR, "re:x")}
    assert found(compressed("a") | compressed("b"), ("p",), format=NV_PACK, config_groups=groups) == [
        "error [targets] b: stored as nvfp4 (compressed-tensors), but no target of config_groups matches it: "
        "readers take it as plain",
        *(
            f"warning [targets] config.json: config_groups.{name}: target {target!r} {MATCHES_NONE}"
            for name, target in (("g", "gone"), ("g", "b.re"), ("h", "re:x"))
        ),
    ]


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (None, []),
        (FOUR, []),
        (
            {"num_bits": 8, "type": "float"},
            [("num_bits", 8, 4), ("strategy", None, "'tensor_group'"), ("group_size", None, 16)],
        ),
        (FOUR | {"type": "int", "group_size": 17}, [("type", "'int'", "'float'"), ("group_size", 17, 16)]),
        (
            {},
            [
                ("num_bits", None, 4),
                ("type", None, "'float'"),
                ("strategy", None, "'tensor_group'"),
                ("group_size", None, 16),
            ],
        ),
    ],
)
def test_activations(inputs: object, told: list[tuple[str, object, object]]) -> None:
    expected = [
        f"config_groups.g.input_activations.{key} is {said}, but {wanted}: NVFP4 weights go with NVFP4 activations or "
        "with null"
        for key, said, wanted in told
    ]
    config: dict[str, Any] = {"format": NV_PACK, "config_groups": {"g": group(FOUR, input_activations=inputs)}}
    assert found(compressed("a"), **config) == expected
    config = {"format": MX_PACK, "config_groups": {"g": group(MX, input_activations=inputs)}}
    assert found(mxfp4("a"), **config) == []


NOT_PACKED = "quantization_status is {}, but the tensors are packed: transformers builds plain layers for them"


@pytest.mark.parametrize(
    ("format", "formats", "said"),
    [
        ("mixed-precision", (NV_PACK, FLOATS), None),
        (NV_PACK, (NV_PACK, FLOATS), "'mixed-precision'"),
        (None, (NV_PACK, FLOATS), "'mixed-precision'"),
    ],
)
def test_the_format_of_the_whole(format: object, formats: tuple[str, str], said: str | None) -> None:
    groups = {"g": group(FOUR, "a", format=formats[0]), "h": group(EIGHT, "b", format=formats[1])}
    expected = [] if said is None else [f"format is {format!r}, but {said} by the tensors"]
    assert found(compressed("a") | fp8("b"), format=format, config_groups=groups) == expected


@pytest.mark.parametrize(
    ("formats", "format", "clean"),
    [
        ((FLOATS, "naive-quantized"), "mixed-precision", True),
        ((FLOATS, FLOATS), "mixed-precision", False),
        ((FLOATS, FLOATS), "naive-quantized", True),
        ((FLOATS, "naive-quantized"), FLOATS, True),
        ((FLOATS, None), "mixed-precision", False),
    ],
)
def test_groups_of_one_kind_may_be_called_mixed_where_their_formats_differ(
    formats: tuple[str, str | None], format: str, clean: bool
) -> None:
    groups = {"g": group(EIGHT, "a", format=formats[0]), "h": group(EIGHT, "b", format=formats[1])}
    groups["i"] = group(FOUR, "re:(", format=NV_PACK)  # describes nothing: does not count
    told = found(fp8("a") | fp8("b"), format=format, config_groups=groups)
    assert [line for line in told if line.startswith("format")] == (
        [] if clean else [f"format is '{format}', but '{FLOATS}' by the tensors"]
    )


@pytest.mark.parametrize(("status", "said"), [("compressed", None), ("frozen", "'frozen'"), (None, None)])
def test_the_status(status: object, said: str | None) -> None:
    config: dict[str, Any] = {"format": NV_PACK, "config_groups": {"g": group(FOUR)}}
    expected = [NOT_PACKED.format("'frozen'")] if said else []
    if status is None:
        told = lines(scheme_problems(config, contents(compressed("a")), ()))
        assert told == ["error [scheme] config.json: " + NOT_PACKED.format("'initialized'")]
    else:
        assert found(compressed("a"), status=status, **config) == expected


def test_damaged_weights_are_no_reason_to_stop() -> None:
    """Shapes that nothing is known of: other checks speak of them."""
    odd: Headers = {"a.weight_packed": ("I32", (16, 16)), "a.weight_scale": ("BF16", ())}
    config: dict[str, Any] = {"format": INTS, "config_groups": {"g": group({"num_bits": 4})}}
    assert found(odd, **config) == found(odd | {"a.weight_packed": ("I32", (16,))}, **config) == []
    assert found({"a.weight_packed": ("I32", (16, 16))}, **config) == []
    assert found(odd | {"a.weight_scale": ("BF16", (16, 0))}, **config) == []
