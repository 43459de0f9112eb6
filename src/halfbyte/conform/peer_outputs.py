"""How each peer hands its result over: padding, swizzle, columnwise operand, nibble order, extra outputs.

One function per peer takes a case, quantizes its input through the public API, and rebuilds every tensor that the peer
returns. Config keys go to the contract's own function, which refuses those it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, to_numpy
from halfbyte.casting import cast
from halfbyte.codec.element import decode
from halfbyte.conform import peer_intermediates
from halfbyte.conform.checkpoint_case import convert_case
from halfbyte.conform.on_backend import placed, quantize
from halfbyte.conform.vectors import Case
from halfbyte.contracts import CONTRACTS, Contract
from halfbyte.contracts.peers.gguf import scale_from_float
from halfbyte.errors import UnsupportedError, VectorError
from halfbyte.formats import E8M0, get_format
from halfbyte.layouts import gguf as gguf_layout
from halfbyte.layouts.swizzle import swizzle
from halfbyte.methods import Hessian
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor

Outputs = dict[str, npt.NDArray[Any]]
Matrix = npt.NDArray[Any]


def contract_of(case: Case, *, leave_out: tuple[str, ...] = (), **changes: object) -> Contract:
    """The contract that a case's config asks for; an unknown key raises."""
    options = {key: value for key, value in case.config.items() if key not in leave_out} | changes
    return CONTRACTS[case.peer](**options)


def pad_to(x: Matrix, rows: int, columns: int) -> Matrix:
    """Zeros on the right and at the bottom up to multiples; leading axes stay."""
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)]
    return np.pad(x, padding)


def as_vector(value: Array) -> Matrix:
    """A stored scale as the vectors hold it: scalars have shape [1]."""
    return to_numpy(value).reshape(-1)


def parts(q: QuantizedTensor, suffix: str = "") -> Outputs:
    """Codes, scales and, where the contract stores one, the tensor-level number."""
    outputs = {f"codes{suffix}": to_numpy(q.codes), f"scales{suffix}": to_numpy(q.scales)}
    if q.stored_scale is not None:
        outputs[f"tensor_scale{suffix}"] = as_vector(q.stored_scale)
    return outputs


def decoded(q: QuantizedTensor, case: Case) -> Outputs:
    """The dequantized tensor in the dtype that the case holds, if it holds one."""
    if "dequant" not in case.tensors:
        return {}
    return {"dequant": to_numpy(dequantize(q, case.tensors["dequant"].dtype))}


def simple(case: Case, backend: str) -> Outputs:
    """Peers that return what we return."""
    q = quantize(case.tensors["input"], case.format, contract_of(case), backend=backend)
    return parts(q) | decoded(q, case)


def transformer_engine(case: Case, backend: str) -> Outputs:
    """Rowwise, and columnwise from the transpose. Codes are cropped (an odd width loses its last), scales are not."""
    x = case.tensors["input"]
    x = x.reshape(-1, x.shape[-1])
    rowwise = contract_of(case, leave_out=("columnwise", "with_rht", "with_random_sign_mask"))
    outputs = _te_operand(x, case, rowwise, backend, "")
    if case.config.get("columnwise"):
        # The operand after the transform is part of the case, because its summation order is the BLAS's choice.
        contract = contract_of(case, columnwise=False, leave_out=("with_rht", "with_random_sign_mask"))
        operand = case.tensors["rht_out"] if case.config.get("with_rht") else np.ascontiguousarray(x.T)
        outputs |= _te_operand(operand, case, contract, backend, "_t")
    if case.format == "mxfp4":
        outputs["scales_fp32"] = decode(outputs.pop("scales"), E8M0)
    return outputs


def _te_operand(x: Matrix, case: Case, contract: Contract, backend: str, suffix: str) -> Outputs:
    rows, columns = x.shape
    tile_rows, tile_columns = case.config.get("tile", (1, 16))
    q = quantize(pad_to(x, tile_rows, tile_columns), case.format, contract, backend=backend)
    outputs = parts(q, suffix)
    outputs[f"codes{suffix}"] = outputs[f"codes{suffix}"][:rows, : columns // 2]
    if contract.scaling == "row":
        outputs[f"tensor_scale{suffix}"] = outputs[f"tensor_scale{suffix}"][:rows]
    return outputs


def fouroversix(case: Case, backend: str) -> Outputs:
    """Padded to 128 rows and 64 columns (MXFP4: 128), scales swizzled; MX stores a tensor scale of 1."""
    x = case.tensors["input"]
    padded = pad_to(x, 128, 128 if case.format == "mxfp4" else 64)
    if case.config.get("rht"):
        q = quantize(
            case.tensors["rht_out"], case.format, contract_of(case, rht=False, transpose=False), backend=backend
        )
    else:
        q = quantize(padded, case.format, contract_of(case), backend=backend)
    outputs = parts(q) | decoded(q, case)
    outputs["scales"] = swizzle(outputs["scales"])
    if case.format == "mxfp4":
        outputs["tensor_scale"] = np.ones(1, np.float32)
    if "dequant" in outputs and case.tensors["dequant"].shape == x.shape:
        outputs["dequant"] = outputs["dequant"][: x.shape[0], : x.shape[1]]
    return outputs


def modelopt(case: Case, backend: str) -> Outputs:
    """The last axis stays padded to whole blocks. Static weights add the chosen block amax and its quantized copy."""
    if case.format == "mxfp4->nvfp4":
        return _modelopt_cast(case, backend)
    contract, format = contract_of(case), get_format(case.format)
    x = pad_to(case.tensors["input"], 1, format.block)
    q = quantize(x, format, contract, backend=backend)
    outputs = parts(q) | decoded(q, case)
    if "fake_quant" in case.tensors:
        outputs |= peer_intermediates.static_search(x, format, contract)
    return outputs


def _modelopt_cast(case: Case, backend: str) -> Outputs:
    """MXFP4 to NVFP4. The closed form adds its amaxes and how many blocks it takes for lossless."""
    codes, scales = case.tensors["mx_codes"], case.tensors["mx_scales"]
    contract = contract_of(case, leave_out=("info",))
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    source = QuantizedTensor(
        get_format("mxfp4"), shape, placed(codes, backend), placed(scales, backend), None, None, CONTRACTS["modelopt"]()
    )
    q, report = cast(source, "nvfp4", contract=contract, backend=backend)
    outputs = parts(q)
    if contract.cast is not None and contract.cast.block_amax is not None:
        outputs |= peer_intermediates.closed_form(source, contract.cast)
    return outputs | {"n_blocks": np.array([report.blocks], np.int64)}


def compressed_tensors(case: Case, backend: str) -> Outputs:
    """Adds the block scale as a float, before it becomes a byte."""
    contract, format = contract_of(case), get_format(case.format)
    q = quantize(case.tensors["input"], format, contract, backend=backend)
    return parts(q) | decoded(q, case) | {"scale_float": peer_intermediates.float_scale(case.tensors["input"], q)}


def torchao(case: Case, backend: str) -> Outputs:
    """Scales in rows, or in 128x4 tiles."""
    outputs = simple(case, backend)
    if case.config.get("swizzled"):
        outputs["scales"] = swizzle(outputs["scales"].reshape(-1, outputs["scales"].shape[-1]))
    return outputs


def qwantize(case: Case, backend: str) -> Outputs:
    """The Hessian searches take it from the case's activations; how those were drawn is no option of the contract."""
    if "activations" not in case.tensors:
        return simple(case, backend)
    contract, format = contract_of(case, leave_out=("act_dist", "act_seed", "tokens")), get_format(case.format)
    method = Hessian(peer_intermediates.fused_hessian(case.tensors["activations"], format.block))
    q = quantize(case.tensors["input"], format, contract, method, backend=backend)
    return parts(q) | decoded(q, case)


def flashinfer(case: Case, backend: str) -> Outputs:
    """4over6 adds the amax and which blocks took map-to-4; UE8M0 hands its factor back."""
    contract, format = contract_of(case), get_format(case.format)
    q = quantize(case.tensors["input"], format, contract, backend=backend)
    outputs = parts(q) | decoded(q, case)
    if case.format == "mxfp4":
        outputs["tensor_scale"] = np.array([case.config.get("global_scale", 1.0)], np.float32)
    if case.config.get("mode") == "4over6":
        outputs |= peer_intermediates.four_six_choice(case.tensors["input"], q)
    return outputs


def miles(case: Case, backend: str) -> Outputs:
    """A single weight, a gate/up pair that shares the larger amax, or a whole checkpoint."""
    if case.config.get("mode") == "convert_hf_to_nvfp4":
        return convert_case(case)
    contract = contract_of(case, leave_out=("mode", "first_rows"))
    x = case.tensors["input"]
    match case.config.get("mode"):
        case "single":
            return parts(quantize(x, case.format, contract, backend=backend))
        case "pair":
            rows = case.config["first_rows"]
            shared = np.abs(x.astype(np.float32)).max()
            outputs: Outputs = {}
            for name, part in (("gate", x[:rows]), ("up", x[rows:])):
                q = quantize(part, case.format, contract, global_amax=shared, backend=backend)
                outputs |= parts(q, f"_{name}")
            return outputs
        case mode:
            raise UnsupportedError(f"unknown mode of miles {mode!r}; known: single, pair, convert_hf_to_nvfp4")


def gguf(case: Case, backend: str) -> Outputs:
    """Half-split nibbles, and blocks with the scales in front. NVFP4 is decoded only."""
    contract, format = contract_of(case), get_format(case.format)
    if case.config.get("mode") == "NVFP4.fp32_to_ue4m3":
        return {"scales": scale_from_float(case.tensors["input"])}
    if "input" not in case.tensors:
        codes, scales = gguf_layout.from_blocks(case.tensors["blocks"], format)
        shape = (codes.shape[0], 2 * codes.shape[1])
        return decoded(QuantizedTensor(format, shape, codes, scales, None, None, contract), case)
    q = quantize(case.tensors["input"], format, contract, backend=backend)
    outputs = parts(q) | decoded(q, case)
    outputs["blocks"] = gguf_layout.to_blocks(outputs["codes"], outputs["scales"], format)
    outputs["codes"] = gguf_layout.half_split(outputs["codes"], format)
    return outputs


def transformers(case: Case, backend: str) -> Outputs:
    """Codes [experts, rows, groups, 16] decode to [experts, groups·32, rows]."""
    contract, format = contract_of(case), get_format(case.format)
    codes, scales = case.tensors["codes"], case.tensors["scales"]
    experts, rows, groups, _ = codes.shape
    shape = (experts, rows, groups * format.block)
    q = QuantizedTensor(format, shape, codes.reshape(experts, rows, -1), scales, None, None, contract)
    return {name: values.swapaxes(1, 2) for name, values in decoded(q, case).items()}


PEER_OUTPUTS: dict[str, Callable[[Case, str], Outputs]] = {
    "transformer_engine": transformer_engine,
    "fouroversix": fouroversix,
    "modelopt": modelopt,
    "compressed_tensors": compressed_tensors,
    "torchao": torchao,
    "qwantize": qwantize,
    "flashinfer": flashinfer,
    "miles": miles,
    "gguf": gguf,
    "transformers": transformers,
}
"""Peers that return more than `simple` rebuilds, or return it in another order."""

DECODE_OPERANDS = {"transformers": ("codes", "scales"), "gguf": ("blocks",)}
"""Operands of the cases that have no `input` and test decoding alone."""


def emit(case: Case, backend: str) -> Outputs:
    """Every tensor that the peer returned for this case, as halfbyte computes it."""
    if case.peer not in CONTRACTS:
        raise VectorError(f"unknown peer {case.peer!r}; known: {', '.join(sorted(CONTRACTS))}")
    return PEER_OUTPUTS.get(case.peer, simple)(case, backend)
