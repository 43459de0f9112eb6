"""Ask vLLM or SGLang itself which modules an exclude list excludes. Runs in that client's own environment.

    python matcher_client.py vllm|sglang CASES.json

CASES.json: [[patterns, [asked, …]], …]. Prints the answers as JSON: true, false, or null where the client raises.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def vllm(patterns: list[str], asked: str) -> bool:
    module = import_module("vllm.model_executor.layers.quantization.modelopt")
    mapper = import_module("vllm.model_executor.models.utils").WeightsMapper()
    part = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": patterns}
    config = module.ModelOptNvFp4Config.from_config(part | {"group_size": 16, "kv_cache_quant_algo": None})
    config.packed_modules_mapping = FUSED
    config.apply_vllm_mapper(mapper)
    return bool(config.is_layer_excluded(asked))


def sglang(patterns: list[str], asked: str) -> bool:
    place = "sglang.srt.layers.quantization"
    config = import_module(f"{place}.modelopt_quant").ModelOptFp4Config.from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": patterns}
    )
    excluded = bool(config.is_layer_excluded(asked.replace("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")))
    if asked.endswith(".experts"):  # a mixture of experts is asked this way only
        return excluded
    skipped = import_module(f"{place}.utils").is_layer_skipped
    return bool(skipped(asked, config.exclude_modules, FUSED)) or excluded


def answer(client: str, patterns: list[str], asked: str) -> bool | None:
    try:
        return {"vllm": vllm, "sglang": sglang}[client](patterns, asked)
    except ValueError:  # part of a fused layer
        return None


def main() -> None:
    client, cases = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    if client == "sglang":
        compiled: Any = import_module("sglang_client")
        compiled.prepare()
    answers = [[answer(client, patterns, asked) for asked in names] for patterns, names in cases]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
