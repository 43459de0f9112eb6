"""Scales of a quantized cache of keys and values, and what the config says of that cache."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.layouts.description import Claim, Json
from halfbyte.layouts.kv_cache import cache_scale
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.stored import Contents


def cache_problems(config: Json, contents: Contents, claim: Claim) -> Iterator[Problem]:
    """A scheme that servers do not know; scales that no scheme asks for."""
    scheme = config.get("kv_cache_scheme")
    if claim.layout == "compressed-tensors" and isinstance(scheme, dict):
        said = scheme.get("num_bits"), scheme.get("type")
        if said != (8, "float"):
            text = f"kv_cache_scheme is {said[0]!r} bits of type {said[1]!r}: vLLM knows 8 bits of float only and stops"
            yield Problem("error", "cache", "config.json", text)
    scales = [name for name in contents.plain if cache_scale(name) is not None]
    if scales and claim.layout is not None and not scheme and not config.get("kv_cache_quant_algo"):
        count = number(len(scales), "scale")
        text = f"{count} of a cache, but the config has no kv_cache_scheme: the cache stays unquantized"
        yield Problem("warning", "cache", scales[0], text)
