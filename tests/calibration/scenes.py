"""Tiny models, windows of random tokens, and what transformers itself computes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.peers.spec import quiet
from halfbyte.calibration.tokens import Windows
from tests.tiny_models import make

MODELS = ("llama", "qwen3", "qwen3_moe", "gpt_oss")


def windows(count: int = 5, length: int = 40, seed: int = 0) -> Windows:
    tokens = np.random.default_rng(seed).integers(0, 256, (count, length))
    return Windows(tokens.astype(np.int64), f"seed {seed}")


def model(tmp_path: Path, name: str = "llama") -> Path:
    return make(name, tmp_path / name)


def whole_model(path: Path) -> Any:
    """The model as transformers loads it, in float32."""
    with quiet():
        import transformers

        transformers.logging.set_verbosity_error()
        found = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return found.eval()


def logits(found: Any, tokens: Windows) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(found(torch.from_numpy(tokens.tokens)).logits)
