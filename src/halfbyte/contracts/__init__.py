"""The contracts: one function per peer creates them. To add one, write a file in `peers/` and a line in CONTRACTS.

>>> torchao(scaling_mode="rceil")
torchao(scaling_mode='rceil')
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from halfbyte.contracts.peers.compressed_tensors import compressed_tensors
from halfbyte.contracts.peers.flashinfer import flashinfer
from halfbyte.contracts.peers.fouroversix import fouroversix
from halfbyte.contracts.peers.gguf import gguf
from halfbyte.contracts.peers.miles import miles
from halfbyte.contracts.peers.modelopt import modelopt
from halfbyte.contracts.peers.ocp import ocp
from halfbyte.contracts.peers.qwantize import qwantize
from halfbyte.contracts.peers.torchao import torchao
from halfbyte.contracts.peers.transformer_engine import transformer_engine
from halfbyte.contracts.peers.transformers import transformers
from halfbyte.contracts.peers.vllm import vllm
from halfbyte.contracts.spec import Contract, DecodeRule, MXRule, NVFP4Rule
from halfbyte.errors import unknown_name
from halfbyte.formats import BlockFormat

CONTRACTS: dict[str, Callable[..., Contract]] = {
    make.__name__: make
    for make in (
        ocp,
        transformer_engine,
        miles,
        modelopt,
        compressed_tensors,
        torchao,
        fouroversix,
        qwantize,
        flashinfer,
        vllm,
        gguf,
        transformers,
    )
}

DEFAULTS = {True: "transformer_engine", False: "ocp"}
"""The contract used when none is named: for formats with a global scale, and for those without."""

__all__ = [
    "CONTRACTS",
    "DEFAULTS",
    "Contract",
    "DecodeRule",
    "MXRule",
    "NVFP4Rule",
    "compressed_tensors",
    "flashinfer",
    "fouroversix",
    "get_contract",
    "gguf",
    "miles",
    "modelopt",
    "ocp",
    "qwantize",
    "torchao",
    "transformer_engine",
    "transformers",
    "vllm",
]


def get_contract(contract: str | Contract | None, format: BlockFormat) -> Contract:
    """The contract of a name with its default options, a given instance, or the format's default for None."""
    if isinstance(contract, Contract):
        return contract
    name = DEFAULTS[format.has_global] if contract is None else contract
    if not isinstance(name, str) or name not in CONTRACTS:
        raise unknown_name("contract", name, CONTRACTS)
    return _with_defaults(name)


@functools.cache
def _with_defaults(name: str) -> Contract:
    return CONTRACTS[name]()
