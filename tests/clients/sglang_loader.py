"""Build models with SGLang and fill them through its weight loaders, without running them. Runs in its environment.

    python sglang_loader.py JOBS.json

JOBS.json: [{"checkpoint": DIR, "decoded": DIR, "output": FILE.json}, …]: a quantized checkpoint and the same model with
its weights decoded. Each job is a forked process. It writes the number of linear layers and heads, how many of them
SGLang took as quantized, the parameters that nothing filled, and the largest relative error between what SGLang holds
of the one model and of the other. So whole architectures are compared, towers and projectors included.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

RANKS = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")
"""The groups of processes of which SGLang asks for its own place."""

UNSTORED = (".input_scale", ".k_scale", ".v_scale")
"""Parameters that W4A16 checkpoints do not have."""


def load(checkpoint: str) -> tuple[Any, list[str]]:
    """A model of SGLang with its parameters as they were loaded, and those that nothing filled."""
    torch, loading = import_module("torch"), import_module("sglang.srt.model_loader.loader")
    arguments = import_module("sglang.srt.server_args")
    options = {"device": "cpu", "dtype": "bfloat16", "skip_tokenizer_init": True, "trust_remote_code": True}
    settings = arguments.ServerArgs(model_path=checkpoint, **options)
    arguments.set_global_server_args_for_scheduler(settings)
    config = import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(settings)
    _join_groups(f"{checkpoint}.store")
    load_config = import_module("sglang.srt.configs.load_config").LoadConfig()
    with loading.set_default_torch_dtype(torch.bfloat16):
        model = loading._initialize_model(config, load_config, loading._get_quantization_config(config, load_config))
        for parameter in model.parameters():
            _spoil(parameter.data)
        model.load_weights(loading.get_model_loader(load_config, config)._get_all_weights(config, model))
    unfilled = [name for name, parameter in model.named_parameters() if _is_spoilt(parameter.data)]
    return model, [name for name in unfilled if not name.endswith(UNSTORED)]


def _join_groups(store: str) -> None:
    """One process as a group of its own, once."""
    distributed = import_module("sglang.srt.distributed")
    if distributed.model_parallel_is_initialized():
        return
    distributed.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
    )
    distributed.initialize_model_parallel(backend="gloo")
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    parallel.override_permanently(**{f"{group}_rank": 0 for group in RANKS})


def _spoil(values: Any) -> None:
    """Bytes that no tensor of a checkpoint has throughout: NaN as floats."""
    values.view(import_module("torch").uint8).fill_(0xFF) if values.dim() else values.fill_(float("nan"))


def _is_spoilt(values: Any) -> bool:
    torch = import_module("torch")
    if values.dtype == torch.uint8:
        return bool((values == 0xFF).all())
    return bool(values.float().isnan().any())


def weights(model: Any) -> dict[str, tuple[Any, bool]]:
    """Layer → (its weight, whether it was quantized); linear layers, heads and tables."""
    linear = import_module("sglang.srt.layers.linear").LinearBase
    table = import_module("sglang.srt.layers.vocab_parallel_embedding").VocabParallelEmbedding
    decoded = import_module("sglang_client").decoded
    found = {name: decoded(module) for name, module in model.named_modules() if isinstance(module, linear | table)}
    dtype = import_module("torch").bfloat16  # what SGLang computes with, and what the decoded checkpoint holds
    return {name: (values.to(dtype).float(), is_quantized) for name, (values, is_quantized) in found.items()}


def compare(job: dict[str, str]) -> dict[str, Any]:
    model, unfilled = load(job["checkpoint"])
    plain_model, unfilled_plain = load(job["decoded"])
    ours, plain = weights(model), weights(plain_model)
    if set(ours) != set(plain):
        raise SystemExit(f"SGLang builds other layers: {sorted(set(ours) ^ set(plain))[:8]}")
    errors = {
        name: float(((values - plain[name][0]).norm() / plain[name][0].norm().clamp(min=1e-30)).nan_to_num(nan=inf))
        for name, (values, _) in ours.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    quantized = sorted(name for name, (_, is_quantized) in ours.items() if is_quantized)
    return {
        "layers": len(ours),
        "quantized": len(quantized),
        "unfilled": [name for name in unfilled if name not in unfilled_plain],
        "worst": worst,
        "error": errors[worst],
        "names": quantized,
    }


def run_job(job: dict[str, str]) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    output = Path(job["output"])
    try:
        log = os.open(output.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        output.write_text(json.dumps(compare(job)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    os.environ.update({"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"})
    import_module("sglang_client").prepare()
    compressed = import_module("sglang.srt.layers.quantization.compressed_tensors.compressed_tensors")
    compressed.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True  # asks for a GPU's capability
    import_module("sglang.srt.models.registry")  # once, before jobs are forked
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(job)


if __name__ == "__main__":
    main()
