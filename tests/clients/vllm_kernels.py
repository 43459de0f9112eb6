"""The products that vLLM cannot compute on a CPU, supplied in plain torch. Everything else stays vLLM's own.

vLLM 0.32 parses the config, decides which layers are quantized, fuses and loads them and merges their scales. What its
CPU build lacks is a kernel to multiply FP4 weights with; here the weights are decoded and multiplied as they are, so a
mistake in a name, a scale, a nibble or an exclude list shows in the output.

Imported only within vLLM's own environment.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

QUANTIZATION = "vllm.model_executor.layers.quantization"
MOE = "vllm.model_executor.layers.fused_moe"


def install(activations: bool) -> None:
    """Give vLLM CPU products for NVFP4 and MXFP4. activations: whether W4A4 layers quantize their inputs too."""
    linear = import_module("vllm.model_executor.kernels.linear")
    cpu = import_module("vllm.platforms").PlatformEnum.CPU
    if activations:  # vLLM's own emulation runs on any device once it is registered
        linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, cpu, "nvfp4")
    for kernel, kind, multiply in (
        (linear.MarlinNvFp4LinearKernel, "nvfp4", _nvfp4_linear),
        (linear.MarlinMxFp4LinearKernel, "mxfp4", _mxfp4_linear),
    ):
        kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        kernel.process_weights_after_loading = lambda self, layer: None
        kernel.apply_weights = multiply
        linear.register_linear_kernel(kernel, cpu, kind)
    _install_nvfp4_experts()
    _install_mxfp4_experts()
    _install_plain_experts()
    for place in ("modelopt", "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"):
        module = import_module(f"{QUANTIZATION}.{place}")
        module.__dict__["torch"] = UnfilledIsNaN()


class UnfilledIsNaN:
    """torch for the modules that create parameters, but memory that nothing fills is NaN and not what lay there before.

    vLLM does not notice a tensor that is missing from a checkpoint; like this the result does, every time.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch"), name)

    def empty(self, *size: Any, **named: Any) -> Any:
        torch = import_module("torch")
        tensor = torch.empty(*size, **named)
        return tensor.fill_(torch.nan) if tensor.dtype in (torch.float32, torch.bfloat16) else tensor


def decode_nvfp4(packed: Any, scales: Any, multiplier: Any, dtype: Any) -> Any:
    """With vLLM's own decoder."""
    emulation = import_module(f"{QUANTIZATION}.utils.nvfp4_emulation_utils")
    return emulation.dequantize_to_dtype(packed, scales, multiplier, dtype, 16, swizzle=False)


def decode_mxfp4(packed: Any, exponents: Any, dtype: Any) -> Any:
    """With the elements of vLLM's NVFP4 decoder; the scales are powers of two."""
    torch = import_module("torch")
    emulation = import_module(f"{QUANTIZATION}.utils.nvfp4_emulation_utils")
    rows = packed.reshape(-1, packed.shape[-1])
    values = emulation.break_fp4_bytes(rows, torch.float32).reshape(rows.shape[0], -1, 32)
    powers = torch.exp2(exponents.view(torch.uint8).float().reshape(rows.shape[0], -1, 1) - 127)
    return (values * powers).reshape(*packed.shape[:-1], -1).to(dtype)


def _nvfp4_linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    weight = decode_nvfp4(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data, x.dtype)
    return import_module("torch.nn.functional").linear(x, weight, bias)


def _mxfp4_linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    weight = decode_mxfp4(layer.weight.data, layer.weight_scale.data, x.dtype)
    return import_module("torch.nn.functional").linear(x, weight, bias)


def mix_experts(
    output: Any, x: Any, gate_up: Any, down: Any, shares: Any, chosen: Any, activation: Any, biases: tuple[Any, Any]
) -> None:
    """output = Σ share · expert(x), one expert after the other in float32."""
    torch = import_module("torch")
    output.zero_()
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        inner = x[token].float() @ gate_up[expert].float().T
        if biases[0] is not None:
            inner = inner + biases[0][expert].float()
        result = _gated(inner, str(getattr(activation, "value", activation))) @ down[expert].float().T
        if biases[1] is not None:
            result = result + biases[1][expert].float()
        total.index_add_(0, token, result * shares[token, place].float().unsqueeze(1))
    output.copy_(total)


def _gated(inner: Any, activation: str) -> Any:
    torch = import_module("torch")
    if "oai" in activation.lower():  # gpt-oss: rows alternate, both halves clamped, up shifted by one
        gate, up = inner[:, ::2].clamp(max=7.0), inner[:, 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = inner.tensor_split(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _install_nvfp4_experts() -> None:
    oracle = import_module(f"{MOE}.oracle.nvfp4")
    experts = import_module(f"{MOE}.experts.nvfp4_emulation_moe").Nvfp4QuantizationEmulationTritonExperts

    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        *rest: Any,
        **named: Any,
    ) -> None:
        scales, dtype = self.quant_config, hidden_states.dtype
        gate_up = decode_nvfp4(w1.data, self.w1_scale_val, scales.g1_alphas, dtype)
        down = decode_nvfp4(w2.data, self.w2_scale_val, scales.g2_alphas, dtype)
        mix_experts(output, hidden_states, gate_up, down, topk_weights, topk_ids, activation, (None, None))

    experts.apply = apply
    places = [f"{QUANTIZATION}.modelopt", f"{COMPRESSED_MOE}_w4a4_nvfp4", f"{MOE}.oracle.nvfp4"]
    for place in places:
        import_module(place).__dict__["select_nvfp4_moe_backend"] = lambda *_, **__: (
            oracle.NvFp4MoeBackend.EMULATION,
            experts,
        )


COMPRESSED_MOE = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


def _install_mxfp4_experts() -> None:
    oracle = import_module(f"{MOE}.oracle.mxfp4")
    experts = import_module(f"{MOE}.experts.ocp_mx_emulation_moe").OCP_MXQuantizationEmulationTritonExperts
    triton = import_module(f"{MOE}.experts.triton_moe").TritonExperts

    def initialise(self: Any, moe_config: Any, quant_config: Any) -> None:
        triton.__init__(self, moe_config, quant_config)
        self.stored_scales = (quant_config.w1_scale, quant_config.w2_scale)
        self.biases = (quant_config.w1_bias, quant_config.w2_bias)
        quant_config._w1.scale = quant_config._w2.scale = None  # the parent would apply them a second time

    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        *rest: Any,
        **named: Any,
    ) -> None:
        gate_up, down = (
            decode_mxfp4(codes.data, scales.data, hidden_states.dtype)
            for codes, scales in zip((w1, w2), self.stored_scales, strict=True)
        )
        mix_experts(output, hidden_states, gate_up, down, topk_weights, topk_ids, activation, self.biases)

    experts.__init__ = initialise
    experts.apply = apply
    experts.is_supported_config = staticmethod(lambda *_, **__: (True, None))
    compressed = import_module(f"{COMPRESSED_MOE}_w4a4_mxfp4")
    for place in (oracle, compressed, import_module(f"{QUANTIZATION}.mxfp4")):
        place.__dict__["select_mxfp4_moe_backend"] = lambda *_, **__: (oracle.Mxfp4MoeBackend.EMULATION, experts)
    # these experts choose by platform; the branch named after another device keeps the tensors as they were loaded
    compressed.__dict__["current_platform"] = SimpleNamespace(is_xpu=lambda: True)
    compressed.__dict__["XPUExpertsMxFp4"] = experts


def _install_plain_experts() -> None:
    """Unquantized experts through the same sums, so that a model and its decoded twin can be equal to the bit."""
    experts = import_module(f"{MOE}.experts.cpu_moe").CPUUnquantizedExperts

    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        *rest: Any,
        **named: Any,
    ) -> None:
        biases = (self.w1_bias, self.w2_bias)
        mix_experts(output, hidden_states, w1.data, w2.data, topk_weights, topk_ids, activation, biases)

    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = apply
