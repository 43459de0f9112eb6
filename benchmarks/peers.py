"""The peers and halfbyte on the same slice, with the same thread count and the same bits.

Each peer is called as directly as its package allows, without the conversions of conformance/peers. Work that a user of
the peer could avoid is left out: TransformerEngine's reference runs without the wrapper that transposes the tensor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

import halfbyte as hb
from benchmarks.machine import Array
from benchmarks.operations import BLOCK, CHECKED_SEARCH, Inputs, checked_rows, differences, parts, sample
from conformance.peers.spec import codes_of, pack_nibbles, quiet
from conformance.peers.tensors import to_numpy
from conformance.peers.transformer_engine import reference as load_transformer_engine
from halfbyte.codec.bits import dtype_name
from halfbyte.conform.peer_intermediates import fused_hessian

if TYPE_CHECKING:
    import torch

LEFT_OUT = "given to both"
COMPUTED = "computed by both"
NONE = "neither has one"
ONE_SIDED = "given to ours; peer: none"

Result = dict[str, Array]


@dataclass(frozen=True)
class Pair:
    """A peer's call, and our call that does the same."""

    name: str
    distribution: str
    amax: str
    """Who computes the tensor's amax inside the timed call."""
    same_as: tuple[str, ...]
    """Our operations (operations.py) that together do what our call does."""
    ours: Callable[[Array, int], object]
    """Our result from (slice, threads)."""
    peer: Callable[[torch.Tensor], Any]
    check: Callable[[Array, object, Any], list[str]]
    """The differences, from (slice, our result, the peer's result)."""
    mirrored: bool = False
    """True if our bits differ from the peer's by intent; then `searched` below does the check."""
    rows: int = 0
    """The number of rows of the slice; 0: the same as for other pairs."""
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def whole(self) -> bool:
        """Whether the peer is fast enough for the whole tensor."""
        return self.rows == 0


def to_tensor(x: Array) -> torch.Tensor:
    """The same memory as a torch tensor."""
    import torch

    if dtype_name(x.dtype) == "bf16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def make_pairs(inputs: Inputs, slow_rows: int) -> tuple[list[Pair], dict[str, str]]:
    """All pairs whose peer is installed and takes the dtype, and the reasons why others are left out."""
    builders: dict[str, Callable[[Inputs, int], list[Pair]]] = {
        "torchao": _torchao,
        "modelopt": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "qwantize": _qwantize,
        "TransformerEngine": _transformer_engine,
    }
    pairs: list[Pair] = []
    missing: dict[str, str] = {}
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    for name, build in builders.items():
        try:
            with quiet(), redirect_stderr(StringIO()):
                pairs += build(inputs, slow_rows)
        except ImportError as error:
            missing[name] = f"not here: {error}"
    dtype = dtype_name(inputs.x.dtype)
    missing |= {pair.name: f"does not take {dtype}" for pair in pairs if dtype not in pair.dtypes}
    return [pair for pair in pairs if dtype in pair.dtypes], missing


def _quantize(inputs: Inputs, contract: Any, amax: str, **options: Any) -> Callable[[Array, int], object]:
    given = inputs.amax if amax == LEFT_OUT else None
    return lambda x, threads: hb.quantize(
        x, "nvfp4", contract=contract, global_amax=given, backend="cpu", threads=threads, **options
    )


def _codes_and_scales(unpack: Callable[[Any], tuple[Any, Any]]) -> Callable[[Array, object, Any], list[str]]:
    """A check that the peer's codes and scale bytes equal ours. `unpack` takes them from the peer's result."""

    def check(x: Array, ours: object, peer: Any) -> list[str]:
        got, (codes, scales) = parts(ours), unpack(peer)
        shapes = {name: got[name].shape for name in ("codes", "scales")}
        expected = {"codes": _bytes(codes), "scales": _bytes(scales)}
        return differences(
            {name: got[name] for name in expected},
            {name: array.reshape(shapes[name]) for name, array in expected.items()},
        )

    return check


def _bytes(part: Any) -> Array:
    return part if isinstance(part, np.ndarray) else to_numpy(part)


def _torchao(inputs: Inputs, slow_rows: int) -> list[Pair]:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(torch.tensor(float(inputs.amax)))
    return [
        Pair(
            "torchao nvfp4_quantize", "torchao", LEFT_OUT, ("plain NVFP4, torchao",),
            _quantize(inputs, "torchao", LEFT_OUT),
            lambda x: nvfp4_quantize(x, BLOCK, scale), _codes_and_scales(lambda peer: (peer[1], peer[0])),
            dtypes=("bf16", "fp32"),
        )
    ]  # fmt: skip


def _modelopt(inputs: Inputs, slow_rows: int) -> list[Pair]:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = to_tensor(inputs.x)
    factor = NVFP4QTensor.get_weights_scaling_factor_2(x)
    quantized: dict[int, tuple[Any, Any, hb.QuantizedTensor]] = {}

    def decoding(rows: int) -> tuple[Any, Any, hb.QuantizedTensor]:
        """Operands of dequantize, computed once per number of rows."""
        if rows not in quantized:
            tensor, scales, _ = NVFP4QTensor.quantize(x[:rows], BLOCK, weights_scaling_factor_2=factor)
            ours = hb.quantize(inputs.x[:rows], "nvfp4", contract="modelopt", global_amax=inputs.amax)
            quantized[rows] = tensor, scales, ours
        return quantized[rows]

    def peer_dequantize(x: torch.Tensor) -> torch.Tensor:
        tensor, scales, _ = decoding(len(x))
        return tensor.dequantize(  # type: ignore[no-any-return]
            torch.bfloat16, scale=scales, double_scale=factor, block_sizes={-1: BLOCK}
        )

    unpack = _codes_and_scales(lambda peer: (peer[0]._quantized_data, peer[1]))
    return [
        Pair(
            "modelopt NVFP4QTensor.quantize", "nvidia-modelopt", COMPUTED, ("amax", "plain NVFP4, modelopt"),
            _quantize(inputs, "modelopt", COMPUTED), lambda x: NVFP4QTensor.quantize(x, BLOCK), unpack,
        ),
        Pair(
            "modelopt quantize, amax given", "nvidia-modelopt", LEFT_OUT, ("plain NVFP4, modelopt",),
            _quantize(inputs, "modelopt", LEFT_OUT),
            lambda x: NVFP4QTensor.quantize(x, BLOCK, weights_scaling_factor_2=factor), unpack,
        ),
        Pair(
            "modelopt dequantize to bf16", "nvidia-modelopt", NONE, ("dequantize to bfloat16",),
            lambda x, threads: hb.dequantize(decoding(len(x))[2], "bfloat16", backend="cpu", threads=threads),
            peer_dequantize,
            lambda x, ours, peer: differences(parts(ours), {"values": to_numpy(peer)}),
        ),
    ]  # fmt: skip


def _compressed_tensors(inputs: Inputs, slow_rows: int) -> list[Pair]:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", targets=["Linear"])

    def peer(weight: torch.Tensor) -> Any:
        """Its observers' minima and maxima (llm-compressor takes them), its scales, its compressor."""
        groups = weight.reshape(len(weight), -1, BLOCK)
        factor = generate_gparam(*weight.aminmax())
        scale, _ = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), scheme.weights, factor)
        state = {"weight": weight, "weight_global_scale": factor, "weight_scale": scale}
        return NVFP4PackedCompressor.compress(state, scheme)

    return [
        Pair(
            "compressed-tensors compress", "compressed-tensors", COMPUTED, ("amax", "plain NVFP4, compressed_tensors"),
            _quantize(inputs, "compressed_tensors", COMPUTED), peer,
            _codes_and_scales(lambda peer: (peer["weight_packed"], peer["weight_scale"])),
        )
    ]  # fmt: skip


def _qwantize(inputs: Inputs, slow_rows: int) -> list[Pair]:
    import qwantize
    import torch

    activations = torch.from_numpy(inputs.activations)

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1, BLOCK)

    def unpack(peer: Any) -> tuple[Array, Array]:
        scales, values = peer
        return pack_nibbles(codes_of(to_numpy(values.flatten(-2)))), to_numpy(scales.to(torch.float8_e4m3fn))

    def searched(
        mode: str, method: hb.Optimal | hb.Hessian, as_peer: hb.Optimal | hb.Hessian
    ) -> Callable[[Array, object, Any], list[str]]:
        """Check our exact search, whose bits differ from a pruned search.

        It must equal our reference, and our version of the peer's contract must equal the peer.
        """

        @functools.cache
        def references(length: int) -> tuple[object, Array, Result]:
            x, rows = inputs.x[:length], checked_rows(length, CHECKED_SEARCH)
            contract = hb.contracts.qwantize(mode=mode)
            pruned = hb.quantize(x, "nvfp4", contract=contract, method=as_peer, backend="reference")
            exact = hb.quantize(x[rows], "nvfp4", method=method, global_amax=inputs.amax, backend="reference")
            return pruned, rows, parts(exact)

        def check(x: Array, ours: object, peer: Any) -> list[str]:
            pruned, rows, exact = references(len(x))
            found = [f"reference, {text}" for text in differences(sample(ours, rows), exact)]
            return found + [f"peer, {text}" for text in _codes_and_scales(unpack)(x, pruned, peer)]

        return check

    hessian = hb.Hessian(inputs.hessian)
    search = _quantize(inputs, "transformer_engine", LEFT_OUT, method=hb.Optimal())
    given = _quantize(inputs, "transformer_engine", LEFT_OUT, method=hessian)

    def built(x: Array, threads: int) -> object:
        method = hb.Hessian(hb.hessian_from_activations(inputs.activations))
        return _quantize(inputs, "transformer_engine", LEFT_OUT, method=method)(x, threads)

    def peer_hessian(x: torch.Tensor) -> Any:
        return qwantize.nvfp4_optimal_hessian(blocks(x), X=activations)

    def unpack_mx(peer: Any) -> tuple[Array, Array]:
        scales, values = peer
        exponents = to_numpy(scales.float()).view(np.int32) >> 23
        return pack_nibbles(codes_of(to_numpy(values.flatten(-2)))), exponents.astype(np.uint8)

    def own(mode: str, method: hb.Optimal | hb.Hessian) -> Callable[[Array, int], object]:
        contract = hb.contracts.qwantize(mode=mode)
        return lambda x, threads: hb.quantize(
            x, mode.split("/")[0], contract, method, backend="cpu", threads=threads
        )  # fmt: skip

    naive = hb.contracts.qwantize(mode="nvfp4/naive")
    peers_hessian = hb.Hessian(fused_hessian(inputs.activations, BLOCK))  # its sums are float32 and fused
    hessian_check = searched("nvfp4/optimal_hessian", hessian, peers_hessian)
    return [
        Pair(
            "qwantize nvfp4_naive", "qwantize", NONE, ("plain NVFP4, qwantize",), _quantize(inputs, naive, NONE),
            lambda x: qwantize.nvfp4_naive(blocks(x)), _codes_and_scales(unpack),
        ),
        Pair(
            "qwantize nvfp4_optimal", "qwantize", ONE_SIDED, ("Optimal",),
            search, lambda x: qwantize.nvfp4_optimal(blocks(x)),
            searched("nvfp4/optimal", hb.Optimal(), hb.Optimal()), True, slow_rows,
        ),
        Pair(
            "qwantize nvfp4_optimal_hessian", "qwantize", ONE_SIDED,
            (), built, peer_hessian, hessian_check, True, slow_rows,
        ),
        Pair(
            "qwantize nvfp4_optimal_hessian, H given to ours", "qwantize", ONE_SIDED,
            ("Hessian",), given, peer_hessian, hessian_check, True, slow_rows,
        ),
        Pair(
            "qwantize nvfp4_optimal, its own bits", "qwantize", NONE, ("Optimal, qwantize's own",),
            own("nvfp4/optimal", hb.Optimal()), lambda x: qwantize.nvfp4_optimal(blocks(x)),
            _codes_and_scales(unpack), rows=slow_rows,
        ),
        Pair(
            "qwantize mxfp4_optimal, its own bits", "qwantize", NONE, ("Optimal, qwantize's own MXFP4",),
            own("mxfp4/optimal", hb.Optimal()), lambda x: qwantize.mxfp4_optimal(x.reshape(len(x), -1, 32)),
            _codes_and_scales(unpack_mx), rows=slow_rows,
        ),
        Pair(
            "qwantize nvfp4_optimal_hessian, its own bits, H given to ours", "qwantize", NONE,
            ("Hessian, qwantize's own",), own("nvfp4/optimal_hessian", peers_hessian), peer_hessian,
            _codes_and_scales(unpack), rows=slow_rows,
        ),
    ]  # fmt: skip


def _transformer_engine(inputs: Inputs, slow_rows: int) -> list[Pair]:
    import torch

    module = load_transformer_engine()
    amax = torch.tensor([float(inputs.amax)])

    def peer(**options: Any) -> Callable[[torch.Tensor], Any]:
        quantize = module.NVFP4QuantizerRef._quantize_blockwise_reference
        return lambda x: quantize(x, amax, BLOCK, 1, pow_2_scales=False, eps=0.0, **options)

    pairs = [
        Pair(
            "TransformerEngine reference, plain", "transformer_engine", LEFT_OUT, ("plain NVFP4, transformer_engine",),
            _quantize(inputs, "transformer_engine", LEFT_OUT), peer(), _codes_and_scales(lambda peer: peer),
        )
    ]  # fmt: skip
    for error in ("mae", "mse"):
        options = {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": error.upper()}
        method = hb.FourSix(error)
        pairs.append(
            Pair(
                f"TransformerEngine reference, 4over6 {error.upper()}", "transformer_engine", LEFT_OUT,
                (f"4over6 {error.upper()} strict",), _quantize(inputs, "transformer_engine", LEFT_OUT, method=method),
                peer(**options), _codes_and_scales(lambda peer: peer),
            )
        )  # fmt: skip
    return pairs
