"""Scales of a quantized cache of keys and values, and what the config says of that cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.layouts.description import Claim, Json
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents

CACHE_SCALE = re.compile(r"\.(k_proj\.k_scale|v_proj\.v_scale|[kv]_scale|k_proj\.output_scale|v_proj\.output_scale)$")
"""One scale per layer: Model-Optimizer puts it into the projection, compressed-tensors beside it."""


def cache_problems(config: Json, contents: Contents, claim: Claim) -> Iterator[Problem]:
    """A scheme that servers do not know; scales that no scheme asks for."""
    scheme = config.get("kv_cache_scheme")
    if claim.layout == "compressed-tensors" and isinstance(scheme, dict):
        said = scheme.get("num_bits"), scheme.get("type")
        if said != (8, "float"):
            text = f"kv_cache_scheme is {said[0]!r} bits of type {said[1]!r}: vLLM knows 8 bits of float only and stops"
            yield Problem("error", "cache", "config.json", text)
    scales = [name for name in contents.plain if CACHE_SCALE.search(name)]
    if scales and claim.layout is not None and not scheme and not config.get("kv_cache_quant_algo"):
        text = f"{len(scales)} scales of a cache, but the config has no kv_cache_scheme: the cache stays unquantized"
        yield Problem("warning", "cache", scales[0], text)
