"""Tiny checkpoints of real families, written with numpy: names, shapes and configs as those families store them.

Weights are random, and large enough that a wrong scale or a swapped half changes the logits. Tensors go to the shards
in turn, so that tensors which share a scale are in different files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]
Config = dict[str, object]

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DTYPES = {
    np.dtype(BF16): "BF16",
    np.dtype(E4M3): "F8_E4M3",
    np.dtype(E8M0): "F8_E8M0",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int64): "I64",
}

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY, LAYERS, EXPERTS = 128, 256, 4, 2, 32, 256, 2, 4
EXPERT_INNER = 64


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write one file without a library: header length, JSON header, bytes without holes."""
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def read_safetensors(path: Path) -> Tensors:
    """Read a file, for tests that change a tensor of a checkpoint."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    names = {code: dtype for dtype, code in DTYPES.items()}
    tensors: Tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[start:end], names[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_checkpoint(directory: Path, tensors: Tensors, config: Config, shards: int = 3) -> Path:
    """Write sharded files with their index, or one file; config.json; and a side file that a converter must copy."""
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        names = list(tensors)
        weight_map: dict[str, str] = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[i::shards]}
            write_safetensors(directory / file, part)
            weight_map |= dict.fromkeys(part, file)
        size = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    return directory


class Weights:
    """Random tensors of one model, one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def matrix(self, name: str, *shape: int, fan_in: int | None = None) -> Array:
        """Normal numbers with another size in each row, so that no two tensors have the same amax."""
        spread = np.exp(0.3 * self.generator.standard_normal((*shape[:-1], 1)))
        values = self.generator.standard_normal(shape) * spread * (fan_in or shape[-1]) ** -0.5
        self.tensors[name] = values.astype(BF16)
        return self.tensors[name]

    def norm(self, name: str, width: int) -> None:
        self.tensors[name] = (1 + 0.1 * self.generator.standard_normal(width)).astype(BF16)

    def bias(self, name: str, *shape: int) -> None:
        self.tensors[name] = (0.1 * self.generator.standard_normal(shape)).astype(BF16)

    def ends(self, prefix: str = "model.", *, head: bool = True) -> None:
        self.matrix(f"{prefix}embed_tokens.weight", VOCABULARY, HIDDEN, fan_in=1)
        self.norm(f"{prefix}norm.weight", HIDDEN)
        if head:
            self.matrix("lm_head.weight", VOCABULARY, HIDDEN)

    def attention(self, layer: str, *, qk_norm: bool = False, bias: bool = False) -> None:
        rows = {"q": HEADS * HEAD, "k": KEY_HEADS * HEAD, "v": KEY_HEADS * HEAD}
        for part, out in rows.items():
            self.matrix(f"{layer}.self_attn.{part}_proj.weight", out, HIDDEN)
        self.matrix(f"{layer}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        if qk_norm:
            self.norm(f"{layer}.self_attn.q_norm.weight", HEAD)
            self.norm(f"{layer}.self_attn.k_norm.weight", HEAD)
        if bias:
            for part, out in (rows | {"o": HIDDEN}).items():
                self.bias(f"{layer}.self_attn.{part}_proj.bias", out)
        self.norm(f"{layer}.input_layernorm.weight", HIDDEN)
        self.norm(f"{layer}.post_attention_layernorm.weight", HIDDEN)

    def mlp(self, module: str, inner: int, hidden: int = HIDDEN) -> None:
        self.matrix(f"{module}.gate_proj.weight", inner, hidden)
        self.matrix(f"{module}.up_proj.weight", inner, hidden)
        self.matrix(f"{module}.down_proj.weight", hidden, inner)


def base_config(model_type: str, architecture: str, **more: object) -> Config:
    """What every decoder's config has."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    } | more


def llama(seed: int = 0) -> tuple[Tensors, Config]:
    w = Weights(seed)
    w.ends()
    for i in range(LAYERS):
        w.attention(f"model.layers.{i}")
        w.mlp(f"model.layers.{i}.mlp", INNER)
    return w.tensors, base_config("llama", "LlamaForCausalLM")


def qwen3(seed: int = 0) -> tuple[Tensors, Config]:
    w = Weights(seed)
    w.ends()
    for i in range(LAYERS):
        w.attention(f"model.layers.{i}", qk_norm=True)
        w.mlp(f"model.layers.{i}.mlp", INNER)
    return w.tensors, base_config("qwen3", "Qwen3ForCausalLM")


def qwen3_moe(seed: int = 0) -> tuple[Tensors, Config]:
    w = Weights(seed)
    w.ends()
    for i in range(LAYERS):
        w.attention(f"model.layers.{i}", qk_norm=True)
        w.matrix(f"model.layers.{i}.mlp.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            w.mlp(f"model.layers.{i}.mlp.experts.{expert}", EXPERT_INNER)
    more = {"moe_intermediate_size": EXPERT_INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    return w.tensors, base_config("qwen3_moe", "Qwen3MoeForCausalLM", norm_topk_prob=True, **more)


def gpt_oss(seed: int = 0) -> tuple[Tensors, Config]:
    """BF16: stacks transposed to [experts, in, out], gate and up rows interleaved along the last axis."""
    w, inner = Weights(seed), HIDDEN
    w.ends()
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        w.attention(layer, bias=True)
        w.bias(f"{layer}.self_attn.sinks", HEADS)
        w.matrix(f"{layer}.mlp.router.weight", EXPERTS, HIDDEN)
        w.bias(f"{layer}.mlp.router.bias", EXPERTS)
        w.matrix(f"{layer}.mlp.experts.gate_up_proj", EXPERTS, HIDDEN, 2 * inner, fan_in=HIDDEN)
        w.bias(f"{layer}.mlp.experts.gate_up_proj_bias", EXPERTS, 2 * inner)
        w.matrix(f"{layer}.mlp.experts.down_proj", EXPERTS, inner, HIDDEN, fan_in=inner)
        w.bias(f"{layer}.mlp.experts.down_proj_bias", EXPERTS, HIDDEN)
    more: Config = {
        "intermediate_size": inner,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    return w.tensors, base_config("gpt_oss", "GptOssForCausalLM", **more)


def random_mxfp4(generator: np.random.Generator, rows: tuple[int, ...], width: int) -> tuple[Array, Array]:
    """Codes and exponents drawn at random: [..., width/2] bytes and [..., width/32] exponents around 2^-5."""
    codes = generator.integers(0, 256, (*rows, width // 2), dtype=np.uint8)
    exponents = generator.integers(119, 124, (*rows, width // 32), dtype=np.uint8)
    return codes, exponents


def gpt_oss_mxfp4(seed: int = 0) -> tuple[Tensors, Config]:
    """As released: rows [experts, out], each block 16 bytes and one exponent."""
    tensors, config = gpt_oss(seed)
    generator = np.random.default_rng(seed + 1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        codes, exponents = random_mxfp4(generator, (experts, out), width)
        tensors[f"{name}_blocks"] = codes.reshape(experts, out, width // 32, 16)
        tensors[f"{name}_scales"] = exponents
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return tensors, config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}


def fp8_block(w: Weights, name: str, out: int, width: int) -> None:
    """DeepSeek's FP8: one float32 multiplier per square of 128 × 128; the last squares are partial."""
    values = w.matrix(name, out, width).astype(np.float32)
    del w.tensors[name]
    rows, columns = -(-out // 128), -(-width // 128)
    scales = np.exp(w.generator.standard_normal((rows, columns)) * 0.2).astype(np.float32) / 64
    each = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:out, :width]
    w.tensors[name] = (values / each).astype(E4M3)
    w.tensors[f"{name}_scale_inv"] = scales


def deepseek_v3(seed: int = 0) -> tuple[Tensors, Config]:
    """Latent attention, one dense layer, one with experts, one MTP layer beyond num_hidden_layers."""
    w = Weights(seed)
    w.ends()
    for i in range(3):
        layer = f"model.layers.{i}"
        for part, out, width in [
            ("q_a_proj", 96, HIDDEN),
            ("q_b_proj", 192, 96),
            ("kv_a_proj_with_mqa", 80, HIDDEN),
            ("kv_b_proj", 256, 64),
            ("o_proj", HIDDEN, 128),
        ]:
            fp8_block(w, f"{layer}.self_attn.{part}.weight", out, width)
        w.norm(f"{layer}.self_attn.q_a_layernorm.weight", 96)
        w.norm(f"{layer}.self_attn.kv_a_layernorm.weight", 64)
        w.norm(f"{layer}.input_layernorm.weight", HIDDEN)
        w.norm(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        modules = [f"{layer}.mlp"]
        if i:
            modules = [f"{layer}.mlp.experts.{expert}" for expert in range(EXPERTS)] + [f"{layer}.mlp.shared_experts"]
            w.matrix(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
            w.bias(f"{layer}.mlp.gate.e_score_correction_bias", EXPERTS)
        for module in modules:
            fp8_block(w, f"{module}.gate_proj.weight", 160, HIDDEN)
            fp8_block(w, f"{module}.up_proj.weight", 160, HIDDEN)
            fp8_block(w, f"{module}.down_proj.weight", HIDDEN, 160)
        if i == 2:
            w.matrix(f"{layer}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
            w.norm(f"{layer}.enorm.weight", HIDDEN)
            w.norm(f"{layer}.hnorm.weight", HIDDEN)
    more: Config = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
        "intermediate_size": 160,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    return w.tensors, base_config("deepseek_v3", "DeepseekV3ForCausalLM", **more)


def deepseek_v4(seed: int = 0) -> tuple[Tensors, Config]:
    """DeepSeek's own names: MXFP4 routed experts as int8, the rest FP8 with power-of-two squares."""
    w = Weights(seed)
    w.matrix("embed.weight", VOCABULARY, HIDDEN)
    w.matrix("head.weight", VOCABULARY, HIDDEN)
    w.norm("norm.weight", HIDDEN)

    def expert(module: str) -> None:
        for part, out, width in [
            ("w1", EXPERT_INNER, HIDDEN),
            ("w2", HIDDEN, EXPERT_INNER),
            ("w3", EXPERT_INNER, HIDDEN),
        ]:
            codes, exponents = random_mxfp4(w.generator, (out,), width)
            w.tensors[f"{module}.{part}.weight"] = codes.view(np.int8)
            w.tensors[f"{module}.{part}.scale"] = exponents.view(E8M0)

    def square(module: str, out: int, width: int) -> None:
        values = w.matrix(f"{module}.weight", out, width).astype(np.float32)
        exponents = w.generator.integers(118, 122, (-(-out // 128), -(-width // 128)), dtype=np.uint8)
        each = np.repeat(np.repeat(exponents, 128, 0), 128, 1)[:out, :width].astype(np.float32)
        w.tensors[f"{module}.weight"] = (values / np.exp2(each - 127)).astype(E4M3)
        w.tensors[f"{module}.scale"] = exponents.view(E8M0)

    for layer in [*(f"layers.{i}" for i in range(LAYERS)), "mtp.0"]:
        square(f"{layer}.attn.wq_a", 96, HIDDEN)
        square(f"{layer}.attn.wkv", 80, HIDDEN)
        square(f"{layer}.attn.wo_b", HIDDEN, 128)
        w.norm(f"{layer}.attn_norm.weight", HIDDEN)
        w.matrix(f"{layer}.ffn.gate.weight", EXPERTS, HIDDEN)
        for i in range(EXPERTS):
            expert(f"{layer}.ffn.experts.{i}")
        for part, out, width in [
            ("w1", EXPERT_INNER, HIDDEN),
            ("w2", HIDDEN, EXPERT_INNER),
            ("w3", EXPERT_INNER, HIDDEN),
        ]:
            square(f"{layer}.ffn.shared_experts.{part}", out, width)
    more: Config = {
        "expert_dtype": "fp4",
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": EXPERT_INNER,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    return w.tensors, base_config("deepseek_v4", "DeepseekV4ForCausalLM", **more)


def qwen3_5_moe(seed: int = 0) -> tuple[Tensors, Config]:
    """Expert stacks [experts, out, in]: gate in the first half of the rows, up in the second."""
    w, prefix = Weights(seed), "model.language_model."
    w.ends(prefix)
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        w.attention(layer, qk_norm=True)
        w.matrix(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        w.matrix(f"{layer}.mlp.shared_expert_gate.weight", 1, HIDDEN)
        w.mlp(f"{layer}.mlp.shared_expert", EXPERT_INNER)
        w.matrix(f"{layer}.mlp.experts.gate_up_proj", EXPERTS, 2 * EXPERT_INNER, HIDDEN)
        w.matrix(f"{layer}.mlp.experts.down_proj", EXPERTS, HIDDEN, EXPERT_INNER)
    w.matrix("model.visual.patch_embed.proj.weight", 48, 588)
    more = {"moe_intermediate_size": EXPERT_INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    text = base_config("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **more)
    return w.tensors, {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def llama4(seed: int = 0) -> tuple[Tensors, Config]:
    """Expert stacks transposed, [experts, in, out]: gate in the first half of the last axis, up in the second."""
    w, prefix = Weights(seed), "language_model.model."
    w.ends(prefix)
    w.tensors["language_model.lm_head.weight"] = w.tensors.pop("lm_head.weight")
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        w.attention(layer)
        w.matrix(f"{layer}.feed_forward.router.weight", EXPERTS, HIDDEN)
        w.mlp(f"{layer}.feed_forward.shared_expert", EXPERT_INNER)
        w.matrix(f"{layer}.feed_forward.experts.gate_up_proj", EXPERTS, HIDDEN, 2 * EXPERT_INNER)
        w.matrix(f"{layer}.feed_forward.experts.down_proj", EXPERTS, EXPERT_INNER, HIDDEN)
    w.matrix("vision_model.patch_embedding.linear.weight", 48, 588)
    w.matrix("multi_modal_projector.linear_1.weight", HIDDEN, 48)
    text = base_config("llama4_text", "Llama4ForCausalLM", intermediate_size=EXPERT_INNER, num_local_experts=EXPERTS)
    return w.tensors, {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, Callable[[int], tuple[Tensors, Config]]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "gpt_oss_mxfp4": gpt_oss_mxfp4,
    "deepseek_v3": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "qwen3_5_moe": qwen3_5_moe,
    "llama4": llama4,
}


def make(name: str, directory: Path, seed: int = 0, shards: int = 3) -> Path:
    """Write one of the models into a directory."""
    return write_checkpoint(directory, *MODELS[name](seed), shards=shards)
