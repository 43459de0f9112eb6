"""Live peers: the packages that run here, driven on CPU. To add one: a module with a PEER, and a name in LIVE."""

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
"""Peers whose code is not on a package index in a form that runs here; their golden vectors stand for them."""

__all__ = ["GOLDEN_ONLY", "LIVE", "Offer", "Peer", "get_peer"]


def get_peer(name: str) -> Peer:
    """The driver of a live peer. The package itself is imported when it is first run."""
    if name not in LIVE:
        raise KeyError(f"no driver for {name!r}; live: {', '.join(LIVE)}; golden only: {', '.join(GOLDEN_ONLY)}")
    return cast(Peer, importlib.import_module(f"conformance.peers.{name}").PEER)
