"""The process that asks vLLM: `python -m halfbyte.load_check.in_vllm DIRECTORY trust|known OUTPUT`.

vLLM itself reads the config, chooses the class, decides which layers are quantized and builds them on the meta device;
the class's own `load_weights` gets the tensors of the headers. Which weight each tensor reaches is seen from outside
(`flow`), since vLLM tells neither tensors that it drops nor weights that nothing fills. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.child import answer, one_line
from halfbyte.load_check.flow import Flow
from halfbyte.load_check.headers import meta_tensors
from halfbyte.load_check.vllm_without_card import choose_any_kernel
from halfbyte.models.from_model import TRUST
from halfbyte.models.names import layer_index

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONAL = re.compile(r"(^|\.)([kqv]|prob)_(scale|zero_point)$|\.input_scale_ub$")
"""Weights with a default: scales of the KV cache."""

INPUT_SCALE = re.compile(r"input_(global_)?scale$")
"""Weights that a layer has in any case, and drops where its inputs are not quantized."""

OTHER_MODEL = re.compile(r"(^|\.)mtp\.|rotary_emb\.inv_freq$")
"""Tensors that the main model never takes: those of a model that predicts further tokens, and old buffers."""


def load(path: str, trust: str) -> dict[str, Any]:
    """Missing and unexpected names, or the error, of the model in a directory."""
    os.environ.update(SETTINGS)
    torch = import_module("torch")
    config = _engine_config(path, trust == TRUST)
    tensors = {name: _number(tensor) for name, tensor in meta_tensors(Path(path)).items()}
    flow, last = Flow(tensors), ["the first tensor"]
    found: dict[str, Any] = {}
    with import_module("vllm.config").set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        _alone(folder)
        dtype = import_module("vllm.utils.torch_utils").set_default_torch_dtype(config.model_config.dtype)
        with dtype, torch.device("meta"):
            model = import_module("vllm.model_executor.model_loader.utils").initialize_model(config)
        try:
            with flow.watching():
                model.load_weights(_told(tensors, last))
        except Exception as error:
            found["error"] = one_line(f"at {last[0]}: {type(error).__name__}: {error}")
    if "error" in found:
        return found
    weights = dict(model.named_parameters())
    used = flow.names_in([*weights.values(), *model.buffers()])
    optional = [OPTIONAL] if quantizes_inputs(open_checkpoint(Path(path)).quantization) else [OPTIONAL, INPUT_SCALE]
    wanted = {name: weight for name, weight in weights.items() if not any(kind.search(name) for kind in optional)}
    found["missing"] = sorted(missing(flow, wanted))
    found["unexpected"] = sorted(
        name for name in tensors if name not in used and not left_alone(name, config.model_config)
    )
    return found


def missing(flow: Flow, weights: Mapping[str, Any]) -> Iterator[str]:
    """Weights that were not filled, or only in part: one of several that are fused, or one expert of many."""
    for name, weight in weights.items():
        written, size = flow.written(weight), weight.numel()
        if written < size:
            yield name if written == 0 else f"{name} ({written} of {size} numbers are there)"


def quantizes_inputs(quantization: Mapping[str, Any]) -> bool:
    """Whether every quantized layer has an input scale of its own in the checkpoint."""
    if "quant_algo" in quantization:
        return bool(quantization["quant_algo"] == "NVFP4")
    groups = (quantization.get("config_groups") or {}).values()
    return any((group.get("input_activations") or {}).get("dynamic") == "local" for group in groups)


def _engine_config(path: str, trust_remote_code: bool) -> Any:
    """vLLM's own reading of the checkpoint's config."""
    import_module("vllm.model_executor.models.registry")
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=path, skip_tokenizer_init=True, enforce_eager=True, trust_remote_code=trust_remote_code, max_model_len=16
    )
    config = arguments.create_engine_config()
    if not import_module("vllm.platforms").current_platform.is_cuda_alike():
        choose_any_kernel()
    return config


def _alone(folder: str) -> None:
    """Tell vLLM that this process is the only one of its group."""
    state = import_module("vllm.distributed.parallel_state")
    state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
    state.ensure_model_parallel_initialized(1, 1)


def _number(tensor: Any) -> Any:
    """A scalar gets a value, since loaders read it; anything larger has none."""
    return tensor if tensor.numel() > 1 else import_module("torch").ones(tensor.shape).to(tensor.dtype)


def _told(tensors: Mapping[str, Any], last: list[str]) -> Iterator[tuple[str, Any]]:
    """The tensors, one by one; `last` holds the name of the one that is being loaded."""
    for name, tensor in tensors.items():
        last[0] = name
        yield name, tensor


def left_alone(name: str, model_config: Any) -> bool:
    """Whether vLLM leaves a tensor alone on purpose."""
    text = model_config.hf_text_config
    if OTHER_MODEL.search(name) or (name.endswith("lm_head.weight") and getattr(text, "tie_word_embeddings", False)):
        return True
    layer = layer_index(name)
    return layer is not None and layer >= getattr(text, "num_hidden_layers", layer + 1)


if __name__ == "__main__":
    answer(load)
