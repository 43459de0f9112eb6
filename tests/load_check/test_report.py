"""How the answer of a loader is told."""

from __future__ import annotations

import json

from halfbyte.load_check import LoadReport, Mismatch
from halfbyte.load_check.report import grouped


def test_all_is_well() -> None:
    report = LoadReport("transformers", "5.22.2", tensors=21)
    assert report.clean
    assert report.sentences() == [
        "transformers 5.22.2: each of the 21 tensors has its place in the model, and none is missing"
    ]


def test_each_kind_of_trouble_has_a_sentence() -> None:
    report = LoadReport(
        "vllm",
        "0.32.0",
        tensors=9,
        missing=("layers.0.up.weight", "layers.1.up.weight"),
        unexpected=("head.weight",),
        mismatched=(Mismatch("layers.3.down.weight", (64, 32), (64, 64)), Mismatch("scale", (), (1,))),
        error="KeyError: 'x'",
    )
    assert not report.clean
    assert report.sentences() == [
        "vLLM 0.32.0 cannot load it: KeyError: 'x'",
        "vLLM 0.32.0 finds no tensor for 2 weights: layers.#.up.weight (2)",
        "vLLM 0.32.0 has no place for 1 tensor: head.weight",
        "vLLM 0.32.0 wants another shape for 2 tensors: layers.#.down.weight, scale; "
        "layers.3.down.weight is 64 × 32 and should be 64 × 64",
    ]
    assert report.mismatched[1].text == "scale is a scalar and should be 1"


def test_json_has_every_name() -> None:
    missing = tuple(f"layers.{layer}.up.weight" for layer in range(50))
    report = LoadReport("transformers", "5.22.2", 1, missing, mismatched=(Mismatch("a", (1,), (2,)),))
    found = json.loads(json.dumps(report.as_json()))
    assert found["missing"] == list(missing)
    assert found["mismatched"] == [{"name": "a", "stored": [1], "wanted": [2]}]
    assert found["clean"] is False
    assert found["error"] is None


def test_many_kinds_of_names_are_counted() -> None:
    names = [f"layers.{layer}.part_{kind}" for kind in range(8) for layer in range(8 - kind)]
    told = grouped(names)
    assert told.startswith("layers.#.part_0 (8), layers.#.part_1 (7)")
    assert told.endswith("layers.#.part_5 (3) and 3 more")
