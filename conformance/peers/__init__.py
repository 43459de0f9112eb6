"""Live peers: packages that run on the CPU. To add one, write a module with a PEER and add its name to LIVE."""

from __future__ import annotations

import importlib
from typing import cast

from conformance.peers.spec import Offer, Peer

LIVE = (
    "compressed_tensors",
    "gguf",
    "modelopt",
    "qwantize",
    "torchao",
    "transformer_engine",
    "transformers",
)
GOLDEN_ONLY = ("flashinfer", "fouroversix", "miles", "vllm")
"""Peers without a package that runs on the CPU; only their golden vectors are used."""

__all__ = ["GOLDEN_ONLY", "LIVE", "Offer", "Peer", "get_peer"]


def get_peer(name: str) -> Peer:
    """The driver of a live peer. The package itself is imported at the first run."""
    if name not in LIVE:
        raise KeyError(f"no driver for {name!r}; live: {', '.join(LIVE)}; golden only: {', '.join(GOLDEN_ONLY)}")
    return cast(Peer, importlib.import_module(f"conformance.peers.{name}").PEER)
