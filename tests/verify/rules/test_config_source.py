"""config.json of a checkpoint against that of its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint import Options, make_plan, run
from halfbyte.verify import verify
from halfbyte.verify.rules.config_source import config_problems
from tests import tiny_models as models
from tests.verify.headers import checkpoint, lines


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    source = models.make("qwen3_5_moe", folder / "source")
    run(make_plan(source, Options(layout="compressed-tensors")), folder / "made")
    return folder / "made", source


def said(pair: tuple[Path, Path], **changes: Any) -> list[str]:
    """What verify says of the config after these changes; the file is put back."""
    path = pair[0] / "config.json"
    before = path.read_text(encoding="utf-8")
    config = json.loads(before)
    for name, value in changes.items():
        place, key = (config["text_config"], name.removeprefix("text_")) if name.startswith("text_") else (config, name)
        if value is None:
            del place[key]
        else:
            place[key] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        found = verify(pair[0], pair[1]).problems
    finally:
        path.write_text(before, encoding="utf-8")
    return [problem.text for problem in found if problem.rule == "config" and "in the source" in problem.text]


def test_what_a_conversion_writes_is_no_difference(pair: tuple[Path, Path]) -> None:
    assert said(pair) == []
    assert said(pair, transformers_version="9.9", torch_dtype="float16") == []


def test_other_settings_are_named(pair: tuple[Path, Path]) -> None:
    (text,) = said(pair, text_hidden_size=4096)
    assert text.startswith("text_config.hidden_size is 4096, but 128 in the source")
    (text,) = said(pair, text_hidden_size=None)
    assert text.startswith("text_config.hidden_size is absent, but 128")
    assert len(said(pair, rope_theta=5.0, extra=[1] * 100)) == 2


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"a": 1, "b": {"c": [1], "d": None}}, {"a": 1, "b": {"c": [1]}}, []),
        ({"dtype": 1, "expert_dtype": 1, "b": {"torch_dtype": 1}}, {"_name_or_path": 1, "b": {"dtype": 2}}, []),
        ({"b": {"c": {"d": 1}}, "a": 0}, {"b": {"c": {"d": 2}}}, ["a is 0, but absent", "b.c.d is 1, but 2"]),
        ({"a": {"b": 1}}, {"a": 3}, ["a is {'b': 1}, but 3"]),
        ({"a": "x" * 58}, {"a": "x" * 59}, [f"a is '{58 * 'x'}', but '{56 * 'x'}…"]),
    ],
)
def test_differences_by_name(mine: dict[str, Any], theirs: dict[str, Any], said: list[str]) -> None:
    end = "in the source: another model, or an edited one"
    found = lines(config_problems(checkpoint({}, mine), checkpoint({}, theirs)))
    assert found == [f"warning [config] config.json: {text} {end}" for text in said]
