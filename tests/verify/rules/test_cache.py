"""Scales of a cache and what the config says of it."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.layouts.description import Claim
from halfbyte.verify.rules.cache import cache_problems
from tests.verify.headers import Headers, contents, lines

SCALES: Headers = {f"l.self_attn.{part}_scale": ("F32", (1,)) for part in "kv"}
FLOAT8 = {"num_bits": 8, "type": "float"}
NO_SCHEME = (
    "warning [cache] l.self_attn.k_scale: {} of a cache, but the config has no kv_cache_scheme: the cache stays "
)


def found(headers: Headers, layout: str | None, **config: Any) -> list[str]:
    return lines(cache_problems(config, contents(headers), Claim(layout, False)))


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (FLOAT8, None),
        (None, None),
        ("FP8", None),
        (FLOAT8 | {"num_bits": 4}, "4 bits of type 'float'"),
        (FLOAT8 | {"type": "int"}, "8 bits of type 'int'"),
        ({"strategy": "tensor"}, "None bits of type None"),
    ],
)
def test_schemes_that_servers_know(scheme: object, said: str | None) -> None:
    text = f"error [cache] config.json: kv_cache_scheme is {said}: vLLM knows 8 bits of float only and stops"
    assert found({}, "compressed-tensors", kv_cache_scheme=scheme) == ([] if said is None else [text])
    assert found({}, "modelopt", kv_cache_scheme=scheme) == []


def test_scales_without_a_scheme() -> None:
    told = [NO_SCHEME.format("2 scales") + "unquantized"]
    assert (
        found(SCALES, "modelopt") == found(SCALES, "modelopt", kv_cache_scheme=None, kv_cache_quant_algo=None) == told
    )
    assert found({"l.self_attn.k_scale": ("F32", (1,))}, "modelopt") == [NO_SCHEME.format("1 scale") + "unquantized"]
    assert found(SCALES, None) == found({"l.weight": ("BF16", (4, 4))}, "modelopt") == []
    assert found(SCALES, "modelopt", kv_cache_scheme=FLOAT8) == []
    assert found(SCALES, "modelopt", kv_cache_quant_algo="FP8") == []
