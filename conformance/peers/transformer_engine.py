"""TransformerEngine: its Python reference quantizer, loaded as a file.

`import transformer_engine` needs the compiled CUDA library. The reference quantizer itself is plain torch. It imports
three modules of the package, and two of them serve only as base classes and annotations. Stand-ins replace them while
the file is loaded. Then they are removed from `sys.modules`, or Model-Optimizer would take them for an installation.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.peers.spec import LOW_FIRST, Arrays, Config, Offer, Peer, quiet
from conformance.peers.tensors import to_numpy, to_torch

RECIPES = "transformer_engine.pytorch.custom_recipes"

QUANTIZER_KEYS = (
    "pow_2_scales",
    "row_scaled_nvfp4",
    "nvfp4_use_4over6",
    "nvfp4_e4m3_max",
    "nvfp4_4over6_err_mode",
    "nvfp4_4over6_err_use_fast_math",
    "with_rht",
    "with_random_sign_mask",
)

NVFP4_CONVENTIONS = {
    "nibbles": LOW_FIRST,
    "scales": "E4M3 linear, one row per input row (2D tiles repeated over 16 rows)",
    "tensor_scale": "amax (per row when row-scaled)",
}
MXFP4_CONVENTIONS = {"nibbles": LOW_FIRST, "scales": "fp32 powers of two (not bytes)", "tensor_scale": "none"}


def _four_six() -> list[dict[str, Any]]:
    return [
        {
            "nvfp4_4over6_err_mode": mode,
            "nvfp4_4over6_err_use_fast_math": fast,
            "nvfp4_e4m3_max": e4m3_max,
            "nvfp4_use_4over6": True,
        }
        for mode in ("MAE", "MSE")
        for fast in (False, True)
        for e4m3_max in (448, 256)
    ]


def _nvfp4(**config: Any) -> Offer:
    rows = 16 if config.get("with_rht") else 1
    return Offer("nvfp4", {"columnwise": True} | config, NVFP4_CONVENTIONS, multiple=1, rows=rows, stacked=True)


OFFERS = (
    _nvfp4(tile=[1, 16]),
    _nvfp4(tile=[16, 16]),
    _nvfp4(tile=[1, 16], row_scaled_nvfp4=True),
    _nvfp4(tile=[1, 16], with_rht=True),
    _nvfp4(tile=[1, 16], with_rht=True, with_random_sign_mask=False),
    _nvfp4(tile=[1, 16], with_rht=True, row_scaled_nvfp4=True),
    _nvfp4(tile=[16, 16], with_rht=True),
    *(_nvfp4(tile=[1, 16], **four_six) for four_six in _four_six()),
    *(_nvfp4(tile=[16, 16], **four_six) for four_six in _four_six()),
    *(_nvfp4(tile=[1, 16], row_scaled_nvfp4=True, **four_six) for four_six in _four_six()),
    *(_nvfp4(tile=[1, 16], with_rht=True, **four_six) for four_six in _four_six()[:1] + _four_six()[-1:]),
    Offer("mxfp4", {"pow_2_scales": True, "tile": [1, 32]}, MXFP4_CONVENTIONS, multiple=32),
)


@functools.cache
def reference() -> ModuleType:
    """The module reference_nvfp4.py of the installed package."""
    spec = importlib.util.find_spec("transformer_engine")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        reason = "transformer_engine is not installed; make test installs it without its CUDA library"
        raise ModuleNotFoundError(reason, name="transformer_engine")
    folder = Path(spec.submodule_search_locations[0]) / "pytorch" / "custom_recipes"
    base = ModuleType("transformer_engine.pytorch.quantized_tensor")
    gemm = ModuleType(f"{RECIPES}.gemm")
    vars(base).update(QuantizedTensorStorage=type("QuantizedTensorStorage", (), {}), Quantizer=_Quantizer)
    vars(gemm).update(MMParams=object, GEMMType=enum.Enum("GEMMType", ["FPROP", "DGRAD", "WGRAD"]))
    packages = [ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch", RECIPES)]
    stand_ins = {module.__name__: module for module in (*packages, base, gemm)}
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformer_engine")}
    sys.modules.update(stand_ins)
    try:
        vars(stand_ins[RECIPES]).update(gemm=gemm, reference_utils=_load(f"{RECIPES}.reference_utils", folder))
        return _load(f"{RECIPES}.reference_nvfp4", folder)
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(before)


class _Quantizer:
    """The part of the base class that the reference uses."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise


def _load(name: str, folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name.rpartition('.')[2]}.py")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{folder} holds no {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it is being loaded
    with quiet():
        spec.loader.exec_module(module)
    return module


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Quantize with the reference quantizer. Its MXFP4 block routine is called directly: the public call fails."""
    module = reference()
    x = to_torch(operands["input"])
    options = {key: config[key] for key in QUANTIZER_KEYS if key in config}
    tile = tuple(config["tile"])
    columnwise = bool(config.get("columnwise", False))
    quantizer = module.NVFP4QuantizerRef(
        dtype=None, rowwise=True, columnwise=columnwise, quant_tile_shape=tile, **options
    )
    if format == "mxfp4":
        codes, scales = quantizer._quantize_blockwise_reference(x, None, tile[1], tile[0], pow_2_scales=True, eps=0.0)
        return {"codes": to_numpy(codes), "scales_fp32": to_numpy(scales)}
    tensor = quantizer.quantize(x)
    results = {
        "codes": to_numpy(tensor.data),
        "scales": to_numpy(tensor.scale),
        "tensor_scale": to_numpy(tensor.global_amax_row),
    }
    if columnwise:
        results |= {
            "codes_t": to_numpy(tensor.data_t),
            "scales_t": to_numpy(tensor.scale_t),
            "tensor_scale_t": to_numpy(tensor.global_amax_col),
        }
    if config.get("with_rht"):
        results["rht_out"] = to_numpy(quantizer._apply_rht(x.reshape(-1, x.shape[-1]).t().contiguous()))
    return results


PEER = Peer("transformer_engine", "transformer_engine", OFFERS, run)
