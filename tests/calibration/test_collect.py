"""Statistics: those of hooks on the whole model; continued after a stop; refused for another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.calibration.collect import Options, calibrate
from halfbyte.calibration.layered import LayeredModel
from halfbyte.checkpoint import Options as Converting
from halfbyte.checkpoint import make_plan
from halfbyte.checkpoint.io.header import read_header
from halfbyte.errors import InputError, UnknownNameError
from halfbyte.statistics import open_statistics
from tests.calibration.scenes import model, whole_model, windows

LAYER = "model.layers.1"


def hooked(path: Path, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every input of every nn.Linear of the whole model, by hooks."""
    found: dict[str, list[torch.Tensor]] = {}
    whole = whole_model(path)

    def keep(name: str) -> Any:
        return lambda module, args: found.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))

    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        for row in tokens:
            whole(row[None])
    return {name: torch.cat(rows) for name, rows in found.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_statistics_are_those_of_hooks(tmp_path: Path, name: str) -> None:
    path, text = model(tmp_path, name), windows()
    inputs = hooked(path, torch.from_numpy(text.tokens))
    found = calibrate(path, text, tmp_path / "s")
    assert set(found.names) == set(inputs) - {"lm_head"}
    for module in found.names:
        one, x = found.get(module), inputs[module].double()
        assert one is not None
        assert one.tokens == len(x) == text.tokens.size
        np.testing.assert_allclose(np.asarray(one.second_moment), (x.T @ x / len(x)).numpy(), rtol=1e-4, atol=1e-5)
        assert one.input_amax == pytest.approx(float(x.abs().max()), rel=1e-5)
        assert one.input_range is not None
        assert 0 < one.input_range <= one.input_amax
    assert found.stored_as(f"{LAYER}.self_attn.v_proj") == f"{LAYER}.self_attn.q_proj"
    assert found.stored_as(f"{LAYER}.mlp.up_proj") == f"{LAYER}.mlp.gate_proj"


@pytest.mark.parametrize("kind", ["blocks", "diagonal"])
def test_less_than_full_moments_are_parts_of_them(tmp_path: Path, kind: str) -> None:
    path, text = model(tmp_path), windows()
    full, less = calibrate(path, text, tmp_path / "f"), calibrate(path, text, tmp_path / "l", Options(kind))
    for module in full.names:
        whole, part = full.get(module), less.get(module)
        assert whole is not None
        assert part is not None
        assert part.second_moment is None
        np.testing.assert_allclose(np.asarray(part.mean_squares()), np.asarray(whole.mean_squares()), rtol=1e-4)
        if kind == "blocks":
            np.testing.assert_allclose(np.asarray(part.blocks), np.asarray(whole.block_moments()), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_have_their_own_tokens(tmp_path: Path, name: str) -> None:
    """Every token goes to two of four experts; those with fewer than 2 · K tokens keep a diagonal and are listed."""
    text = windows()
    found = calibrate(model(tmp_path, name), text, tmp_path / "s")
    ups = [f"{LAYER}.mlp.experts.{expert}.up_proj" for expert in range(4)]
    ones = [found.get(up) for up in ups]
    assert sum(one.tokens for one in ones if one is not None) == 2 * text.tokens.size
    few = found.header["few_tokens"]
    for up, one in zip(ups, ones, strict=True):
        assert one is not None
        assert found.stored_as(up) == up.replace("up_proj", "gate_proj")
        assert (one.second_moment is None) == (one.tokens < 2 * one.width) == (up in few)
        assert one.mean_squares() is not None


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_stopped_run_continues(tmp_path: Path, name: str) -> None:
    path, text = model(tmp_path, name), windows()
    calibrate(path, text, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(path, text, tmp_path / "s", progress=stop)
    assert list(files(tmp_path / "s")) == ["layer-00000.safetensors"]
    first = (tmp_path / "s" / "layer-00000.safetensors").stat().st_mtime_ns
    assert not open_statistics(tmp_path / "s").header["complete"]
    calibrate(path, text, tmp_path / "s")
    assert (tmp_path / "s" / "layer-00000.safetensors").stat().st_mtime_ns == first
    assert files(tmp_path / "s") == files(tmp_path / "whole")
    headers = [json.loads((tmp_path / one / "statistics.json").read_text()) for one in ("s", "whole")]
    assert headers[0]["complete"]
    assert headers[0] == headers[1], "experts with too few tokens in the first layer too"
    few = {module.split(".")[2] for module in headers[1]["few_tokens"]}
    assert few == ({"0", "1"} if name == "qwen3_moe" else set())
    calibrate(path, text, tmp_path / "s")
    assert json.loads((tmp_path / "s" / "statistics.json").read_text()) == headers[1], "nothing to do"


def test_a_finished_folder_is_opened_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text, seen = model(tmp_path), windows(), []
    calibrate(path, text, tmp_path / "s")
    before = (tmp_path / "s" / "statistics.json").stat().st_mtime_ns

    def run(self: LayeredModel, number: int) -> None:
        raise AssertionError("a layer ran")

    monkeypatch.setattr(LayeredModel, "layer", run)
    found = calibrate(path, text, tmp_path / "s", progress=lambda done, total: seen.append((done, total)))
    assert found.names == open_statistics(tmp_path / "s").names
    assert (tmp_path / "s" / "statistics.json").stat().st_mtime_ns == before
    assert seen == [(2, 2)]


def test_another_run_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path)
    calibrate(path, windows(), tmp_path / "s")
    with pytest.raises(InputError, match=r"another run \(text differs\)"):
        calibrate(path, windows(seed=1), tmp_path / "s")
    with pytest.raises(InputError, match=r"another run \(options differs\)"):
        calibrate(path, windows(), tmp_path / "s", Options("diagonal"))
    with pytest.raises(InputError, match="is not empty and holds no"):
        calibrate(path, windows(), path)


def test_another_training_of_the_same_model_is_refused(tmp_path: Path) -> None:
    """Its config and headers are the same."""
    path = model(tmp_path)
    calibrate(path, windows(), tmp_path / "s")
    converting = Converting(method="gptq", statistics=tmp_path / "s")
    assert not any("not of these files" in note for note in make_plan(path, converting).notes)
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    place = read_header(shard).tensors["model.layers.1.mlp.up_proj.weight"]
    middle = (place.start + place.stop) // 2
    data[middle] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=r"another run \(model differs\)"):
        calibrate(path, windows(), tmp_path / "s")
    assert any("not of these files" in note for note in make_plan(path, converting).notes)


def test_what_is_no_kind_of_moments_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="kind of moments 'all'"):
        Options("all")


def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    text = windows()
    text.tokens[0, 0] = 256
    with pytest.raises(InputError, match="token 256 is not in the model's vocabulary of 256"):
        calibrate(model(tmp_path), text, tmp_path / "s")
