"""Experts that a checkpoint stacks in one tensor: which names hold them, which axis is which, whose rows are whose.

The orientation comes from the family of the model, never from the shape.
"""

from __future__ import annotations

from typing import Literal

Stacking = Literal["halves", "transposed", "interleaved"]
"""How unquantized stacked experts lie. halves: [E, 2I, H], gate then up; transposed: [E, H, 2I], gate then up;
interleaved: [E, H, 2I], gate and up in turns. down_proj is [E, H, I], or [E, I, H] when transposed or interleaved."""

STACKS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of stacks. Biases have the same names with `_bias` behind them."""


def is_stack(name: str) -> bool:
    """Whether a tensor of that name holds all experts of a layer."""
    return name.endswith(STACKS)


def is_transposed(stacking: Stacking) -> bool:
    """Whether each expert of an unquantized stack lies as [inputs, outputs]."""
    return stacking != "halves"


def projections(stack: str, rows: int, stacking: Stacking) -> dict[str, slice]:
    """Projection → its rows, for one expert of a stack that lies as [outputs, inputs]; or its elements of a bias.

    >>> projections("mlp.experts.gate_up_proj", 8, "interleaved")
    {'gate_proj': slice(0, 8, 2), 'up_proj': slice(1, 8, 2)}
    >>> projections("mlp.experts.down_proj", 8, "interleaved")
    {'down_proj': slice(0, 8, 1)}
    """
    if stack.endswith("down_proj"):
        return {"down_proj": slice(0, rows, 1)}
    half = rows // 2
    if stacking == "interleaved":
        return {"gate_proj": slice(0, 2 * half, 2), "up_proj": slice(1, 2 * half, 2)}
    return {"gate_proj": slice(0, half, 1), "up_proj": slice(half, 2 * half, 1)}


def expert_module(stack: str, expert: int, projection: str) -> str:
    """The name of one expert's projection where experts stand alone: `experts.E.gate_proj`."""
    return f"{stack.rpartition('.')[0]}.{expert}.{projection}"
