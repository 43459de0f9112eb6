"""MXFP4 to NVFP4: the four algorithms, each writing rows that share one global scale and measuring what it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from halfbyte.arrays import to_numpy
from halfbyte.casting import closed_form, hybrid, optimal, verbatim
from halfbyte.casting.measure import compare, exact_tally
from halfbyte.casting.report import Tally, add
from halfbyte.casting.rows import Group, Piece
from halfbyte.casting.scales import NVFP4, GlobalScale, hold, nvfp4_rule, power
from halfbyte.casting.window import HIGHEST, LOWEST
from halfbyte.codec.bits import U8
from halfbyte.contracts import Contract
from halfbyte.contracts.peers.modelopt_cast import largest_exponent
from halfbyte.methods import Amax
from halfbyte.quantize import dequantize, quantize
from halfbyte.types import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of one source tensor, and the same as a piece."""

    tensor: QuantizedTensor
    piece: Piece


@dataclasses.dataclass(frozen=True)
class Cast:
    """The rows of a group, written."""

    group: Group
    scale: GlobalScale
    parts: tuple[tuple[U8, U8], ...]
    """Codes and scales of each of the group's members."""
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
    def described(self) -> str:
        """The algorithm's name for the report; a peer's cast goes by its contract."""
        return repr(self.contract) if self.algorithm == "peer" else self.algorithm


Members = Sequence[Rows]
Writer = Callable[[Members, Group, Settings], Cast]


def cast_group(members: Members, settings: Settings) -> Cast:
    """Rows that share one global scale, by the algorithm asked for."""
    group = Group([member.piece for member in members])
    return WRITERS[settings.algorithm](members, group, settings)


def _requantize(members: Members, group: Group, settings: Settings) -> Cast:
    """Algorithm 1: decode to bfloat16, quantize with the largest amax of the members."""
    values = [dequantize(member.tensor, "bfloat16", threads=settings.threads) for member in members]
    shared = None
    if len(members) > 1:
        decoded = [to_numpy(dequantize(member.tensor, threads=settings.threads)) for member in members]
        shared = max(float(np.abs(part).max()) for part in decoded)
    results = [
        quantize(x, "nvfp4", settings.quantizer, global_amax=shared, backend=settings.backend, threads=settings.threads)
        for x in values
    ]
    multiplier, stored = results[0].global_scale, results[0].stored_scale
    if multiplier is None or stored is None:
        nvfp4_rule(settings.quantizer)  # raises: only contracts with a global scale come here
        raise AssertionError("a contract with a global scale returns one")
    found = np.float32(to_numpy(multiplier).reshape(())[()])
    same_formula = nvfp4_rule(settings.contract).stored_as == nvfp4_rule(settings.quantizer).stored_as
    scale = (
        GlobalScale(found, np.float32(to_numpy(stored).reshape(())[()]), settings.contract)
        if same_formula
        else hold(found, settings.contract)
    )
    parts = tuple((to_numpy(result.codes), to_numpy(result.scales)) for result in results)
    return _measured(members, group, scale, parts, settings)


def _verbatim(members: Members, group: Group, settings: Settings) -> Cast:
    """Algorithm 2."""
    return _kept(members, group, verbatim.place(group, settings.placement), settings)


def _kept(members: Members, group: Group, m: int, settings: Settings) -> Cast:
    """Codes kept under 2^m. Nothing has to be measured where every block fits the window of m."""
    scale = power(m, settings.contract)
    out = settings.out if len(members) == 1 else None
    kept = [verbatim.keep_and_count(member.piece, m, out, settings.threads) for member in members]
    parts = tuple((codes, scales) for codes, scales, _ in kept)
    if group.fits and _inside(group, m):
        tallies = [exact_tally(member.piece, zeros) for member, (_, _, zeros) in zip(members, kept, strict=True)]
        return Cast(group, scale, parts, add(tallies))
    return _measured(members, group, scale, parts, settings)


def _inside(group: Group, m: int) -> bool:
    found = group.exponent_range
    return found is None or (found[1] - m <= HIGHEST and found[0] - m >= LOWEST)


def _hybrid(members: Members, group: Group, settings: Settings) -> Cast:
    """Algorithm 3."""
    m = group.closed_form
    if group.fits:
        return _kept(members, group, m, settings)
    parts = tuple(hybrid.requantize_outside(member.piece, m) for member in members)
    return _measured(members, group, power(m, settings.contract), parts, settings)


def _optimal(members: Members, group: Group, settings: Settings) -> Cast:
    """Ours. Where it is not lossless the three others are run too, and what is measured to be best is kept."""
    if group.settled or group.fits:
        return _kept(members, group, group.closed_form, settings)
    settings = dataclasses.replace(settings, out=None)  # several results are weighed: none may overwrite another
    lossless = optimal.choose_lossless(group, settings.contract)
    if lossless is not None:
        return _measured(members, group, lossless, _written(members, lossless), settings)
    first = _requantize(members, group, settings)
    others = [
        _hybrid(members, group, settings),
        *(_verbatim(members, group, dataclasses.replace(settings, placement=how)) for how in verbatim.PLACEMENTS),
    ]
    chosen = optimal.choose(group, settings.contract, [float(first.scale.multiplier)])
    ours = _measured(members, group, chosen.scale, _written(members, chosen.scale), settings)
    best = min([ours, first, *others], key=lambda cast: cast.tally.squared_error)
    return dataclasses.replace(best, bound=chosen.bound)


def _written(members: Members, scale: GlobalScale) -> tuple[tuple[U8, U8], ...]:
    return tuple(optimal.write(member.piece, scale) for member in members)


def _by_peer(members: Members, group: Group, settings: Settings) -> Cast:
    """A peer's cast: through bfloat16 as algorithm 1, or by its closed form."""
    rule = settings.contract.cast
    if rule is None or rule.factor is None:
        return _requantize(members, group, settings)
    k_max = rule.k_max
    if k_max is None:
        k_max = largest_exponent(np.concatenate([piece.scales.reshape(-1) for piece in group.pieces]))
    written = []
    for member in members:
        values = to_numpy(dequantize(member.tensor, "bfloat16", threads=settings.threads)).astype(np.float32)
        written.append(closed_form.cast_by_rule(member.piece, values, settings.contract, rule, k_max))
    factor = written[0][2]
    scale = GlobalScale(factor, factor, settings.contract)
    return _measured(members, group, scale, tuple((codes, scales) for codes, scales, _ in written), settings)


WRITERS: dict[str, Writer] = {
    "optimal": _optimal,
    "hybrid": _hybrid,
    "verbatim": _verbatim,
    "requantize": _requantize,
    "peer": _by_peer,
}


def _measured(
    members: Members, group: Group, scale: GlobalScale, parts: tuple[tuple[U8, U8], ...], settings: Settings
) -> Cast:
    tallies = [
        compare(member.tensor, assemble(member.tensor, codes, scales, scale), settings.threads)
        for member, (codes, scales) in zip(members, parts, strict=True)
    ]
    return Cast(group, scale, parts, add(tallies))


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
