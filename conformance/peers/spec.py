"""What a driver is: a peer, a list of what the peer offers, and a function that runs it.

A driver runs the real package. Its only arithmetic is to pack values that a peer returns unpacked; with more, it would
test itself. Peers are imported at the first run, so that it costs nothing to list their offers.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Config = Mapping[str, Any]

Operands = Literal["input", "activations", "mx", "codes", "blocks", "floats"]
"""The inputs of a case: an operand, an operand with activations, MXFP4 codes and scales, or the input of a decoder."""

LOW_FIRST = "low nibble = even index"
FLOATS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Offer:
    """One thing that a peer can do: a format and a config, with the operands it takes."""

    format: str
    config: Config
    conventions: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = FLOATS
    multiple: int = 16
    """The last axis is a multiple of this (1: any width)."""
    rows: int = 1
    """The rows are a multiple of this."""
    stacked: bool = False
    """Whether it takes operands with three axes."""
    operands: Operands = "input"
    slow: bool = False
    """Whether it runs in Triton's interpreter or searches in Python. Then operands must be small."""

    @property
    def label(self) -> str:
        """A short name for file names and test ids."""
        return "-".join([self.format, *(_word(key, value) for key, value in self.config.items() if key != "info")])


@dataclass(frozen=True)
class Peer:
    """A live peer: its offers and its driver."""

    name: str
    distribution: str
    """Name of the installed package, for its version."""
    offers: tuple[Offer, ...]
    run: Callable[[Arrays, str, Config], Arrays]
    """The peer's results for (operands, format, config), with the names and shapes of the golden vectors."""
    unstable: Callable[[Arrays, str, Config], tuple[str, ...]] = lambda operands, format, config: ()
    """The names of results that come from a NaN in a way that the peer does not define."""

    @property
    def version(self) -> str:
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"


def _word(key: str, value: object) -> str:
    """One option as a word: the key for True, "no_" and the key for False, else key and value."""
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    if isinstance(value, list | tuple):
        return f"{key}_{'x'.join(map(str, value))}"
    if key in ("mode", "scaling_mode"):
        return str(value).split(" (")[0].replace("/", "_").replace(" ", "_")
    return f"{key}_{value}".replace(" ", "_")


@contextmanager
def quiet() -> Iterator[None]:
    """Import or call a peer without its warnings: the test suite turns warnings into errors, but only our own count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack two codes per byte, the even one in the low nibble, for peers that return values instead of codes."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def codes_of(values: Array) -> npt.NDArray[np.uint8]:
    """E2M1 codes of values on its grid. -0.0 is code 8. NaN, which only comes from 0/0·sign, is code 0."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    magnitude = np.searchsorted(grid, np.nan_to_num(np.abs(values)))
    return (magnitude | np.where(np.signbit(values) & ~np.isnan(values), 8, 0)).astype(np.uint8)
