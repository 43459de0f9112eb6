"""Build models with vLLM and fill them through its weight loaders, without running them. Runs in vLLM's environment.

    python vllm_loader.py JOBS.json

JOBS.json: [{"checkpoint": DIR, "decoded": DIR, "output": FILE.json}, …]: a quantized checkpoint and the same model with
its weights decoded. Each job is a forked process. It writes the number of linear and expert layers, how many of them
vLLM took as quantized, and the largest relative error between what vLLM holds of the one model and of the other; every
parameter must have come from the checkpoint. So whole architectures are compared, towers and projectors included, where
no processor or kernel is at hand.
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

EXPERTS = ("w13_weight", "w2_weight")


def load(checkpoint: str) -> Any:
    """A model of vLLM with its parameters as they were loaded, before they are prepared for kernels."""
    loading = import_module("vllm.model_executor.model_loader")
    config = import_module("vllm.config")
    options = {
        "model": checkpoint,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "trust_remote_code": True,
    }
    settings = import_module("vllm.engine.arg_utils").EngineArgs(**options).create_engine_config()
    parallel = import_module("vllm.distributed.parallel_state")
    with config.set_current_vllm_config(settings):
        if not parallel.model_parallel_is_initialized():
            parallel.init_distributed_environment(1, 0, f"file://{checkpoint}/../{os.getpid()}.store", 0, "gloo")
            parallel.initialize_model_parallel()
        loader = loading.get_model_loader(settings.load_config)
        _want_every_parameter(loader)
        with import_module("vllm.utils.torch_utils").set_default_torch_dtype(settings.model_config.dtype):
            model = import_module("vllm.model_executor.model_loader.utils").initialize_model(settings)
            loader.load_weights(model, settings.model_config)
    return model


def _want_every_parameter(loader: Any) -> None:
    """Have vLLM check for quantized models, too, that each parameter was loaded; input scales of W4A16 are not."""
    check = loader.track_weights_loading

    def track(model: Any, loaded: set[str], quantized: bool = False) -> None:
        inputs = {name for name, _ in model.named_parameters() if name.endswith(".input_scale")}
        check(model, loaded | inputs, quantized)

    loader.track_weights_loading = track
    loader.enable_weights_track = True


def prepare() -> None:
    """Make every model of vLLM importable: image processors, which no test runs, want torchvision."""
    transformers = import_module("transformers")
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer"):
        getattr(transformers, name)  # transformers looks for real packages: before there are empty ones
    registry = import_module("vllm.model_executor.models.registry")
    import_module("stand_ins").install(("torchvision", "torchaudio", "torchcodec"))
    registry.__dict__["_run_in_subprocess"] = lambda function: function()  # it would not know of the empty ones


def decoded(parts: dict[str, Any], name: str) -> Any:
    """A weight as float32, by the one tensor scale that vLLM takes for a fused layer; None for one without scales."""
    torch, kernels = import_module("torch"), import_module("vllm_kernels")
    if f"{name}_scale" not in parts:
        return None
    codes, scales = parts[f"{name}_packed" if f"{name}_packed" in parts else name], parts[f"{name}_scale"]
    if scales.dtype == torch.uint8:
        return kernels.decode_mxfp4(codes, scales, torch.bfloat16).float()
    if f"{name}_scale_2" in parts:
        tensor = parts[f"{name}_scale_2"]
    else:
        tensor = 1 / parts[name.replace("weight", "weight_global_scale")]
    tensor = tensor.reshape(len(codes), -1)[:, 0] if codes.dim() == 3 else tensor.max()
    return kernels.decode_nvfp4(codes, scales, tensor, torch.bfloat16).float()


def weights(model: Any) -> dict[str, tuple[Any, bool]]:
    """Layer → (its weight, whether it was quantized); linear layers, heads and experts."""
    linear = import_module("vllm.model_executor.layers.linear").LinearBase
    head = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
    found = {}
    for name, module in model.named_modules():
        parts = {key: parameter.data for key, parameter in module.named_parameters(recurse=False)}
        names = ("weight",) if isinstance(module, linear | head) else EXPERTS
        for key in names:
            if key in parts or f"{key}_packed" in parts:
                values = decoded(parts, key)
                found[f"{name}.{key}"] = (parts[key].float(), False) if values is None else (values, True)
    return found


def cache_scales(model: Any) -> dict[str, float]:
    """The scales of a quantized cache of keys and values that attention layers were given."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if "attn" in name)
    return {name: float(parameter) for name, parameter in named if name.endswith((".k_scale", ".v_scale"))}


def compare(job: dict[str, str]) -> dict[str, Any]:
    model = load(job["checkpoint"])
    ours, plain = weights(model), weights(load(job["decoded"]))
    if set(ours) != set(plain):
        raise SystemExit(f"vLLM builds other layers: {sorted(set(ours) ^ set(plain))[:8]}")
    errors = {
        name: float(((values - plain[name][0]).norm() / plain[name][0].norm().clamp(min=1e-30)).nan_to_num(nan=inf))
        for name, (values, _) in ours.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    quantized = sorted(name for name, (_, is_quantized) in ours.items() if is_quantized)
    return {
        "layers": len(ours),
        "quantized": len(quantized),
        "worst": worst,
        "error": errors[worst],
        "names": quantized,
        "cache": cache_scales(model),
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
        import_module("vllm_kernels").install(activations=False)
        output.write_text(json.dumps(compare(job)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    os.environ.update(import_module("vllm_client").SETTINGS)
    prepare()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(job)


if __name__ == "__main__":
    main()
