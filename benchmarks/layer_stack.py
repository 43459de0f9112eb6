"""Sequential GPTQ of layers with the shapes of a 7B model (random weights): seconds per layer, and for 32 of them.

python -m benchmarks.layer_stack --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from halfbyte.calibration.sequential import Options as Solving
from halfbyte.calibration.sequential import solve_sequentially
from halfbyte.calibration.tokens import Windows
from halfbyte.checkpoint import Options, make_plan

VOCABULARY, WHOLE = 1024, 32


def write_model(folder: Path, hidden: int, inner: int, layers: int) -> None:
    """A Llama with random weights in bfloat16 and a small vocabulary."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * 0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden) * 50,
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for number in range(layers):
        at = f"model.layers.{number}"
        for name in "qkvo":
            tensors[f"{at}.self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        tensors[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in ("input", "post_attention"):
            tensors[f"{at}.{name}_layernorm.weight"] = torch.ones(hidden).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfbyte-stack-") as name:
        folder = Path(name)
        write_model(folder / "model", given.hidden, given.inner, 2)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (given.windows, given.length))
        text = Windows(tokens.astype(np.int64), "random")
        times = [time.perf_counter()]

        def done(number: int, total: int) -> None:
            times.append(time.perf_counter())

        plan = make_plan(folder / "model", Options())
        solve_sequentially(plan, text, folder / "solved", Solving(device=given.device, memory=96 << 30), done)
    first, second = (after - before for before, after in itertools.pairwise(times))
    words = f"{given.hidden}/{given.inner}, {given.windows} windows of {given.length} tokens"
    print(f"{words}: first layer {first:.1f} s (with the start), second {second:.1f} s")
    print(f"{WHOLE} layers at the pace of the second: {(first + (WHOLE - 1) * second) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
