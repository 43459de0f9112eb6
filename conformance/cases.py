"""Cases from live peers: draw the operands of an offer, run the peer, and store both as a `halfbyte.conform.Case`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.inputs import make
from conformance.peers.spec import Arrays, Offer, Peer
from halfbyte.conform import Case


@dataclass(frozen=True)
class Recipe:
    """How the operand of a case is drawn."""

    distribution: str
    shape: tuple[int, ...]
    dtype: str
    seed: int

    @property
    def label(self) -> str:
        return f"{self.distribution}_{self.dtype}_{'x'.join(map(str, self.shape))}_s{self.seed}"

    def as_json(self) -> dict[str, Any]:
        return {
            "distribution": self.distribution,
            "dtype": self.dtype,
            "seed": self.seed,
            "shape": list(self.shape),
        }


def draw(offer: Offer, recipe: Recipe) -> Arrays:
    """The operands that an offer takes. Operands that are not floats ignore the recipe's distribution and dtype."""
    rng = np.random.default_rng([zlib.crc32(offer.label.encode()), recipe.seed])
    rows, width = recipe.shape[-2], recipe.shape[-1]
    match offer.operands:
        case "input":
            return {"input": make(recipe.distribution, recipe.shape, recipe.dtype, recipe.seed)}
        case "activations":
            tokens = int(offer.config["tokens"])
            return {
                "input": make(recipe.distribution, recipe.shape, recipe.dtype, recipe.seed),
                "activations": make(offer.config["act_dist"], (tokens, width), "fp32", recipe.seed + 1),
            }
        case "mx":
            # Exponents within the range that the closed-form cast keeps exact, or beyond it; a few zero blocks.
            spread = int(rng.choice([0, 9, 17, 27]))
            scales = rng.integers(110, 111 + spread, (rows, width // 32)).astype(np.uint8)
            scales[rng.random(scales.shape) < 0.05] = 0
            return {"mx_codes": rng.integers(0, 256, (rows, width // 2)).astype(np.uint8), "mx_scales": scales}
        case "codes":
            shape = (2, rows, width // 32)
            # The stable middle of the exponent range, or all of it.
            low, high = ((100, 140), (0, 256))[recipe.seed % 2]
            return {
                "codes": rng.integers(0, 256, (*shape, 16)).astype(np.uint8),
                "scales": rng.integers(low, high, shape).astype(np.uint8),
            }
        case "blocks":
            return {"blocks": rng.integers(0, 256, (rows, -(-width // 64) * 36)).astype(np.uint8)}
        case "floats":
            return {"input": make(recipe.distribution, (rows * width,), "fp32", recipe.seed)}


def make_case(peer: Peer, offer: Offer, recipe: Recipe) -> Case:
    """Run the peer on a new operand. The peer's result becomes the expected result of the case."""
    operands = draw(offer, recipe)
    config = dict(offer.config)
    if str(config.get("mode")).endswith("lossless"):
        # This cast is given the largest exponent of all blocks that are not zero, so that tensors may share it.
        config["k_max"] = int(operands["mx_scales"].max() or 127) - 127
    results = peer.run(operands, offer.format, config)
    return Case(
        name=f"{peer.name}/{offer.label}_{recipe.label}",
        peer=peer.name,
        format=offer.format,
        config=config,
        tensors=operands | results,
        unstable=tuple(name for name in peer.unstable(operands, offer.format, config) if name in results),
        conventions=dict(offer.conventions),
    )


def shapes(offer: Offer) -> tuple[tuple[int, ...], ...]:
    """Operand shapes for an offer: whole blocks, one row, and ragged widths and stacks if the offer takes them."""
    width = max(offer.multiple, 16)
    if offer.slow:
        return ((2, 2 * width), (1, 3 * width))
    if offer.config.get("swizzled"):
        return ((130, 5 * width), (3, 7 * width))
    if offer.rows > 1:
        found: tuple[tuple[int, ...], ...] = ((2 * offer.rows, 64), (offer.rows, 40), (3 * offer.rows, 16))
    elif offer.multiple == 1:
        found = ((32, 64), (30, 40), (17, 16), (1, 48), (33, 50))
    else:
        found = ((16, 6 * width), (8, 4 * width), (1, width), (37, 3 * width))
    return (*found, (2, 16, 4 * width)) if offer.stacked else found
