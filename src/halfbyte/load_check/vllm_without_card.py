"""vLLM on a machine without a card: it has no FP4 kernel to choose there and refuses to build the layers.

The check computes nothing, so any kernel will do. Which tensors a layer takes does not depend on it.
"""

from __future__ import annotations

from importlib import import_module

QUANTIZATION = "vllm.model_executor.layers.quantization"
MOE = "vllm.model_executor.layers.fused_moe"
COMPRESSED_MOE = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


def choose_any_kernel() -> None:
    """Let vLLM build FP4 layers on a CPU. They cannot be run."""
    linear, cpu = import_module("vllm.model_executor.kernels.linear"), import_module("vllm.platforms").PlatformEnum.CPU
    for kernel, kind in ((linear.MarlinNvFp4LinearKernel, "nvfp4"), (linear.MarlinMxFp4LinearKernel, "mxfp4")):
        kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        linear.register_linear_kernel(kernel, cpu, kind)
    nvfp4, mxfp4 = import_module(f"{MOE}.oracle.nvfp4"), import_module(f"{MOE}.oracle.mxfp4")
    experts = import_module(f"{MOE}.experts.nvfp4_emulation_moe").Nvfp4QuantizationEmulationTritonExperts
    for place in (nvfp4, import_module(f"{QUANTIZATION}.modelopt"), import_module(f"{COMPRESSED_MOE}_w4a4_nvfp4")):
        place.__dict__["select_nvfp4_moe_backend"] = lambda *_, **__: (nvfp4.NvFp4MoeBackend.EMULATION, experts)
    experts = import_module(f"{MOE}.experts.ocp_mx_emulation_moe").OCP_MXQuantizationEmulationTritonExperts
    for place in (mxfp4, import_module(f"{QUANTIZATION}.mxfp4"), import_module(f"{COMPRESSED_MOE}_w4a4_mxfp4")):
        place.__dict__["select_mxfp4_moe_backend"] = lambda *_, **__: (mxfp4.Mxfp4MoeBackend.EMULATION, experts)
