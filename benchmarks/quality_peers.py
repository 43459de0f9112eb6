"""Other tools' NVFP4 on the same model and the same calibration windows: rows of `benchmarks.quality --peers`.

Weights are what each tool's own quantizers decode, activations stay unquantized in its calibration (W4A16), options
are its defaults where a recipe does not say otherwise. A tool that cannot run here is a row with the reason.

Model-Optimizer and qwantize are in requirements-peers.txt. llm-compressor asks for an older compressed-tensors and
transformers than those there; it runs from a folder of its own, beside them:

    pip install --no-deps --target peers llmcompressor==0.14.0.1 compressed-tensors==0.19.0 accelerate==1.15.0
    PYTHONPATH=peers python -m benchmarks.quality --peers
"""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import modelopt_cpu
from benchmarks.quality_recipes import Recipe, Scene, SkippedError, Values

BATCH = {"cuda": 16, "cpu": 4}
"""Windows that go through a peer's model at once."""
MOST_ON_CPU = 40
"""Linear layers that qwantize searches without its Triton kernel."""
DAMPING = 0.01
"""Of qwantize's GPTQ, and the default of Model-Optimizer's."""
COLUMNS = 128
"""That Model-Optimizer's GPTQ takes at once, by default."""

Make = Callable[[Scene], Values]


@contextmanager
def _quiet() -> Iterator[None]:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _loaded(scene: Scene) -> Any:
    """The model as transformers loads it, in float32 on the scene's device."""
    import transformers

    transformers.logging.set_verbosity_error()
    found = transformers.AutoModelForCausalLM.from_pretrained(scene.source, dtype=torch.float32)
    return found.to(scene.device).eval()


def _tokens(scene: Scene) -> torch.Tensor:
    return torch.from_numpy(scene.text.tokens).to(scene.device)


def modelopt(algorithm: dict[str, Any], static: bool = True) -> Make:
    """Model-Optimizer's weight-only NVFP4. static: block scales by calibration, as in its recipes for mse and GPTQ.

    Values are those that its export writes, tensor scales shared by siblings. Without a GPU, `modelopt_cpu` stands in
    for its kernels.
    """

    def make(scene: Scene) -> Values:
        try:
            with _quiet():
                import modelopt.torch.quantization as mtq
                from modelopt.torch.export.quant_utils import preprocess_linear_fusion
        except ImportError as error:
            raise SkippedError(f"Model-Optimizer is not installed: {error}") from error
        config = copy.deepcopy(mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG if static else mtq.W4A16_NVFP4_CFG)
        config["quant_cfg"] = [one for one in config["quant_cfg"] if one["quantizer_name"] != "*input_quantizer"]
        config["algorithm"] = algorithm
        model, tokens = _loaded(scene), _tokens(scene)

        def run(model: Any) -> None:
            with torch.no_grad():
                for batch in torch.split(tokens, BATCH[scene.device.type]):
                    model(batch, use_cache=False, logits_to_keep=1)

        kernels = nullcontext() if scene.device.type == "cuda" else modelopt_cpu.on_cpu()
        with _quiet(), kernels, torch.no_grad():
            model = mtq.quantize(model, config, run)
            modules = dict(model.named_modules())
            for group in set(scene.groups.values()):
                preprocess_linear_fusion([modules[name] for name in group])
            return {name: _exported(modules[name]) for name in scene.weights}

    return make


def _exported(module: Any) -> torch.Tensor:
    """The weight of one of Model-Optimizer's linear layers, as its export writes it and it acts on unscaled inputs."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    block = modelopt_cpu.BLOCK
    scales, tensor_scale = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(
        module.weight_quantizer, module.weight
    )
    packed = NVFP4QTensor.quantize(module.weight, block, scales, tensor_scale)[0]
    options = {"scale": scales, "double_scale": tensor_scale, "block_sizes": {-1: block}}
    found: torch.Tensor = packed.dequantize(torch.float32, **options)
    factors = module.input_quantizer.pre_quant_scale  # of AWQ: the weight was divided by them
    return found if factors is None else found * factors


def llm_compressor(modifier: str, **options: Any) -> Make:
    """llm-compressor's NVFP4A16 by one of its modifiers."""

    def make(scene: Scene) -> Values:
        try:
            with _quiet(), _stand_ins("datasets", "auto_round"):
                from compressed_tensors.quantization import fake_quantize
                from llmcompressor import oneshot
                from llmcompressor.modifiers.gptq import GPTQModifier
                from llmcompressor.modifiers.quantization import QuantizationModifier
        except ImportError as error:
            raise SkippedError(f"llm-compressor is not installed, or not beside this transformers: {error}") from error
        from loguru import logger

        logger.remove()
        model, tokens = _loaded(scene), _tokens(scene).cpu()
        chosen = {"GPTQModifier": GPTQModifier, "QuantizationModifier": QuantizationModifier}[modifier]
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
        data: Any = torch.utils.data.DataLoader(rows, batch_size=BATCH[scene.device.type])  # type: ignore[arg-type]
        with _quiet():
            oneshot(
                model=model, dataset=data, processor=_processor(), max_seq_length=tokens.shape[1],
                num_calibration_samples=len(tokens),
                recipe=[chosen(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"], **options)],
            )  # fmt: skip
        modules, found = dict(model.named_modules()), {}
        for name in scene.weights:
            one = modules[name]
            with torch.no_grad():
                found[name] = fake_quantize(
                    one.weight, one.weight_scale, one.weight_zero_point, one.quantization_scheme.weights,
                    global_scale=one.weight_global_scale,
                ).float().to(scene.device)  # fmt: skip
        return found

    return make


@contextmanager
def _stand_ins(*names: str) -> Iterator[None]:
    """Empty modules for what llm-compressor imports for its loaders of public texts, where that is not installed."""
    made: list[str] = []
    for name in names:
        if importlib.util.find_spec(name) is None:
            for part in (name, f"{name}.formatting", f"{name}.formatting.formatting"):
                module = types.ModuleType(part)
                module.__spec__ = importlib.machinery.ModuleSpec(part, None)
                module.__path__ = []
                for kind in ("Dataset", "DatasetDict", "IterableDataset", "LazyRow", "load_dataset"):
                    setattr(module, kind, type(kind, (), {}))
                sys.modules[part] = module
                made.append(part)
    try:
        yield
    finally:
        for part in made:
            del sys.modules[part]


def _processor() -> Any:
    """A tokenizer, which llm-compressor asks for and does not use: the text comes as tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def qwantize(scene: Scene) -> Values:
    """qwantize's ordered GPTQ with its Hessian search, on statistics of the unquantized model.

    The package has the search alone; the loop around it is that of its documentation ("GPTQ Quantization"). qwantize
    has no tensor scale: weights are divided by that of Model-Optimizer before.
    """
    try:
        import qwantize as package
    except ImportError as error:
        raise SkippedError(f"qwantize is not installed: {error}") from error
    on_card = scene.device.type == "cuda"
    if not on_card and len(scene.weights) > MOST_ON_CPU:
        raise SkippedError(f"qwantize's search is too slow for {len(scene.weights)} layers without a GPU")
    search = package.nvfp4_optimal_hessian_triton if on_card else package.nvfp4_optimal_hessian
    found: Values = {}
    for first, names in scene.inputs().items():
        h = scene.moment(first).float()
        for name in names:
            amax = scene.amax(name, "nvfp4")
            assert amax is not None
            scale = amax / (6 * 448)
            found[name] = ordered_feedback(scene.weights[name] / scale, h, search) * scale
    return found


def ordered_feedback(w: torch.Tensor, h: torch.Tensor, search: Callable[..., Any], block: int = 16) -> torch.Tensor:
    """Whole blocks of columns one after the other, those with the largest loss first; each block's error, divided by
    the diagonal of H⁻¹, is taken from the later columns through the rows of H⁻¹."""
    count = len(h) // block
    at = torch.arange(count, device=h.device)
    parts = h.reshape(count, block, count, block)[at, :, at, :]
    roots = _roots(parts)
    wide = w.reshape(len(w), count, block)
    alone = search(wide, return_dequant=True, X=roots.transpose(0, 1).reshape(block, -1).contiguous())[2]
    wrong = wide - alone
    losses = torch.einsum("rjk,jkl,rjl->j", wrong, parts, wrong)
    order = torch.argsort(losses, descending=True)
    columns = (order[:, None] * block + torch.arange(block, device=h.device)).reshape(-1)
    damped = h.clone()
    damped.diagonal().add_(DAMPING * h.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))[columns][:, columns].contiguous()
    rest, done = w[:, columns].contiguous(), torch.empty_like(w)
    for number, start in enumerate(range(0, len(h), block)):
        stop = start + block
        now = rest[:, start:stop].contiguous()
        root = roots[int(order[number])].contiguous()
        near = search(now, return_dequant=True, X=root)[2]
        done[:, start:stop] = near
        error = (now - near) / inverse.diagonal()[start:stop]
        rest[:, stop:] -= error @ inverse[start:stop, stop:]
    found = torch.empty_like(w)
    found[:, columns] = done
    return found


def _roots(parts: torch.Tensor) -> torch.Tensor:
    """Matrices R with RᵀR equal to each of the given ones, to stand for inputs."""
    values, vectors = torch.linalg.eigh(parts.double())
    found: torch.Tensor = (vectors * values.clamp(min=0).sqrt()[:, None, :]).transpose(1, 2).float()
    return found


def llm_compressor_function(scene: Scene) -> Values:
    """llm-compressor's GPTQ function on each layer, with the scales of its observer and the statistics of the scene."""
    try:
        with _quiet(), _stand_ins("datasets", "auto_round"):
            from compressed_tensors.quantization import preset_name_to_scheme
            from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
            from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    except ImportError as error:
        raise SkippedError(f"llm-compressor is not installed, or not beside this transformers: {error}") from error
    arguments = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights.model_copy(update={"actorder": "static"})
    found: Values = {}
    for first, names in scene.inputs().items():
        for name in names:
            w = scene.weights[name]
            blocks = w.reshape(len(w), -1, 16)
            amax = torch.tensor([scene.amax(name, "nvfp4")], device=w.device)
            shared = generate_gparam(-amax, amax)
            least, most = blocks.amin(dim=-1), blocks.amax(dim=-1)
            scale, zero = calculate_qparams(least, most, arguments, global_scale=shared)
            found[name] = quantize_weight(
                w[None].clone(),
                scene.moment(first).float()[None].clone(),
                scale[None],
                zero[None],
                shared[None],
                arguments,
            )[0][0]
    return found


def modelopt_function(scene: Scene) -> Values:
    """Model-Optimizer's GPTQ on each layer, with the scales of its max calibration and the statistics of the scene."""
    try:
        with _quiet():
            from modelopt.torch.quantization.utils.calib_utils import compute_hessian_inverse, gptq_blockwise_update
    except ImportError as error:
        raise SkippedError(f"Model-Optimizer is not installed: {error}") from error
    update = modelopt_cpu.by_columns(gptq_blockwise_update)
    found: Values = {}
    for first, names in scene.inputs().items():
        h = scene.moment(first).float()
        for name in names:
            w, amax = scene.weights[name].clone(), scene.amax(name, "nvfp4")
            blocks = w.reshape(-1, modelopt_cpu.BLOCK).abs().amax(dim=1)
            with _quiet():
                factor = compute_hessian_inverse(h, w, DAMPING)
            update(w, factor, COLUMNS, SimpleNamespace(amax=blocks, global_amax=torch.tensor(amax, device=w.device)))
            found[name] = w
    return found


def layer_recipes() -> list[Recipe]:
    """Rows that need no model of a tool's own: its function on each layer's weight and statistics."""
    return [
        Recipe("Model-Optimizer: GPTQ function", "nvfp4", modelopt_function, True),
        Recipe("llm-compressor: GPTQ function", "nvfp4", llm_compressor_function, True),
        Recipe("qwantize: ordered GPTQ, Hessian scales", "nvfp4", qwantize, True),
    ]


def peer_recipes() -> list[Recipe]:
    """The rows, what the tools recommend first: a run may be cut."""
    layerwise = {"method": "gptq", "layerwise": {"enable": True}}
    return [
        Recipe("Model-Optimizer: max", "nvfp4", modelopt({"method": "max"}, static=False), True),
        Recipe("Model-Optimizer: gptq, layerwise", "nvfp4", modelopt(layerwise), True),
        Recipe("llm-compressor: GPTQModifier", "nvfp4", llm_compressor("GPTQModifier"), True),
        Recipe("llm-compressor: GPTQModifier, expanded imatrix", "nvfp4",
               llm_compressor("GPTQModifier", weight_observer="nvfp4_expanded_imatrix"), True),
        Recipe("Model-Optimizer: mse, FP8 sweep", "nvfp4", modelopt({"method": "mse", "fp8_scale_sweep": True}), True),
        Recipe("Model-Optimizer: local Hessian, FP8 sweep", "nvfp4",
               modelopt({"method": "local_hessian", "fp8_scale_sweep": True})),
        Recipe("Model-Optimizer: gptq", "nvfp4", modelopt({"method": "gptq"})),
        Recipe("Model-Optimizer: mse", "nvfp4", modelopt({"method": "mse"})),
        Recipe("Model-Optimizer: awq_lite", "nvfp4", modelopt({"method": "awq_lite"}, static=False)),
        Recipe("llm-compressor: QuantizationModifier", "nvfp4", llm_compressor("QuantizationModifier")),
        Recipe("qwantize: ordered GPTQ, Hessian scales", "nvfp4", qwantize, True),
    ]  # fmt: skip
