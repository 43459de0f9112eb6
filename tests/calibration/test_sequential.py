"""Sequential GPTQ: what convert writes from it is a better model; it continues; experts fall back as stated."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.calibration.collect import calibrate
from halfbyte.calibration.evaluation import evaluate
from halfbyte.calibration.layered import LayeredModel
from halfbyte.calibration.sequential import Options as Solving
from halfbyte.calibration.sequential import solve_sequentially
from halfbyte.calibration.states import MEMORY
from halfbyte.calibration.weights import open_weights
from halfbyte.checkpoint import Options, make_plan, run
from halfbyte.checkpoint.io.solved import SolvedFolder
from halfbyte.errors import CheckpointError
from halfbyte.methods import Gptq
from halfbyte.quantize import quantize
from halfbyte.testing import assert_same_bits
from halfbyte.verify import verify
from tests.calibration.scenes import model, windows


def kl(path: Path, source: Path) -> float:
    return evaluate(path, source, windows(8, seed=5)).kl.value


@pytest.mark.parametrize(("format", "layout"), [("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")])
def test_each_step_is_a_better_model(tmp_path: Path, format: str, layout: str) -> None:
    """KL on other tokens: amax > GPTQ by statistics > sequential GPTQ."""
    source, text = model(tmp_path), windows(24)
    calibrate(source, text, tmp_path / "stats")
    plan = make_plan(source, Options(format, layout))
    solve_sequentially(plan, text, tmp_path / "solved")
    ways = {
        "amax": Options(format, layout, "amax"),
        "stats": Options(format, layout, "gptq", statistics=tmp_path / "stats"),
        "sequential": Options(format, layout, solved=tmp_path / "solved"),
    }
    found = {}
    for name, options in ways.items():
        run(make_plan(source, options), tmp_path / f"to-{name}")
        found[name] = kl(tmp_path / f"to-{name}", source)
    assert found["amax"] > found["stats"] > found["sequential"]
    assert verify(tmp_path / "to-sequential", source).count("error") == 0


def test_q_k_and_v_share_their_amax(tmp_path: Path) -> None:
    source = model(tmp_path)
    solve_sequentially(make_plan(source, Options()), windows(), tmp_path / "solved")
    folder = SolvedFolder(tmp_path / "solved")
    amaxes = {folder.amax(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"}
    assert len(amaxes) == 1


def test_weights_that_share_a_scale_have_the_headroom_of_one_tensor(tmp_path: Path) -> None:
    """Another one is kept by convert as well."""
    source = model(tmp_path)
    weights, plan = open_weights(source), make_plan(source, Options())
    folders = {}
    for name, method in (("own", Gptq(headroom=1)), ("chosen", Gptq()), ("given", Gptq(headroom=1.5))):
        solve_sequentially(plan, windows(), tmp_path / name, Solving(method))
        folders[name] = SolvedFolder(tmp_path / name)
        run(make_plan(source, Options(solved=tmp_path / name)), tmp_path / f"to-{name}")
    ratios = set()
    for modules in (
        [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
        [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")],
        ["model.layers.1.mlp.down_proj"],
    ):
        whole = np.concatenate([weights.matrix(module) for module in modules])
        optimal, plain = (
            np.asarray(quantize(whole, "nvfp4", "modelopt", method).global_scale) for method in ("optimal", "amax")
        )
        ratios.add(round(float(optimal / plain), 2))
        for module in modules:
            own, chosen, given = (folders[name].amax(f"{module}.weight") for name in ("own", "chosen", "given"))
            assert own == np.abs(whole).max()
            assert chosen / own == pytest.approx(float(optimal / plain))
            assert given == np.float32(1.5 * np.float64(own))
    assert max(ratios) > 1  # some headroom was taken


def test_a_stopped_run_continues(tmp_path: Path) -> None:
    source, text = model(tmp_path), windows()
    plan = make_plan(source, Options())
    solve_sequentially(plan, text, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve_sequentially(plan, text, tmp_path / "s", progress=stop)
    assert [file.name for file in (tmp_path / "s").glob("*.safetensors")] == ["layer-00000.safetensors"]
    solve_sequentially(plan, text, tmp_path / "s")
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "s" / file.name).read_bytes() == file.read_bytes()


def test_a_finished_folder_is_taken_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = model(tmp_path, "qwen3_moe"), windows()
    plan, seen = make_plan(source, Options()), []
    few = solve_sequentially(plan, text, tmp_path / "s")
    assert few

    def run(self: LayeredModel, number: int) -> None:
        raise AssertionError("a layer ran")

    monkeypatch.setattr(LayeredModel, "layer", run)
    again = solve_sequentially(plan, text, tmp_path / "s", progress=lambda done, total: seen.append((done, total)))
    assert (again, seen) == (few, [(2, 2)])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_threads_and_memory_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nor whether batches wait in a layer or start again, with states in a file."""
    plan, text = make_plan(model(tmp_path, name), Options()), windows()
    before = torch.get_num_threads()
    found = []
    try:
        for threads, memory in ((1, MEMORY), (2, MEMORY), (2, 0)):
            monkeypatch.setenv("HALFBYTE_THREADS", str(threads))
            torch.set_num_threads(threads)
            folder = tmp_path / f"{threads}-{memory}"
            solve_sequentially(plan, text, folder, Solving(memory=memory))
            assert torch.get_num_threads() == threads
            found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_a_killed_run_continues(tmp_path: Path) -> None:
    """Killed while the second layer is solved, without a chance to clean up."""
    source, text = model(tmp_path), windows()
    plan = make_plan(source, Options())
    solve_sequentially(plan, text, tmp_path / "whole")
    process = multiprocessing.get_context("spawn").Process(target=_solve_until_killed, args=(source, tmp_path / "s"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "s" / "layer-00000.safetensors").exists()
    solve_sequentially(plan, text, tmp_path / "s")
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "s" / file.name).read_bytes() == file.read_bytes()


def _solve_until_killed(source: Path, target: Path) -> None:
    def visit(module: str, weight: torch.Tensor) -> None:
        if module.startswith("model.layers.1."):
            os.kill(os.getpid(), signal.SIGKILL)

    solve_sequentially(make_plan(source, Options()), windows(), target, visit=visit)


def test_what_a_kill_left_of_the_header_is_no_obstacle(tmp_path: Path) -> None:
    plan = make_plan(model(tmp_path), Options())
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "solved.json.part").write_text('{"files": [')
    solve_sequentially(plan, windows(), tmp_path / "s")
    assert not list((tmp_path / "s").glob("*.part"))
    (tmp_path / "s" / "solved.json").write_text('{"files": [')
    with pytest.raises(CheckpointError, match=r"solved.json is damaged: .*; delete the folder .*s and start again"):
        solve_sequentially(plan, windows(), tmp_path / "s")


def test_another_run_is_refused(tmp_path: Path) -> None:
    plan = make_plan(model(tmp_path), Options())
    solve_sequentially(plan, windows(), tmp_path / "s")
    with pytest.raises(CheckpointError, match="another source, text or method"):
        solve_sequentially(plan, windows(seed=1), tmp_path / "s")
    with pytest.raises(CheckpointError, match="another source, text or method"):
        solve_sequentially(plan, windows(), tmp_path / "s", Solving(Gptq(damping=0.5)))


def test_an_expert_without_tokens_has_optimal_scales(tmp_path: Path) -> None:
    """One token reaches two of four experts; the two others are rounded as convert does without statistics."""
    source = model(tmp_path, "qwen3_moe")
    plan = make_plan(source, Options())
    text = windows(1, 2)
    text.tokens[:] = text.tokens[0, 0]
    solve_sequentially(plan, text, tmp_path / "solved")
    stats = calibrate(source, text, tmp_path / "stats")
    folder = SolvedFolder(tmp_path / "solved")
    weights = open_weights(source)
    names = [f"model.layers.0.mlp.experts.{expert}.down_proj" for expert in range(4)]
    without = [name for name in names if name not in stats]
    assert without
    for name in without:
        matrix = weights.matrix(name)
        amax = folder.amax(f"{name}.weight")
        wanted = quantize(matrix, "nvfp4", "modelopt", method="optimal", global_amax=amax)
        codes, scales = folder.rows(f"{name}.weight", matrix.shape, 0, len(matrix), plan.format)  # type: ignore[arg-type]
        assert_same_bits(codes, np.asarray(wanted.codes))
        assert_same_bits(scales, np.asarray(wanted.scales))
