"""Algorithms of Model-Optimizer's config files against the tensors, and the two files against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.verify.rules.algorithms import READERS, algorithm_problems
from halfbyte.verify.stored import read_contents
from tests.verify.headers import Headers, checkpoint, compressed, fp8, lines, modelopt

FOURS: Headers = modelopt("a") | modelopt("b")
BOTH: Headers = FOURS | fp8("c")
OUTER, NESTED = "config.json", "hf_quant_config.json"
FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}


def found(path: Path, headers: Headers, outer: object = None, nested: object = None) -> list[str]:
    if nested is not None:
        (path / NESTED).write_text(json.dumps({"quantization": nested}))
    made = checkpoint(headers, {} if outer is None else {"quantization_config": outer}, path)
    return lines(algorithm_problems(made, read_contents(made)))


def of_config(path: Path, headers: Headers, **config: object) -> list[str]:
    return found(path, headers, {"quant_method": "modelopt", **config})


@pytest.mark.parametrize("file", [OUTER, NESTED])
@pytest.mark.parametrize(
    ("headers", "algorithm", "expected"),
    [
        (FOURS, "nvfp4", None),
        (FOURS, "W4A16_NVFP4", None),
        (fp8("c"), "FP8", None),
        (fp8("c"), "FP8_PB_WO", None),
        (compressed("a"), "FP8", None),
        ({}, None, None),
        (FOURS, None, "quant_algo is missing: vLLM and SGLang stop there"),
        (FOURS, "FP8", f"quant_algo is 'FP8', but a and 1 more weight are nvfp4 (modelopt); {READERS}"),
        (
            FOURS | modelopt("d"),
            "INT4",
            f"quant_algo is 'INT4', but a and 2 more weights are nvfp4 (modelopt); {READERS}",
        ),
        (BOTH, "NVFP4", f"quant_algo is 'NVFP4', but c is fp8 (weight_scale); {READERS}"),
        (BOTH, "FP8", f"quant_algo is 'FP8', but a and 1 more weight are nvfp4 (modelopt); {READERS}"),
        (BOTH, "MIXED_PRECISION", "quant_algo is MIXED_PRECISION, but there are no quantized_layers: vLLM stops"),
    ],
)
def test_one_algorithm(tmp_path: Path, file: str, headers: Headers, algorithm: object, expected: str | None) -> None:
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    told = found(tmp_path, headers, *((config, None) if file == OUTER else (None, config)))
    assert told == ([] if expected is None else [f"error [scheme] {file}: {expected}"])


@pytest.mark.parametrize(("size", "wrong"), [(None, False), (16, False), (17, True), (0, True)])
def test_group_size(tmp_path: Path, size: object, wrong: bool) -> None:
    text = f"group_size is {size}, but a has one scale for 16 elements; {READERS}"
    expected = [f"error [scheme] {OUTER}: {text}"] if wrong else []
    assert of_config(tmp_path, modelopt("a"), quant_algo="NVFP4", group_size=size) == expected
    assert of_config(tmp_path, fp8("c"), quant_algo="FP8", group_size=size) == []


def test_layers_of_a_mixed_config(tmp_path: Path) -> None:
    layers = {
        "a": {"quant_algo": "FP8", "group_size": None},
        "b": {"quant_algo": "nvfp4", "group_size": 32},
        "c": {"group_size": 7},
        "d": {"quant_algo": "FP8"},
        "e": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "gone": {"quant_algo": "FP9"},
        "f": "NVFP4",
    }
    headers = BOTH | fp8("d") | modelopt("e") | modelopt("f")
    assert of_config(tmp_path, headers, quant_algo="mixed_precision", quantized_layers=layers) == [
        f"error [scheme] {OUTER}: quantized_layers.a.quant_algo is 'FP8', but a is nvfp4 (modelopt); {READERS}",
        f"error [scheme] {OUTER}: quantized_layers.b.group_size is 32, but b has one scale for 16 elements; {READERS}",
        f"error [scheme] {OUTER}: quantized_layers.c.quant_algo is '', but c is fp8 (weight_scale); {READERS}",
    ]


def test_configs_of_others_are_left_alone(tmp_path: Path) -> None:
    wrong = {"quant_algo": "INT4"}
    assert found(tmp_path, FOURS) == found(tmp_path, FOURS, {"quant_method": "fp8", **wrong}) == []
    assert found(tmp_path, FOURS, [wrong]) == []
    moe = {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}
    assert found(tmp_path, FOURS, moe, wrong) == []  # DeepSeek's has the file for other readers
    assert found(tmp_path, FOURS, None, wrong) == [
        f"error [scheme] {NESTED}: quant_algo is 'INT4', but a and 1 more weight are nvfp4 (modelopt); {READERS}"
    ]
    assert found(tmp_path, FOURS, None, ["no object"]) == []


def group(targets: list[str], weights: Any = FLOAT4, **more: object) -> dict[str, object]:
    return {"targets": targets, "weights": weights, **more}


def test_groups_against_the_tensors(tmp_path: Path) -> None:
    eight = {"num_bits": 8, "type": "float"}
    good = {"g": group(["Linear"]), "h": group(["c"], eight)}
    assert of_config(tmp_path, BOTH, quant_algo="W4A16_NVFP4", config_groups={}, group_size=16) == [
        f"error [scheme] {OUTER}: quant_algo is 'W4A16_NVFP4', but c is fp8 (weight_scale); {READERS}"
    ]
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    assert of_config(tmp_path, BOTH, **mixed, config_groups=good) == []
    wrong = {"g": group(["Linear"], {"num_bits": 8, "group_size": 32}), "h": group(["c"], FLOAT4)}
    where = "config_groups.{}.weights.{} is {}, but {} by the tensors of {}; " + READERS
    assert of_config(tmp_path, BOTH, **mixed, config_groups=wrong) == [
        f"error [scheme] {OUTER}: {where.format(*words)}"
        for words in (
            ("g", "num_bits", 8, 4, "a"),
            ("g", "type", None, "'float'", "a"),
            ("g", "group_size", 32, 16, "a"),
            ("h", "num_bits", 4, 8, "c"),
        )
    ]
    assert of_config(tmp_path, BOTH | fp8("d"), **mixed, config_groups={"g": group(["Linear"])}) == [
        f"error [scheme] {OUTER}: {where.format('g', 'num_bits', 4, 8, 'c')}"
    ]
    attention = {"k": group(["LlamaAttention"], eight)}
    assert of_config(tmp_path, BOTH, **mixed, config_groups=attention) == []
    assert of_config(tmp_path, BOTH, **mixed, config_groups=attention | {"g": group(["b"])}) == [
        "error [targets] a: stored as nvfp4 (modelopt), but no target of config_groups matches it",
        "error [targets] c: stored as fp8 (weight_scale), but no target of config_groups matches it",
    ]


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("algorithm", ["NVFP4", "w4a16_nvfp4", "NVFP4_AWQ"])
def test_activations_of_groups(tmp_path: Path, algorithm: str, inputs: bool) -> None:
    groups = {"g": group(["a"]), "h": group(["Linear"], input_activations=FLOAT4 if inputs else None)}
    agree = algorithm == "NVFP4_AWQ" or (algorithm == "NVFP4") == inputs
    have = "have" if inputs else "have no"
    text = f"quant_algo is {algorithm.upper()}, but config_groups {have} input_activations"
    told = of_config(tmp_path, FOURS, quant_algo=algorithm, config_groups=groups)
    assert told == ([] if agree else [f"error [scheme] {OUTER}: {text}: readers follow one or the other"])


FULL = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "x"]}


@pytest.mark.parametrize(
    ("outer", "nested", "expected"),
    [
        ({}, {}, []),
        ({"ignore": ["x", "lm_head"]}, {}, []),
        ({"ignore": ["x", "a.b"]}, {}, ["exclude_modules differs from ignore in config.json, for one by 'a.b'"]),
        ({"ignore": []}, {}, ["exclude_modules differs from ignore in config.json, for one by 'lm_head'"]),
        ({}, {"quant_algo": "W4A16_NVFP4"}, ["quant_algo is 'W4A16_NVFP4' here and 'NVFP4' in config.json"]),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}, []),
        ({"kv_cache_scheme": "FP8"}, {"kv_cache_quant_algo": "FP8"}, []),
        ({"kv_cache_scheme": {}}, {}, ["kv_cache_quant_algo is None, but kv_cache_scheme in config.json says '{}'"]),
        ({"kv_cache_scheme": ""}, {"kv_cache_quant_algo": ""}, []),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            {"kv_cache_quant_algo": "FP8"},
            [
                "kv_cache_quant_algo is 'FP8', but kv_cache_scheme in config.json says "
                "\"{'num_bits': 8, 'type': 'int'}\""
            ],
        ),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            {},
            ["kv_cache_quant_algo is None, but kv_cache_scheme in config.json says 'FP8'"],
        ),
        (
            {},
            {"kv_cache_quant_algo": "FP8"},
            ["kv_cache_quant_algo is 'FP8', but kv_cache_scheme in config.json says None"],
        ),
    ],
)
def test_two_files_that_disagree(
    tmp_path: Path, outer: dict[str, object], nested: dict[str, object], expected: list[str]
) -> None:
    config = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", **outer}
    told = found(tmp_path, FOURS, config, FULL | nested)
    assert told == [f"error [config] {NESTED}: {text}" for text in expected]


def test_keys_that_vllm_requires(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert found(tmp_path, FOURS, config, {"quant_algo": "NVFP4", "group_size": None}) == [
        f"error [config] {NESTED}: lacks {key}, which vLLM requires (null or [] will do)"
        for key in ("kv_cache_quant_algo", "exclude_modules")
    ]
