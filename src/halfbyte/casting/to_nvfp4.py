"""MXFP4 to NVFP4: the four algorithms, each writing rows that share one global scale and measuring what it wrote."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from halfbyte.arrays import Array, to_numpy
from halfbyte.backends.blocks import host_backend
from halfbyte.casting import closed_form, hybrid, optimal, verbatim
from halfbyte.casting.measure import compare, decodes_kept, exact_tally, has_negative_zero, reads_zeros_alike
from halfbyte.casting.report import CastReport, Tally, add, describe
from halfbyte.casting.rows import Rows
from halfbyte.casting.scales import NVFP4, GlobalScale, power, scale_of
from halfbyte.casting.survey import Survey, survey_of
from halfbyte.casting.window import NO_BLOCKS, Exponents, join
from halfbyte.codec.bits import U8
from halfbyte.contracts import Contract
from halfbyte.contracts.peers.modelopt_cast import largest_exponent
from halfbyte.methods import Amax
from halfbyte.quantize import dequantize, quantize
from halfbyte.types import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Member:
    """Some rows of one source tensor, as a tensor and as bytes."""

    tensor: QuantizedTensor
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Sharers:
    """Rows that share one global scale, and what is asked of them more than once."""

    members: tuple[Member, ...]

    @functools.cached_property
    def exponents(self) -> Exponents | None:
        return join(member.rows.exponents for member in self.members)

    @functools.cached_property
    def survey(self) -> Survey:
        return survey_of(member.rows for member in self.members)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Rows that share a global scale, written."""

    scale: GlobalScale
    parts: tuple[tuple[U8, U8], ...]
    """Codes and scales of each member."""
    tally: Tally
    bound: float | None = None
    """What no choice can be better than, where that is known; nothing is better than lossless."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the caller asked for."""

    algorithm: str
    placement: str
    contract: Contract
    """Of the result."""
    quantizer: Contract
    """The contract that algorithm 1 quantizes with."""
    backend: str
    threads: int | None
    out: tuple[U8, U8] | None = None
    """Codes and scales to write a single member into, where that saves a copy; any other memory may be returned."""

    @property
    def decoder(self) -> str:
        """The backend that moves and decodes what lies on the host."""
        return host_backend(self.backend)

    @property
    def described(self) -> str:
        """The algorithm's name for the report; a peer's cast goes by its contract."""
        return repr(self.contract) if self.algorithm == "peer" else self.algorithm


def cast_together(sharers: Sharers, settings: Settings) -> Cast:
    """Cast rows that share one global scale, by the algorithm asked for."""
    return WRITERS[settings.algorithm](sharers, settings)


def _requantize(sharers: Sharers, settings: Settings) -> Cast:
    """Algorithm 1: decode to bfloat16, quantize with the largest amax of the members."""
    shared = None
    if len(sharers.members) > 1:
        decoded = [_decoded(member, "float32", settings) for member in sharers.members]
        shared = max(float(np.abs(to_numpy(part)).max()) for part in decoded)
    results = [
        quantize(
            _decoded(member, "bfloat16", settings),
            "nvfp4",
            settings.quantizer,
            global_amax=shared,
            backend=settings.backend,
            threads=settings.threads,
        )
        for member in sharers.members
    ]
    parts = tuple((to_numpy(result.codes), to_numpy(result.scales)) for result in results)
    return _measured(sharers, scale_of(results[0], settings.contract), parts, settings)


def _decoded(member: Member, dtype: str, settings: Settings) -> Array:
    return dequantize(member.tensor, dtype, settings.decoder, settings.threads)


def _verbatim(sharers: Sharers, settings: Settings) -> Cast:
    """Algorithm 2."""
    fit = (sharers.exponents or NO_BLOCKS).fit
    if fit or settings.placement == "midpoint":
        return _kept(sharers, verbatim.midpoint(sharers.exponents), settings)
    return _kept(sharers, verbatim.search(sharers.survey), settings)


def _kept(sharers: Sharers, m: int, settings: Settings) -> Cast:
    """Codes kept under 2^m. Where every block fits the window of m, nothing has to be measured."""
    scale = power(m, settings.contract)
    out = settings.out if len(sharers.members) == 1 else None
    rows = [member.rows for member in sharers.members]
    kept = [verbatim.keep_and_count(part, m, out, settings.decoder, settings.threads) for part in rows]
    parts = tuple((codes, scales) for codes, scales, _ in kept)
    fits = sharers.exponents is None or sharers.exponents.fit_under(m)
    if fits and decodes_kept(scale, m, sharers.exponents):
        tallies = [_exact(member, zeros, settings) for member, (_, _, zeros) in zip(sharers.members, kept, strict=True)]
        return Cast(scale, parts, add(tallies))
    return _measured(sharers, scale, parts, settings)


def _exact(member: Member, zeros: int, settings: Settings) -> Tally:
    """The tally of rows that keep every code."""
    rows = member.rows
    same_bits = reads_zeros_alike(member.tensor, settings.contract) or not any(
        has_negative_zero(part.whole) for _, _, part in rows.slices()
    )
    return exact_tally(rows.scales.size, zeros, len(rows.scales) * rows.width, same_bits)


def _hybrid(sharers: Sharers, settings: Settings) -> Cast:
    """Algorithm 3."""
    exponents = sharers.exponents or NO_BLOCKS
    if exponents.fit:
        return _kept(sharers, exponents.m, settings)
    parts = tuple(
        hybrid.requantize_outside(member.rows, exponents.m, settings.decoder, settings.threads)
        for member in sharers.members
    )
    return _measured(sharers, power(exponents.m, settings.contract), parts, settings)


def _optimal(sharers: Sharers, settings: Settings) -> Cast:
    """Ours."""
    choice = optimal.choose(sharers.exponents, lambda: sharers.survey, settings.contract, settings.quantizer)
    if choice.keeps:
        return _kept(sharers, (sharers.exponents or NO_BLOCKS).m, settings)
    written = [optimal.write(member.rows, choice, settings.decoder, settings.threads) for member in sharers.members]
    parts = tuple((part.codes, part.scales) for part in written)
    return dataclasses.replace(_measured(sharers, choice.scale, parts, settings), bound=choice.bound)


def _by_peer(sharers: Sharers, settings: Settings) -> Cast:
    """A peer's cast: through bfloat16 as algorithm 1, or by its closed form."""
    rule = settings.contract.cast
    if rule is None or rule.factor is None:
        return _requantize(sharers, settings)
    k_max = rule.k_max
    if k_max is None:
        k_max = largest_exponent(np.concatenate([member.rows.scales.reshape(-1) for member in sharers.members]))
    written = []
    for member in sharers.members:
        values = to_numpy(_decoded(member, "bfloat16", settings)).astype(np.float32)
        written.append(closed_form.cast_by_rule(member.rows, values, settings.contract, rule, k_max))
    factor = written[0][2]
    scale = GlobalScale(factor, factor, settings.contract)
    return _measured(sharers, scale, tuple((codes, scales) for codes, scales, _ in written), settings)


WRITERS: dict[str, Callable[[Sharers, Settings], Cast]] = {
    "optimal": _optimal,
    "hybrid": _hybrid,
    "verbatim": _verbatim,
    "requantize": _requantize,
    "peer": _by_peer,
}


def _measured(sharers: Sharers, scale: GlobalScale, parts: tuple[tuple[U8, U8], ...], settings: Settings) -> Cast:
    tallies = [
        compare(member.tensor, assemble(member.tensor, codes, scales, scale), settings.decoder, settings.threads)
        for member, (codes, scales) in zip(sharers.members, parts, strict=True)
    ]
    return Cast(scale, parts, add(tallies))


def describe_scaled(
    tally: Tally,
    shape: tuple[int, ...],
    settings: Settings,
    exponents: Exponents | None,
    scales: Sequence[GlobalScale],
    bound: float | None,
) -> CastReport:
    """The report of rows under one or more global scales."""
    powers = {scale.exponent for scale in scales}
    return dataclasses.replace(
        describe(tally, "mxfp4", "nvfp4", settings.described, shape),
        k_min=None if exponents is None else exponents.low,
        k_max=None if exponents is None else exponents.high,
        m=powers.pop() if len(powers) == 1 else None,
        global_scales=tuple(float(scale.multiplier) for scale in scales),
        bound=bound,
    )


def assemble(source: QuantizedTensor, codes: U8, scales: U8, scale: GlobalScale) -> QuantizedTensor:
    """An NVFP4 tensor of the source's shape under one global scale."""
    leading = source.shape[:-1]
    return QuantizedTensor(
        format=NVFP4,
        shape=source.shape,
        codes=codes.reshape(*leading, -1),
        scales=scales.reshape(*leading, -1),
        global_scale=np.asarray(scale.multiplier, np.float32),
        stored_scale=np.asarray(scale.stored, np.float32),
        contract=scale.contract,
        method=Amax(),
    )
