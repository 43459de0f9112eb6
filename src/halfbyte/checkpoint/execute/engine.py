"""The numbers of a conversion: amax, codes and scales of chunks, on the CPU. No files here.

Chunks of one matrix are quantized with the amax of the whole (and of all that share its scale), so that where a matrix
is cut changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.amax import largest_magnitude
from halfbyte.backends.encoding import Encoder, encoder_of
from halfbyte.backends.headroom import (
    ALONE,
    DEFAULT,
    Total,
    Trial,
    by_squared_error,
    candidate,
    chooser,
    headrooms,
    probe,
)
from halfbyte.backends.survey import Between, survey_part
from halfbyte.checkpoint.execute.hashes import LEAF
from halfbyte.checkpoint.execute.repair import usable_amax
from halfbyte.codec.bits import U8, dtype_name
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.errors import UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.methods import Amax, Method
from halfbyte.quantize import quantize
from halfbyte.request import Request, resolve
from halfbyte.types import QuantizedTensor


@dataclass(frozen=True)
class TensorScales:
    """The tensor scale in both directions: layouts store one or the other."""

    multiplier: np.float32
    divisor: np.float32


class Engine:
    """Computes chunks under one contract and method. Safe to use from several threads."""

    def __init__(
        self,
        format: BlockFormat | None,
        contract: Contract | None,
        method: str | Method | None,
        repairs: bool,
    ) -> None:
        self.format, self.contract, self.method, self.repairs = format, contract, method, repairs
        self._encoders: dict[np.dtype[Any], Encoder | None] = {}
        self._requests: dict[np.dtype[Any], Request] = {}
        self._resolved: Method = Amax()
        """The method as an instance; a name stands for one with its default options."""
        if format is not None and contract is not None:
            self._resolved = resolve(format, contract, method).method

    def amax(self, x: npt.NDArray[Any]) -> np.float32:
        """Largest magnitude of a chunk; NaN if there is one."""
        return largest_magnitude(x, threads=1)

    def widths(self, columns: int) -> tuple[int, int]:
        """Bytes of codes and of scales per row of that many elements."""
        if self.format is None:
            raise UnsupportedError("this conversion decodes; it has no format to quantize to")
        return columns // self.format.codes_per_byte, columns // self.format.block

    def usable_amax(self, amax: np.float32, module: str) -> np.float32:
        """The amax to quantize with, or an error for one that has no scale."""
        return usable_amax(amax, module, self.repairs)

    def headrooms(self, size: int) -> tuple[float, ...]:
        """By how much the amax of so many elements that share a scale may be raised; (1,) if it stays."""
        if self.format is None or self.contract is None:
            return ALONE
        return headrooms(self.choosing(np.float32), size)

    def usual_headrooms(self) -> tuple[float, ...]:
        """All that a method whose headroom is not fixed may choose."""
        if self.format is None or self.contract is None:
            return ALONE
        return headrooms(by_squared_error(self._request(np.float32), None), 0)

    def probe(self, size: int) -> Trial | None:
        """What has to be tried on a sample first, to know whether there are further candidates."""
        if self.format is None or self.contract is None:
            return None
        return probe(self.choosing(np.float32), size)

    def survey(self, x: npt.NDArray[Any], amax: np.float32, trial: Trial, before: int = 0) -> tuple[Total, ...]:
        """What each candidate costs on a chunk: sums that are added over all that share the amax.

        before: rows of its tensor before the chunk, which a sample depends on.
        """
        return survey_part(x, self.choosing(x.dtype), amax, trial, before)

    def between(self, amax: np.float32, candidates: tuple[float, ...], dtype: npt.DTypeLike) -> Between | None:
        """The choice for chunks that are seen once, if there is nothing to choose but 1 or 2."""
        return Between(self.choosing(dtype), amax) if candidates == DEFAULT else None

    def take_in(self, between: Between, x: npt.NDArray[Any]) -> None:
        """Add a chunk to such a choice."""
        between.add(x, self.choosing(x.dtype))

    def choosing(self, dtype: npt.DTypeLike) -> Request:
        """What chooses the headroom of matrices of a dtype."""
        return chooser(self._request(dtype))

    def _request(self, dtype: npt.DTypeLike) -> Request:
        """What is asked for of matrices of a dtype. Found once: every tensor asks several times."""
        if self.format is None or self.contract is None:
            raise UnsupportedError("this conversion decodes; it has no tensor scale")
        key = np.dtype(dtype)
        found = self._requests.get(key)
        if found is None:
            found = resolve(self.format, self.contract, self.method, dtype=dtype_name(key), threads=1)
            self._requests[key] = found
        return found

    def usable_headrooms(
        self, amax: np.float32, candidates: tuple[float, ...], dtype: npt.DTypeLike
    ) -> tuple[bool, ...]:
        """Whether each candidate gives a usable scale; `dtype`: of the weight. 1 counts whatever it gives."""
        amaxes = np.full(len(candidates), amax, np.float32)
        usable = candidate(amaxes, np.array(candidates), self.choosing(dtype)).usable.tolist()
        return tuple(h == 1 or found for h, found in zip(candidates, usable, strict=True))

    def quantize(self, x: npt.NDArray[Any], amax: np.float32 | None, codes: U8, scales: U8) -> None:
        """Codes and scales of a chunk of rows, into the given arrays."""
        if self.format is None or self.contract is None:
            raise UnsupportedError("this conversion decodes; it has no format to quantize to")
        out = QuantizedTensor(self.format, x.shape, codes, scales, None, None, self.contract)
        quantize(x, self.format, self.contract, self.method, global_amax=amax, threads=1, out=out)

    def encoder(self, dtype: np.dtype[Any]) -> Encoder | None:
        """What quantizes matrices of a dtype, hashes and writes them in one call; None if nothing does."""
        if dtype not in self._encoders:
            found = None
            if self.format is not None and self.contract is not None:
                found = encoder_of(self._request(dtype), LEAF)
            self._encoders[dtype] = found
        return self._encoders[dtype]

    def tensor_scales(self, amax: np.float32, dtype: npt.DTypeLike) -> TensorScales:
        """The scalars that a contract stores for an amax; `dtype`: of the weight, which some formulas ask for."""
        if self.format is None or self.contract is None:
            raise UnsupportedError("this conversion decodes; it has no tensor scale")
        rule = self.contract.rule(self.format)
        if not isinstance(rule, NVFP4Rule) or rule.stored is None:
            raise UnsupportedError(f"{self.contract} stores no tensor scale")
        rule = rule.for_method(self._resolved)
        with np.errstate(all="ignore"):
            t = tensor_scale(np.array([amax], np.float32), rule, self._resolved, dtype_name(np.dtype(dtype)))
            stored, (multiplier,) = stored_scale(rule, t)
        if rule.stored_as == "encode factor" and stored is not None:
            return TensorScales(multiplier, stored[0])
        with np.errstate(
            over="ignore", divide="ignore"
        ):  # an all-zero tensor under a contract that stores next to nothing
            return TensorScales(multiplier, np.float32(1) / multiplier)
