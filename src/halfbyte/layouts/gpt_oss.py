"""gpt-oss' layout: MXFP4 experts as blocks and scales, one tensor for all experts of a layer; all else unquantized."""

from __future__ import annotations

from typing import Any

from halfbyte.errors import UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Activations, Part, Setting, Stack

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""What the released checkpoints list. Readers take every linear layer outside the experts as unquantized anyway."""


class GptOss:
    """`quant_method: mxfp4`."""

    name = "gpt-oss"
    formats: tuple[str, ...] = ("mxfp4",)

    def parts(self, stack: Stack, format: BlockFormat, activations: Activations) -> tuple[Part, ...]:
        if not stack.count:
            raise UnsupportedError(
                f"{stack.module}: the gpt-oss layout holds stacked experts only; use --layout compressed-tensors"
            )
        blocks = stack.columns // format.block
        bytes_each = format.block // format.codes_per_byte
        return (
            Part(f"{stack.module}_blocks", "U8", (stack.count, stack.rows, blocks, bytes_each), "codes"),
            Part(f"{stack.module}_scales", "U8", (stack.count, stack.rows, blocks), "scales"),
        )

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}

    def extra_files(self, setting: Setting) -> dict[str, dict[str, Any]]:
        return {}
