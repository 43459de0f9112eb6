"""`halfbyte calibrate`, `convert --stats` and `eval`, one after the other, as a person would type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from halfbyte.cli import app
from halfbyte.errors import HalfbyteError
from halfbyte.methods import Gptq
from tests.calibration.scenes import model

pytest.importorskip("transformers")


def halfbyte(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and 6 windows of 32 tokens."""
    made: Path = tmp_path_factory.mktemp("calibrate")
    model(made)
    np.save(made / "tokens.npy", np.random.default_rng(0).integers(0, 256, 6 * 32))
    return made


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_from_statistics_to_figures(folder: Path) -> None:
    run = ("--tokens", folder / "tokens.npy", "--length", 32)
    done = halfbyte("calibrate", folder / "llama", "-o", folder / "stats", *run, "--json", folder / "stats.json")
    assert done.exit_code == 0, done.output
    found = read(folder / "stats.json")
    assert f"{len(found['modules'])} linear layers" in done.output
    assert "model.layers.0.mlp.down_proj" in found["modules"]
    for method in ("gptq", "hessian"):
        converted = halfbyte(
            "convert", folder / "llama", folder / method, "--method", method, "--stats", folder / "stats"
        )
        assert converted.exit_code == 0, converted.output
    usual = halfbyte("convert", folder / "llama", folder / "usual")
    assert usual.exit_code == 0, usual.output
    loss = {}
    for name in ("gptq", "usual"):
        done = halfbyte("eval", folder / name, "--against", folder / "llama", *run, "--json", folder / f"{name}.json")
        assert done.exit_code == 0, done.output
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
        found = read(folder / f"{name}.json")
        assert f"{found['perplexity']['value']:.5g}" in done.output
        loss[name] = found["kl"]["value"]
    assert 0 < loss["gptq"] < loss["usual"]  # on the tokens that it was calibrated with


def test_experts_with_too_few_tokens_are_listed(tmp_path: Path) -> None:
    """By calibrate and by convert, also if it continues."""
    source, tokens = model(tmp_path, "qwen3_moe"), tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 32))
    done = halfbyte("calibrate", source, "-o", tmp_path / "stats", "--tokens", tokens, "--length", 32)
    assert "experts saw too few tokens, and keep a diagonal or nothing: model.layers.0.mlp.experts.0." in done.output
    run = ("convert", source, tmp_path / "made", "--method", "gptq", "--calibrate", tokens, "--length", 32)
    for _ in range(2):
        done = halfbyte(*run)
        assert done.exit_code == 0, done.output
        few = read(tmp_path / "made.solved" / "few_tokens.json")
        listed = f"{len(few)} experts saw too few tokens, and are rounded without feedback: "
        assert listed + "model.layers.0.mlp.experts.0." in done.output
    logged = json.loads(halfbyte(*run, "--json-log").stdout.splitlines()[0])
    assert logged == {"event": "few_tokens", "modules": few}
    assert "too few" not in halfbyte(*run, "--quiet").output


@pytest.mark.parametrize(("spelled", "wanted"), [("gptq", Gptq()), ("gptq:damping=0.02", Gptq(0.02))])
def test_options_of_gptq_reach_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str, wanted: Gptq
) -> None:
    asked: list[Gptq] = []

    def stop(plan: object, windows: object, where: object, options: Any, progress: object) -> None:
        asked.append(options.method)
        raise HalfbyteError("enough")

    monkeypatch.setattr("halfbyte.calibration.solve_sequentially", stop)
    given = ("--method", spelled, "--calibrate", folder / "tokens.npy", "--length", 32)
    assert "enough" in halfbyte("convert", folder / "llama", tmp_path / "made", *given).output
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "MODEL", "-o", "OUT"), "--text"),
        (("calibrate", "MODEL", "MODEL", "-o", "OUT", "--tokens", "TOKENS"), "one model at a time, not 2"),
        (("calibrate", "MODEL", "-o", "OUT", "--merge", "--tokens", "TOKENS"), "--merge runs no model"),
        (("calibrate", "MODEL", "-o", "OUT", "--tokens", "NOWHERE"), "NOWHERE"),
        (("eval", "MODEL", "--against", "MODEL"), "--text"),
        (("eval", "NOWHERE", "--against", "MODEL", "--tokens", "TOKENS", "--length", "32"), "NOWHERE"),
        (("convert", "MODEL", "OUT", "--method", "gptq"), "--stats"),
        (("convert", "MODEL", "OUT", "--method", "gptq", "--stats", "NOWHERE"), "halfbyte calibrate"),
        (("convert", "MODEL", "OUT", "--method", "hessian"), "--stats"),
        (("convert", "MODEL", "OUT", "--method", "gptq:damping=7", "--stats", "NOWHERE"), "damping must be a number"),
    ],
)
def test_mistakes(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    places = {"MODEL": folder / "llama", "TOKENS": folder / "tokens.npy", "OUT": folder / "out"}
    done = halfbyte(*(places.get(word, word) for word in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (folder / "out").exists()
