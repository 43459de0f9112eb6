"""Exclude lists and the names that servers ask for, to be put to verify's matchers and to the servers themselves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from halfbyte.layouts.description import Matcher

NAMES = [
    "lm_head",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn.fused_qkv_a_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.experts",
    "model.layers.1.mlp.shared_experts.gate_up_proj",
    "model.layers.1.mlp.shared_experts.down_proj",
    "model.layers.10.mlp.down_proj",
    "model.layers.11.mlp.experts",
    "language_model.model.layers.1.mlp.gate",
    "visual.blocks.0.attn.proj",
]
LISTS = [
    ["lm_head"],
    ["model.layers.1*"],
    ["model.layers.1"],
    ["model.layers.1.*"],
    ["model.layers.1.mlp.gate"],
    ["*.mlp.gate"],
    ["*.mlp.gate.*"],
    ["*gate*"],
    ["mlp"],
    ["model.layers.1.mlp.experts"],
    ["model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.0.up_proj"],
    ["model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.experts"],
    ["model.layers.1.mlp.shared_experts.gate_proj", "model.layers.1.mlp.shared_experts.up_proj"],
    ["model.layers.1.mlp.shared_experts.down_proj"],
    [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"],
    ["model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa"],
    ["model.layers.5.self_attn.kv_a_proj_with_mqa"],
    ["visual*"],
    ["visual.*", "lm_head", "model.layers.10.mlp.down_proj"],
]


def disagreements(python: Path, client: str, matcher: Matcher, work: Path) -> list[str]:
    """Where verify's matcher says something else than the client does. Lists that the client refuses do not count."""
    cases = work / "cases.json"
    cases.write_text(json.dumps([[patterns, NAMES] for patterns in LISTS]))
    program = Path(__file__).parent / "matcher_client.py"
    done = subprocess.run([python, program, client, cases], capture_output=True, text=True, timeout=300, check=True)
    answers = json.loads(done.stdout.splitlines()[-1])
    flat = [answer for row in answers for answer in row]
    if flat.count(True) < 20 or flat.count(False) < 20:
        raise AssertionError(f"{client} answers {flat.count(True)} times yes and {flat.count(False)} times no")
    return [
        f"{patterns} on {name}: {client} says {said}"
        for patterns, row in zip(LISTS, answers, strict=True)
        for name, said in zip(NAMES, row, strict=True)
        if said is not None and matcher(name, patterns) != said
    ]
